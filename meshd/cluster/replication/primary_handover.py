"""Change of primary: has names handed over by their former primaries.

Law: before its first write to a name under a new map, the primary asks every recent primary that still
answers to hand the name over: that node stops committing under older maps (`WriteContext`), then sends
what it has of the name. It reports one that does not answer as suspect. Without this a condition would
be checked against stale data. A check costs two dictionary look-ups while the map does not change.
"""

from __future__ import annotations

import asyncio
from types import NoneType
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.replication.replicator import WRITE_TIMEOUT
from meshd.cluster.replication.unconfirmed_writes import PARALLEL_CHANGES, unsettled_removals
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import IN_QUERY, PREFIX, BodyFramingError, PeerCall, handler
from meshd.store.errors import NotReplicatedError
from meshd.store.replica.changes import VersionGone
from meshd.telemetry import metrics
from meshwire.cluster import routes
from meshwire.cluster.cluster_map import REACHABLE_STATES

if TYPE_CHECKING:
    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.replicator import Replicator
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node, Routes


RECENT_SECONDS: Final = 2 * WRITE_TIMEOUT
"""Seconds after a newer map arrived during which a former primary is asked: longer than a write may take to
reach the other nodes before it is given up."""
_PAUSE: Final = 0.1
_MAX_NAMES: Final = 10_000  # names remembered as handed over
_NOT_FOUND: Final = 404


class HandedName(msgspec.Struct, frozen=True):
    """A name that the caller decides about from its map version on."""

    bucket: str
    key: str


HAND_OVER: Final = PeerCall(
    f"{PREFIX}replica/handover",
    request=HandedName,
    response=NoneType,
    target=IN_QUERY,
    max_bytes=0,
    timeout=4.0,
    map_wait=1.0,
)


class _FormerMap:
    """A former map, or None for maps that this process did not see. It matters until `until` (monotonic)."""

    def __init__(self, cluster: ClusterMap | None, until: float) -> None:
        self.cluster, self.until = cluster, until
        self._routes: dict[int, Routes] = {}

    def nodes_to_ask(self, mesh: ClusterView, bucket: str, key: str) -> set[str]:
        """Returns the nodes that may have been primary of a name under it."""
        if self.cluster is None or self.cluster.counts != mesh.current_map().counts:
            route = mesh.route_for(bucket, key)
            return {node.node_id for node in (*route.read_set, *route.write_set)}
        copies = mesh.replica_count(bucket)
        found = self._routes.get(copies)
        if found is None:
            found = self._routes[copies] = routes(self.cluster, copies)
        primary = found.route_of_key(bucket, key).primary
        return set() if primary is None else {primary.node_id}


