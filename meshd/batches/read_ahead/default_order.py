"""DefaultOrders: the order for loaders that name none, chosen by the type of the disks with the samples.

Law: one decision per snapshot, made by the first node that receives a request and recorded in the control
store: all ranks get the same plan from any node, whatever disks it has. Plans always name their order; an
order that a client names is never changed. Without other information, the order is a full shuffle.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.batches.read_ahead.shuffle_advice import blocks_save_enough
from meshd.control.control_api import ControlError
from meshd.control.default_orders import DefaultOrder
from meshd.core.api_errors import busy
from meshd.peer_reads.replica_selection import UNREACHABLE_STATES
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError
from meshd.rpc.peer_rpc import PREFIX, PeerCall, handler
from meshd.util.async_tasks import SingleFlight
from meshwire.plan.shuffle import ShuffleSpec, shuffle_document
from meshwire.strict_json import checked_integer, checked_object, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.auth.identity import Caller
    from meshd.batches.read_ahead.cost_estimator import ReadCostEstimator
    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.default_orders import DefaultOrderTable
    from meshd.core.document_store import DocumentStore
    from meshd.datasets.service import DatasetService
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.dataset.snapshot import Snapshot

_MIN_SHARDS: Final = 4  # of a block
_MAX_RUNS: Final = 1.1  # of samples of one class, relative to a full shuffle
_MAX_BATCH: Final = 1 << 24
_EARLIER: Final = (404, 405)  # answers of nodes of an earlier release


class OrderCostRequest(msgspec.Struct, frozen=True):
    """Requests what orders of a snapshot cost a node's rotational disks. `batch`: rows of a step."""

    snapshot: str
    batch: int = 256


class OrderCosts(msgspec.Struct, frozen=True):
    """What an epoch costs the rotational disks of `node`: in a full shuffle, and in blocks of as many
    `shards` as fit its memory. Without any of the samples on such disks, `shards` is 0. `labelled`: `runs`
    are of one class, else of one shard."""

    node: str
    shards: int = 0
    full_seeks: int = 0
    full_seconds: float = 0.0
    blocks_seeks: int = 0
    blocks_seconds: float = 0.0
    media_seconds: float = 0.0
    distance: float = 1.0
    runs: float = 1.0
    labelled: bool = False

    @property
    def blocks_pay(self) -> bool:
        """Whether blocks save enough disk time."""
        return blocks_save_enough(self.full_seconds, self.blocks_seconds, self.media_seconds)


ORDER_COSTS: Final = PeerCall(
    f"{PREFIX}order-costs", request=OrderCostRequest, response=OrderCosts, errors="batch"
)


def decide_order(costs: Sequence[OrderCosts], now_ms: int, earlier: str = "") -> DefaultOrder:
    """Return the order by what each node said. `earlier`: a node of a release that chooses no order, whose
    clients have a full shuffle."""
    if earlier:
        return DefaultOrder(now_ms, "global", f"{earlier} runs a release that chooses no order")
    there = [each for each in costs if each.shards]
    if not there:
        return DefaultOrder(now_ms, "global", "its samples are not on rotational disks")
    least = min(there, key=lambda each: each.shards)
    blocks = f"Blocks(shards={least.shards})"
    named = ", ".join(each.node for each in there[:3]) + (", …" if len(there) > 3 else "")
    message = (
        f"an epoch costs the rotational disks of {named} "
        f"{_cost([(each.full_seeks, each.full_seconds) for each in there])} in a full shuffle, "
        f"{_cost([(each.blocks_seeks, each.blocks_seconds) for each in there])} in {blocks}"
    )
    if not any(each.blocks_pay for each in there):
        return DefaultOrder(now_ms, "global", message)
    if least.shards < _MIN_SHARDS or (least.labelled and least.runs > _MAX_RUNS):
        far = f"runs of one class or shard would be {least.runs:.2f} times as long"
        return DefaultOrder(
            now_ms, "global", f"{message}, but no more shards fit the memory for read-ahead, and {far}"
        )
    return DefaultOrder(now_ms, "blocks", message, least.shards, least.distance, least.runs)


def _cost(parts: Sequence[tuple[int, float]]) -> str:
    return f"{sum(seeks for seeks, _ in parts):,} seeks and {sum(seconds for _, seconds in parts):.0f} s"


