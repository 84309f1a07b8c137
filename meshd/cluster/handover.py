"""A name passes from one decider to the next: what the former one has is here before this one decides.

While a map comes to the nodes one after the other, the former decider still decides by the map before. What
it committed then it tells the others afterwards; its own reads show it already, and what it decides next is
judged by it. Whoever decides by the new map without it judges a condition by what is over.

Law: before the first decision about a name by a map, every node that decided about it shortly before, and
still answers, is asked to hand it over: it commits nothing more by an older map (`epochs`), then gives what
it has of the name. One that does not answer is suspected: a map without it needs no answer. Which maps were
there shortly before is what this process saw; where it cannot know, it asks all other owners. Invariant: a
look at two dictionaries while nothing changes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

from meshd.cluster.delivering import PATIENCE
from meshd.net.peers import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.net.pieces import PieceError
from meshd.store.errors import NotReplicatedError
from meshd.telemetry import metrics
from meshwire.cluster import routes
from meshwire.cluster.maps import ANSWERING

if TYPE_CHECKING:
    from meshd.cluster.mesh import Mesh
    from meshd.kit.clock import Clock
    from meshd.net.peers import Peers
    from meshwire.cluster import ClusterMap, Node, Routes

HANDOVER: Final = "/-/peer/replica/handover"
WINDOW: Final = 2 * PATIENCE
"""Seconds after a newer map came here for which a former decider is asked: longer than a write is on its way
to the other nodes before it is given up."""
_SILENCE: Final = 4.0
_PAUSE: Final = 0.1
_MOST: Final = 10_000  # names that are remembered
_NOT_FOUND: Final = 404


class _Former:
    """A map that was replaced; None: some that nobody saw here. It matters `until` then (monotonic)."""

    def __init__(self, cluster: ClusterMap | None, until: float) -> None:
        self.cluster, self.until = cluster, until
        self._routes: dict[int, Routes] = {}

    def asked(self, mesh: Mesh, bucket: str, key: str) -> set[str]:
        """The nodes that may have decided about a name by it."""
        if self.cluster is None or self.cluster.counts != mesh.map().counts:
            route = mesh.route(bucket, key)
            return {node.node_id for node in (*route.readers, *route.writers)}
        copies = mesh.copies(bucket)
        found = self._routes.get(copies)
        if found is None:
            found = self._routes[copies] = routes(self.cluster, copies)
        decider = found.of(bucket, key).decider
        return set() if decider is None else {decider.node_id}


class Handover:
    """One a process. Looking never waits."""

    def __init__(self, mesh: Mesh, peers: Peers, clock: Clock, window: float = WINDOW) -> None:
        self._mesh, self._peers, self._clock, self.window = mesh, peers, clock, window
        self._known: ClusterMap | None = None
        self._former: list[_Former] = []
        self._done: set[tuple[str, str]] = set()  # names that were handed over by the known map

    def __repr__(self) -> str:
        return f"<Handover to {self._mesh.node_id}, {len(self._former)} former maps>"

    def note(self) -> int:
        """Takes notice of the present map; its version."""
        cluster = self._mesh.map()
        if cluster is not self._known:
            known, self._known, self._done = self._known, cluster, set()
            seen = known is not None and known.version + 1 == cluster.version
            self._former.append(_Former(known if seen else None, self._clock.monotonic() + self.window))
        return cluster.version

    def is_done(self, bucket: str, key: str, version: int) -> bool:
        """Whether nothing is left to be handed over of a name, by that version of the map."""
        if self.note() != version:
            return False
        return not self._former or (bucket, key) in self._done or not self._nodes(bucket, key)

    def _nodes(self, bucket: str, key: str) -> list[Node]:
        """The nodes to be asked, by the present map."""
        now, cluster = self._clock.monotonic(), self._mesh.map()
        self._former = [former for former in self._former if former.until > now]
        found = {node_id for former in self._former for node_id in former.asked(self._mesh, bucket, key)}
        found.discard(self._mesh.node_id)
        nodes = [cluster.node(node_id) for node_id in sorted(found)]
        return [node for node in nodes if node is not None and node.state in ANSWERING]

    async def receive(self, bucket: str, key: str, patience: float) -> None:
        """Returns when everything of a name was handed over by the map that is the present one then. Raises
        NotReplicatedError after `patience` seconds."""
        deadline = self._clock.monotonic() + patience
        while True:
            version = self.note()
            if self.is_done(bucket, key, version):
                return
            nodes = self._nodes(bucket, key)
            answers = await asyncio.gather(*[self._ask(node, bucket, key, version) for node in nodes])
            if self.note() != version:
                continue
            if all(answers):
                if len(self._done) >= _MOST:
                    self._done.clear()  # they are asked again
                self._done.add((bucket, key))
                return
            if self._clock.monotonic() > deadline:
                missing = ", ".join(n.node_id for n, answer in zip(nodes, answers, strict=True) if not answer)
                raise NotReplicatedError(
                    f"{missing} decided about this name until a moment ago, does not hand it over, and is "
                    "not known to be away; nothing was changed; try again in a moment"
                )
            await self._mesh.newer_than(version, _PAUSE)

    async def _ask(self, node: Node, bucket: str, key: str, version: int) -> bool:
        """Whether a node has handed a name over."""
        target = f"{HANDOVER}?{urlencode({'bucket': bucket, 'key': key})}"
        result = "done"
        try:
            async with self._peers.call(node, "POST", target, body=b"", timeout=_SILENCE) as answer:
                await answer.read()
        except StaleMapError as error:
            result = "map"
            if error.version > version:
                await self._mesh.newer_than(version, 1.0)
        except (PeerUnreachableError, PieceError):
            result = "silent"
            await self._mesh.suspect(node.node_id, version)
        except PeerRefusedError as error:
            result = "unknown" if error.status == _NOT_FOUND else "refused"
        metrics.replication_handovers.labels(result).inc()
        return result in ("done", "unknown")  # a node of an earlier release has nothing of the kind