class PrimaryHandover:
    """Ensures that names are handed over. One per process. Checks never wait."""

    def __init__(
        self, mesh: ClusterView, peers: PeerClient, clock: Clock, window: float = RECENT_SECONDS
    ) -> None:
        self._mesh, self._peers, self._clock, self.window = mesh, peers, clock, window
        self._known: ClusterMap | None = None
        self._former: list[_FormerMap] = []
        self._done: set[tuple[str, str]] = set()  # names handed over under the known map

    def __repr__(self) -> str:
        return f"<Handover to {self._mesh.node_id}, {len(self._former)} former maps>"

    def observe_map(self) -> int:
        """Records a change of the map; returns its version."""
        cluster = self._mesh.current_map()
        if cluster is not self._known:
            known, self._known, self._done = self._known, cluster, set()
            seen = known is not None and known.version + 1 == cluster.version
            self._former.append(_FormerMap(known if seen else None, self._clock.monotonic() + self.window))
        return cluster.version

    def is_complete(self, bucket: str, key: str, version: int) -> bool:
        """Returns True if nothing of a name remains to be handed over under this map version."""
        if self.observe_map() != version:
            return False
        return not self._former or (bucket, key) in self._done or not self._former_primaries(bucket, key)

    def _former_primaries(self, bucket: str, key: str) -> list[Node]:
        """Returns the nodes to ask, according to the current map."""
        now, cluster = self._clock.monotonic(), self._mesh.current_map()
        self._former = [former for former in self._former if former.until > now]
        found = {
            node_id for former in self._former for node_id in former.nodes_to_ask(self._mesh, bucket, key)
        }
        found.discard(self._mesh.node_id)
        nodes = [cluster.node(node_id) for node_id in sorted(found)]
        return [node for node in nodes if node is not None and node.state in REACHABLE_STATES]

    async def wait_until_received(self, bucket: str, key: str, patience: float) -> None:
        """Returns when the name was completely handed over under the map that is current then. Raises
        NotReplicatedError after `patience` seconds."""
        deadline = self._clock.monotonic() + patience
        while True:
            version = self.observe_map()
            if self.is_complete(bucket, key, version):
                return
            nodes = self._former_primaries(bucket, key)
            answers = await asyncio.gather(*[self._ask(node, bucket, key, version) for node in nodes])
            if self.observe_map() != version:
                continue
            if all(answers):
                if len(self._done) >= _MAX_NAMES:
                    self._done.clear()  # later writes ask again
                self._done.add((bucket, key))
                return
            if self._clock.monotonic() > deadline:
                missing = ", ".join(n.node_id for n, answer in zip(nodes, answers, strict=True) if not answer)
                raise NotReplicatedError(
                    f"{missing} was recently the primary of this name, does not hand it over, and is "
                    "not known to be away; nothing was changed; try again shortly"
                )
            await self._mesh.wait_for_newer_map(version, _PAUSE)

    async def _ask(self, node: Node, bucket: str, key: str, version: int) -> bool:
        """Returns True if a node has handed the name over."""
        result = "done"
        try:
            await self._peers.call_typed(node, HAND_OVER, HandedName(bucket, key))
        except StaleMapError as error:
            result = "map"
            if error.version > version:
                await self._mesh.wait_for_newer_map(version, 1.0)
        except (PeerUnreachableError, BodyFramingError):
            result = "silent"
            await self._mesh.report_suspect(node.node_id, version)
        except PeerRefusedError as error:
            result = "unknown" if error.status == _NOT_FOUND else "refused"
        metrics.replication_handovers.labels(result).inc()
        return result in ("done", "unknown")  # nodes of an earlier release do not have this call


class HandoverHandler:
    """Hands names over to their new primaries. One per process. `store`: this node's own."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, replicator: Replicator, clock: Clock) -> None:
        self._store, self._mesh, self._replicator, self._clock = store, mesh, replicator, clock

    @handler(HAND_OVER)
    async def hand_over(self, name: HandedName, context: CallContext) -> None:
        cluster = self._mesh.current_map()
        node = cluster.node(context.node_id)
        if context.map_version != cluster.version or node is None:
            raise StaleMapError(cluster.version)
        await self.send_name(name.bucket, name.key, context.map_version, node)

    async def send_name(self, bucket: str, key: str, version: int, to: Node) -> None:
        """Hands a name over to node `to`, its primary under map `version`: fences off writes of this node
        under earlier maps, then sends `to` what this node has of the name. Raises StaleMapError if `to` uses
        a newer map; NotReplicatedError."""
        await self._store.raise_fence(version)
        newest, tombstone = self._store.newest_version(bucket, key), self._store.tombstone_stamp(bucket, key)
        removals = unsettled_removals(self._store, self._clock, bucket, key)
        if tombstone:
            removals.append(VersionGone(bucket, key, "", tombstone))
        try:
            if newest is not None:
                confirmation = self._replicator.confirmation_of(bucket, key, newest)
                await self._replicator.send_change(to, confirmation)
            for start in range(0, len(removals), PARALLEL_CHANGES):
                some = removals[start : start + PARALLEL_CHANGES]
                await asyncio.gather(*[self._replicator.send_change(to, gone) for gone in some])
        except (PeerUnreachableError, PeerRefusedError, BodyFramingError) as error:
            raise NotReplicatedError(
                f"node {to.node_id} does not accept the handover of a name: {error}"
            ) from error
