"""The relayout job: every storing node sorts its own objects; this job polls the nodes for their progress.

Started again, or taken over by another node, it continues with the objects that are not in order yet.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.control.jobs import Failure
from meshd.core.api_errors import BatchError, busy
from meshd.core.node_tasks import IDLE_SECONDS
from meshd.jobs.relayout.messages import MAX_FAILURES, RELAYOUT, LayoutCost, RelayoutRequest
from meshd.rpc.peer_client import PeerRefusedError
from meshd.util.timeouts import timeout
from meshwire.cluster.routes import COMPLETE_STATES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.cluster.cluster_view import ClusterView
    from meshd.jobs.job_kind import JobRun, ProgressCounter
    from meshd.jobs.relayout.messages import RelayoutStatus
    from meshd.jobs.relayout.node_task import Relayouts
    from meshd.rpc.peer_client import PeerClient
    from meshwire.cluster import Node

_STOP_SECONDS: Final = IDLE_SECONDS + 2.0  # a node that cannot be asked has ended its task by then
_EARLIER: Final = (404, 405)  # answers of nodes of an earlier release


class RelayoutReport(msgspec.Struct, frozen=True):
    """What was found and done, over all nodes. `objects`, `bytes`: on rotational disks; `before`, `expected`
    and `after`: what it costs to read those once that an epoch reads, in order of key; `after` is None if
    nothing was moved; `to_move`, `moved`: objects and bytes. `left_out`: by reason; `refused`: by node."""

    nodes: list[str]
    objects: int
    bytes: int
    before: LayoutCost
    expected: LayoutCost
    after: LayoutCost | None
    to_move: int
    to_move_bytes: int
    moved: int
    moved_bytes: int
    left_out: dict[str, int]
    refused: dict[str, str]


class RelayoutJob:
    """Runs relayout jobs. One instance per node, in the coordinator; `own`: this node's tasks."""

    def __init__(self, mesh: ClusterView, peers: PeerClient, own: Relayouts) -> None:
        self._mesh, self._peers, self._own = mesh, peers, own

    def __repr__(self) -> str:
        return f"<RelayoutJob of {self._mesh.node_id}>"

    async def run_job(self, running: JobRun) -> None:
        """Run a job; see JobKind.run_job."""
        nodes = self._nodes()
        statuses: dict[str, RelayoutStatus] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                for node in nodes:
                    tasks.create_task(self._follow(node, running, len(nodes), statuses))
        finally:
            with suppress(TimeoutError):
                async with timeout(_STOP_SECONDS):
                    ending = msgspec.structs.replace(_request(running, len(nodes)), stop=True)
                    await asyncio.gather(*(self._ask(node, ending) for node in nodes), return_exceptions=True)

    def _nodes(self) -> list[Node]:
        """Return the storing nodes. Raises BatchError Busy while one is absent: which node reads what first
        is different until it is back or given up, and an order for that time would be wasted."""
        cluster = self._mesh.current_map()
        if self._mesh.single_node:
            return [self._mesh.own_node or cluster.nodes[0]]
        nodes = [node for node in cluster.nodes if node.stores and node.state != "down"]
        for node in nodes:
            if node.state not in COMPLETE_STATES:
                raise busy(f"{node.node_id} is {node.state}: start the job again when all nodes are up")
        return nodes

    async def _follow(
        self, node: Node, running: JobRun, nodes: int, statuses: dict[str, RelayoutStatus]
    ) -> None:
        """Ask a node until it has done its part. Raises BatchError, MeshdError."""
        while True:
            status = statuses[node.node_id] = await self._ask(node, _request(running, nodes))
            _count(running.tally, statuses)
            if status.code:
                raise BatchError(status.code, f"{node.node_id}: {status.error}")
            if status.done:
                return

    async def _ask(self, node: Node, request: RelayoutRequest) -> RelayoutStatus:
        if self._mesh.single_node or node.node_id == self._mesh.node_id:
            return await self._own.answer(request)
        try:
            return await self._peers.call_typed(node, RELAYOUT, request)
        except PeerRefusedError as error:
            if error.status not in _EARLIER:
                raise
            raise BatchError(
                "NotImplemented", f"{node.node_id} runs an earlier release: upgrade all nodes first"
            ) from error


def _request(running: JobRun, nodes: int) -> RelayoutRequest:
    spec = running.spec
    return RelayoutRequest(
        running.name,
        running.caller.identity.account,
        spec.source.bucket,
        spec.source.prefix,
        spec.dry_run,
        -(-int(running.rate()) // max(1, nodes)),
    )


def _count(tally: ProgressCounter, statuses: Mapping[str, RelayoutStatus]) -> None:
    """Set the progress of a job to the sum of what its nodes have done."""
    each = list(statuses.values())
    tally.phase = "moving" if all(status.measured or status.refused for status in each) else "measuring"
    tally.outputs_total = tally.samples_total = sum(status.to_move for status in each)
    tally.bytes_total = sum(status.to_move_bytes for status in each)
    tally.written = tally.samples = sum(status.moved for status in each)
    before, tally.bytes = tally.bytes, sum(status.moved_bytes for status in each)
    tally.moved += max(0, tally.bytes - before)
    tally.failed = sum(status.damaged for status in each)
    tally.failures = [Failure(*failure) for status in each for failure in status.failures][:MAX_FAILURES]
    left: dict[str, int] = {}
    for status in each:
        for why, count in status.left_out.items():
            left[why] = left.get(why, 0) + count
    moved = [status for status in each if status.after is not None]
    tally.report = RelayoutReport(
        sorted(name for name, status in statuses.items() if status.objects),
        sum(status.objects for status in each),
        sum(status.size for status in each),
        sum((status.before for status in each), LayoutCost()),
        sum((status.expected for status in each), LayoutCost()),
        sum((status.after or status.before for status in each), LayoutCost()) if moved else None,
        tally.outputs_total,
        tally.bytes_total,
        tally.written,
        tally.bytes,
        left,
        {name: status.refused for name, status in statuses.items() if status.refused},
    )