class DefaultOrders:
    """Chooses and tells default orders; one per worker. Answers other nodes what orders cost here."""

    def __init__(
        self,
        datasets: DatasetService,
        catalog: DocumentStore,
        estimator: ReadCostEstimator,
        table: DefaultOrderTable,
        mesh: ClusterView,
        peers: PeerClient,
        clock: Clock,
    ) -> None:
        self._datasets, self._catalog, self._estimator, self._table = datasets, catalog, estimator, table
        self._mesh, self._peers, self._clock = mesh, peers, clock
        self._choosing: SingleFlight[str, DefaultOrder] = SingleFlight()

    def __repr__(self) -> str:
        return f"<DefaultOrders of {self._mesh.node_id}>"

    async def choose(self, caller: Caller, digest: str, body: bytes) -> dict[str, Any]:
        """Return the answer to `POST /-/snapshots/{hash}/order`.

        Raises PlanError for a wrong body, and BatchError NoSuchSnapshot, AccessDenied, Busy.
        """
        document = checked_object(read_json(body), "", ("batch",))
        batch = checked_integer(document.get("batch", 256), "batch", 1, _MAX_BATCH)
        snapshot = await self._datasets.snapshot(caller, digest)
        try:
            order, _ = await self._choosing.run(digest, lambda: self._choose(snapshot, batch))
        except ControlError as error:
            raise busy(str(error)) from error
        shuffle = ShuffleSpec(order.kind, order.shards) if order.shards else ShuffleSpec(order.kind)
        return {
            "snapshot": digest,
            "shuffle": shuffle_document(shuffle),
            "reason": order.reason,
            "distance": order.distance,
            "runs": order.runs,
        }

    async def _choose(self, snapshot: Snapshot, batch: int) -> DefaultOrder:
        found = await self._table.find(snapshot.hash)
        if found is not None:
            return found
        request = OrderCostRequest(snapshot.hash, batch)
        if self._mesh.single_node:
            order = decide_order([await self._own_costs(snapshot, batch)], self._clock.now_ms())
            return (
                await self._table.record(snapshot.hash, order)
                if self._estimator.has_rotational_disks
                else order
            )
        there = [
            node
            for node in self._mesh.current_map().nodes
            if node.node_id != self._mesh.node_id and node.stores and node.state not in UNREACHABLE_STATES
        ]
        answers = await asyncio.gather(*(self._ask(node, request) for node in there))
        earlier = next(
            (node.node_id for node, each in zip(there, answers, strict=True) if each == "earlier"), ""
        )
        costs = [
            await self._own_costs(snapshot, batch),
            *(each for each in answers if isinstance(each, OrderCosts)),
        ]
        order = decide_order(costs, self._clock.now_ms(), earlier)
        silent = ", ".join(node.node_id for node, each in zip(there, answers, strict=True) if each == "")
        if silent:
            order = msgspec.structs.replace(order, reason=f"{order.reason}; {silent} did not answer")
        return await self._table.record(snapshot.hash, order)

    async def _ask(self, node: Node, request: OrderCostRequest) -> OrderCosts | str:
        try:
            return await self._peers.call_typed(node, ORDER_COSTS, request)
        except PeerRefusedError as error:
            if error.code == "NoSuchSnapshot" or error.status not in _EARLIER:
                raise busy(f"{node.node_id}: {error}") from error
            return "earlier"
        except PeerUnreachableError:
            return ""

    async def _own_costs(self, snapshot: Snapshot, batch: int) -> OrderCosts:
        node = self._mesh.node_id
        if not self._estimator.has_rotational_disks:
            return OrderCosts(node)
        full, blocks = await self._estimator.estimate_orders(snapshot, (ShuffleSpec(), None), batch)
        if not full["samples"]:
            return OrderCosts(node)
        random = blocks["randomness"]
        return OrderCosts(
            node,
            int(blocks["shuffle"]["shards"]),
            round(full["seeks"]),
            float(full["disk_seconds"]),
            round(blocks["seeks"]),
            float(blocks["disk_seconds"]),
            float(full["media_seconds"]),
            float(random["distance"]),
            float(random.get("label_runs", random["shard_runs"])),
            "label_runs" in random,
        )

    @handler(ORDER_COSTS)
    async def costs(self, request: OrderCostRequest, context: CallContext) -> OrderCosts:
        """Answer another node. Raises BatchError NoSuchSnapshot, Busy."""
        return await self._own_costs(await self._catalog.snapshot(request.snapshot), request.batch)
