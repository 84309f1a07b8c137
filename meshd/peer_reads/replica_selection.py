"""Replica selection: which node is asked for a name, and which one next.

`ReplicaSelector` asks for many names: one call per node, to all nodes at once; names that a node cannot serve
go to their next replica, without a pause. `ReplicaSearch` asks for one name, for a caller that
would have to begin again: it also waits for a newer map. A node that does not answer is reported to the
failure detector.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeVar, cast, get_args

from meshd.core import peer_messages
from meshd.core.api_errors import BatchError, Code, busy, damaged
from meshd.errors import MeshdError
from meshd.rpc.peer_client import PeerUnreachableError, StaleMapError
from meshd.telemetry import metrics
from meshd.util.async_tasks import BackgroundTasks
from meshwire.errors import S3Error
from meshwire.frame.tensor_frame import FrameError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.peer_source import ReadFailure
    from meshd.rpc.peer_client import PeerClient, PeerRefusedError
    from meshwire.cluster import Node

_T = TypeVar("_T")
_ROUNDS: Final = 8  # times that a search waits for a newer map
_PAUSE: Final = 0.5  # seconds for a newer map
UNREACHABLE_STATES: Final = ("away", "down")


async def gather_limited(most: int, doing: Sequence[Awaitable[_T]]) -> list[_T]:
    """Return the results in order; at most `most` of the calls run at a time."""
    slots = asyncio.Semaphore(most)

    async def one(each: Awaitable[_T]) -> _T:
        async with slots:
            return await each

    return await asyncio.gather(*[one(each) for each in doing])


class ReplicaSelector:
    """Asks the replicas of names. One instance per process."""

    def __init__(self, mesh: ClusterView, peers: PeerClient) -> None:
        self.mesh, self.peers = mesh, peers
        self._tasks = BackgroundTasks("remote-objects")
        self._suspected: set[str] = set()

    def __repr__(self) -> str:
        return f"<ReplicaSelector from {self.mesh.node_id}>"

    async def ask_replicas(
        self,
        names: dict[int, tuple[str, str]],
        ask: Callable[[Node, Sequence[int]], Awaitable[list[int]]],
    ) -> dict[int, str]:
        """Ask a node of each name's read set, with one call per node, then the next node for the names that
        `ask` returns as not answered. Return the names that no node answered for, with the reason. If this
        node joins the read set of a name meanwhile, it is asked like any other: a change of the map may
        replace a whole read set at once."""
        me = self.mesh.node_id
        tried = {number: {me} if self.mesh.is_reader(*name) else set() for number, name in names.items()}
        why: dict[int, str] = {}
        left = list(names)
        while left:
            groups: dict[str, list[int]] = defaultdict(list)
            nodes: dict[str, Node] = {}
            for number in left:
                readers = self.mesh.route_for(*names[number]).read_set
                node = next((node for node in readers if node.node_id not in tried[number]), None)
                if node is None:
                    why.setdefault(number, "no node that holds it answers")
                    continue
                tried[number].add(node.node_id)
                nodes[node.node_id] = node
                groups[node.node_id].append(number)
            asked = [self._ask_replica(nodes[each], numbers, ask, why) for each, numbers in groups.items()]
            left = [number for again in await asyncio.gather(*asked) for number in again]
        return why

    async def _ask_replica(
        self,
        node: Node,
        numbers: list[int],
        ask: Callable[[Node, Sequence[int]], Awaitable[list[int]]],
        why: dict[int, str],
    ) -> list[int]:
        """Ask one node; return the numbers of the names to ask another node for. `why` has the reason for
        each name without an answer so far."""
        again: list[int] = []
        for start in range(0, len(numbers), peer_messages.MAX_PARTS):
            some = numbers[start : start + peer_messages.MAX_PARTS]
            try:
                left = await ask(node, some)
            except (MeshdError, FrameError) as error:
                metrics.remote_failures.labels(type(error).__name__).inc()
                self.report_unreachable(node, error)
                why |= dict.fromkeys(some, f"{node.node_id}: {error}")
                again += some
                continue
            for number in set(some) - set(left):
                why.pop(number, None)
            why |= dict.fromkeys(left, f"{node.node_id} does not have it")
            again += left
        return again

    def report_unreachable(self, node: Node, error: Exception) -> None:
        """Report a node that does not answer to the failure detector, one report per node at a time."""
        if isinstance(error, PeerUnreachableError) and node.node_id not in self._suspected:
            self._suspected.add(node.node_id)
            self._tasks.spawn(self._suspect(node.node_id, self.mesh.current_map().version), "suspect")

    async def _suspect(self, node_id: str, version: int) -> None:
        try:
            await self.mesh.report_suspect(node_id, version)
        finally:
            self._suspected.discard(node_id)

    def document_nodes(self) -> list[Node]:
        """Return the other storing nodes, which hold shared documents, without those that are away or
        down."""
        return [
            node
            for node in self.mesh.current_map().nodes
            if node.node_id != self.mesh.node_id and node.stores and node.state not in UNREACHABLE_STATES
        ]


class ReplicaSearch:
    """The nodes to ask for one name, by the current map: a completed change may replace the whole read set of
    a name at once, and this node may become part of it."""

    def __init__(self, mesh: ClusterView, bucket: str, key: str) -> None:
        self._mesh, self._bucket, self._key, self._rounds = mesh, bucket, key, _ROUNDS
        self._version = 0
        self._missed: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<ReplicaSearch of {self._bucket}/{self._key}, {self._rounds} rounds left>"

    async def next_replica(self) -> Node | None:
        """Return the next node to ask; None: this node. Raises S3Error SlowDown if no node is left."""
        while not self._mesh.is_reader(self._bucket, self._key):
            self._version = self._mesh.current_map().version
            for node in self._mesh.route_for(self._bucket, self._key).read_set:
                if self._missed.get(node.node_id, -1) < self._version:
                    return node
            if not self._rounds:
                raise S3Error(
                    "SlowDown",
                    f"No node that holds {self._bucket}/{self._key[:200]} answers; try again.",
                )
            self._rounds -= 1
            self._missed.clear()
            await self._mesh.wait_for_newer_map(self._version, _PAUSE)
        return None

    async def mark_failed(self, node: Node, lost: Exception) -> None:
        """Record that a node could not supply the object: under this map, the other nodes are asked first."""
        self._missed[node.node_id] = self._version
        if isinstance(lost, StaleMapError):
            await self._mesh.wait_for_newer_map(max(lost.version - 1, self._version), _PAUSE)
        else:
            await self._mesh.report_suspect(node.node_id, self._version)


def missing_part_error(name: str, lost: ReadFailure) -> BatchError:
    """Return the error for a part that no node could supply."""
    if lost.code == "NoSuchKey":
        return BatchError("NoSuchKey", f"{name} no longer exists")
    if lost.code == "SnapshotChanged":
        return BatchError("SnapshotChanged", f"{name} was replaced during the read", help="retry the request")
    if lost.code == "Unreadable":
        return damaged(name, lost.message, {"url": name}, final=lost.final)
    return busy(f"{name} cannot be read now: {lost.message or lost.code}")


def peer_refusal_error(error: PeerRefusedError) -> BatchError:
    """Turn another node's refusal into an error of this node."""
    if error.code in get_args(Code) and error.code != "Busy":
        return BatchError(cast("Code", error.code), error.message)
    return busy(f"another node refused: {error.message}")
