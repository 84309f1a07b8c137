"""This process's view of the cluster: the current map, its routes, and Retry-After estimates.

Law: reading the view never blocks; it is the newest map that the control store has delivered to this
process, and the last known one while the store is unreachable. Only `report_suspect` changes the map,
through the control store. Invariant: a standalone node has a constant map of itself. A Retry-After value
is an estimate from known leases, at least one second, never a promise: a silent node is marked `away` at
the latest one lease and one second after it fell silent, and the other owners take over.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from math import ceil, inf
from typing import TYPE_CHECKING, Final

from meshd.control.cluster_map_store import TOPIC, ClusterMapStore
from meshd.rpc.peer_client import StaleMapError
from meshwire.cluster import ClusterMap, Node, Route, routes
from meshwire.cluster.placement import slot_of
from meshwire.cluster.routes import COMPLETE_STATES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.control.control_api import ControlStore
    from meshd.util.clock import Clock
    from meshwire.cluster import Routes


_SOON: Final = 1  # second: a change of the map that is under way, or room for a request
_LAST_LOOK: Final = 1.0
_GONE: Final = ("away", "down")


class RetryAfter:
    """`lease`: seconds for which a node's lease holds without renewal."""

    def __init__(self, lease: float, clock: Clock) -> None:
        self._lease, self._clock = lease, clock
        self._silent: dict[
            str, tuple[float, float]
        ] = {}  # of each node: the first and the last time in a row

    def __repr__(self) -> str:
        return f"<RetryAfter, silent: {sorted(self._silent)}>"

    @property
    def lease_seconds(self) -> int:
        """A whole lease in seconds."""
        return max(_SOON, ceil(self._lease))

    def note_silence(self, node_id: str) -> None:
        """A node did not answer. Silences less than a lease apart are one."""
        now = self._clock.monotonic()
        first, last = self._silent.get(node_id, (now, now))
        self._silent[node_id] = (first if now - last <= self._lease else now, now)

    def estimate_seconds(self, cluster: ClusterMap, node_id: str, *, sure: bool) -> int:
        """For requests to node `node_id`; `sure`: it holds its lease."""
        me = cluster.node(node_id)
        if not sure or me is None or me.state in _GONE:
            return max(_SOON, ceil(self._lease / 4))
        now = self._clock.monotonic()
        present = {node.node_id for node in cluster.nodes if node.state not in _GONE}
        self._silent = {
            name: (first, last)
            for name, (first, last) in self._silent.items()
            if name in present and now - last <= self._lease
        }
        return max([_SOON, *(self._until_marked(first, now) for first, _ in self._silent.values())])

    def _until_marked(self, silent_since: float, now: float) -> int:
        """A whole lease again once that time is over: the control store does not answer, or the node renews
        its lease and cannot be reached from here."""
        left = silent_since + self._lease + _LAST_LOOK - now
        return ceil(left) if left > 0 else self.lease_seconds


_SINGLE_NODE_SLOTS: Final = 1 << 14
_ABSENT: Final = ("away", "down", "returning")


def single_node_map(node_id: str, endpoint: str) -> ClusterMap:
    """The map of a node that has its control store to itself."""
    return ClusterMap(1, (Node(node_id, endpoint),), _SINGLE_NODE_SLOTS, copies=1)


class ClusterView:
    """One a process. `copies_of` says how many copies a bucket was made with, 0 for the map's; `born_of`
    when that was; `writes_of` how
    writes come to its origin, "" where it has none; `homes_of` which nodes keep what is read of that; `look`
    is what `suspect` does; `goes_by` is told each version of the map that this process goes by, and `held`
    says which was the newest when the node's lease was last renewed, and for how many seconds more that
    holds; `newest` is the newest that any process of this node goes by. `lone`: the map of a node that is one
    for ever; `retry_after` is told which nodes are silent."""

    def __init__(
        self,
        node_id: str,
        control: ControlStore,
        copies_of: Callable[[str], int],
        *,
        lone: ClusterMap | None = None,
        look: Callable[[ClusterView, str, int], Awaitable[None]] | None = None,
        writes_of: Callable[[str], str] | None = None,
        homes_of: Callable[[str], tuple[str, ...]] = lambda bucket: (),
        born_of: Callable[[str], int] = lambda bucket: 0,
        goes_by: Callable[[int], None] = lambda version: None,
        held: Callable[[], tuple[int, float]] = lambda: (0, inf),
        newest: Callable[[], int] = lambda: 0,
        retry_after: RetryAfter | None = None,
    ) -> None:
        self.node_id = node_id
        self._control, self._copies_of, self._look = control, copies_of, look
        self._writes_of, self._goes_by, self._held = writes_of, goes_by, held
        self._homes_of, self._born_of, self._newest = homes_of, born_of, newest
        self._standalone_map, self._retry_after = lone, retry_after
        self._maps = None if lone is not None else ClusterMapStore(control)
        self._of: ClusterMap | None = None
        self._routes: dict[int, Routes] = {}
        self._homes: dict[tuple[str, ...], tuple[Node, ...]] = {}
        self._single_node = True
        self._looking: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Mesh of {self.node_id}: {self._of or self._standalone_map}>"

    @property
    def standalone(self) -> bool:
        """Whether this node is alone for ever."""
        return self._standalone_map is not None

    @property
    def single_node(self) -> bool:
        """Whether this node is the only one in the map. A look at a dictionary."""
        if self._standalone_map is not None:
            return True
        self.current_map()
        return self._single_node

    @property
    def lease_valid(self) -> bool:
        """Whether nobody can have taken this node out of the map for silence without its knowing."""
        return self.lease_remaining > 0

    @property
    def lease_remaining(self) -> float:
        """For how many seconds more it is sure; `inf` while it is alone."""
        if self.single_node:
            return inf
        version, left = self._held()
        return max(0.0, left) if version <= self.current_map().version else 0.0

    @property
    def lease_confirmed_version(self) -> int:
        """The newest version of the map that this node was sure of. What is found now may have been sent at
        that time: it may have stood still since, and the newer map is here before the rest is read."""
        version = self.current_map().version
        return version if self.lease_valid else min(version, self._held()[0])

    @property
    def newest_version(self) -> int:
        """The newest version of the map that any process of this node goes by."""
        return max(self._newest(), self.current_map().version)

    @property
    def retry_after(self) -> int:
        """Seconds after which a request that is refused now, because it had to wait for too long, is worth
        repeating."""
        if self._retry_after is None or self.single_node:
            return 1
        return self._retry_after.estimate_seconds(self.current_map(), self.node_id, sure=self.lease_valid)

    @property
    def retry_after_absence(self) -> int:
        """The same while a node is away that nobody can stand in for: nobody knows when it is back."""
        return 1 if self._retry_after is None else self._retry_after.lease_seconds

    def note_silence(self, node_id: str) -> None:
        """A node did not answer; `retry_after` heeds it."""
        if self._retry_after is not None:
            self._retry_after.note_silence(node_id)

    def current_map(self) -> ClusterMap:
        """The newest map known here. Never waits. Before there is one: an empty one of version 0."""
        if self._standalone_map is not None:
            return self._standalone_map
        assert self._maps is not None
        found = self._maps.current() or _NO_MAP
        if found is not self._of:
            self._of, self._routes, self._homes = found, {}, {}
            self._goes_by(found.version)
            self._single_node = len(found.nodes) == 1 and found.nodes[0].node_id == self.node_id
        return found

    @property
    def own_node(self) -> Node | None:
        """This node as the map has it."""
        return self.current_map().node(self.node_id)

    def last_absence_version(self, node_id: str) -> int:
        """The version of the map in which a node was last marked away, or came back after that; 0: none. One
        that joins, drains or stays was never away."""
        node = self.current_map().node(node_id)
        if node is None:
            return 0
        return max(node.since, node.turned if node.state in _ABSENT else 0)

    def replica_count(self, bucket: str) -> int:
        """How many copies of what is in a bucket are kept, where there are so many nodes that store, as
        `routes` takes it."""
        cluster = self.current_map()
        if cluster.counts:
            count, born = cluster.copies_of_bucket(bucket), self._born_of(bucket)
            if count is not None and count.born == born:
                return count.copies
        return self._copies_of(bucket) or cluster.copies

    def bucket_routes(self, bucket: str) -> Routes:
        """The routes of a bucket's names by the present map."""
        return self._routes_of(self.current_map(), self.replica_count(bucket))

    def _routes_of(self, cluster: ClusterMap, copies: int) -> Routes:
        found = self._routes.get(copies)
        if found is None:
            found = self._routes[copies] = routes(cluster, copies)
        return found

    def route_for(self, bucket: str, key: str) -> Route:
        """Who answers for a name. Of a bucket with an origin only the decider reads: what comes from there
        is asked for once, and kept once; where it has homes, any of them that answers. Where nobody decides,
        any node may read of an origin that has everything that was acknowledged."""
        found = self.bucket_routes(bucket).route_of_key(bucket, key)
        writes = "" if self._writes_of is None else self._writes_of(bucket)
        if not writes:
            return found
        homes = self._available_homes(bucket) if writes == "off" else ()
        if homes:
            first = slot_of(bucket, key, self.current_map().slots) % len(homes)  # so that they share the work
            return Route(found.primary, homes[first:] + homes[:first], found.write_set)
        readers = found.read_set[:1]
        if not readers and writes != "back":
            cluster = self.current_map()
            readers = self._routes_of(cluster, len(cluster.nodes)).route_of_key(bucket, key).read_set[:1]
        return Route(found.primary, readers, found.write_set)

    def _available_homes(self, bucket: str) -> tuple[Node, ...]:
        """The homes of a bucket that answer."""
        named = self._homes_of(bucket)
        if not named:
            return ()
        cluster = self.current_map()
        found = self._homes.get(named)
        if found is None:
            nodes = [cluster.node(name) for name in named]
            found = tuple(node for node in nodes if node is not None and node.state in COMPLETE_STATES)
            self._homes[named] = found
        return found

    def is_reader(self, bucket: str, key: str) -> bool:
        """Whether this node may answer reads of a name."""
        if self.single_node:
            return True
        return any(node.node_id == self.node_id for node in self.route_for(bucket, key).read_set)

    def is_primary(self, bucket: str, key: str) -> bool:
        """Whether this node decides about a name."""
        if self.single_node:
            return True
        decider = self.route_for(bucket, key).primary
        return decider is not None and decider.node_id == self.node_id

    def require_primary(self, bucket: str, key: str) -> None:
        """Raises StaleMapError, with this node's map version, unless this node decides about a name."""
        if not self.is_primary(bucket, key):
            raise StaleMapError(self.current_map().version)

    async def wait_for_newer_map(self, version: int, patience: float) -> bool:
        """Wait until a newer map is known here, or for `patience` seconds; whether there is one."""
        if self._standalone_map is None and self.current_map().version <= version:
            try:
                async with asyncio.timeout(patience), aclosing(self._control.watch(TOPIC)) as changes:
                    async for _ in changes:
                        if self.current_map().version > version:
                            break
            except TimeoutError:
                pass
        return self.current_map().version > version

    async def report_suspect(self, node_id: str, version: int) -> None:
        """A node did not answer under map `version`: look whether it does now, and have it marked `away` if
        not. Returns when that is settled, as far as it can be; then the map tells. Never raises ControlError:
        while the control store is out of reach nobody's state changes."""
        if self._look is None or node_id == self.node_id or self.current_map().version > version:
            return
        self.note_silence(node_id)
        task = self._looking.get(node_id)
        if task is None:
            task = asyncio.ensure_future(self._look(self, node_id, version))
            self._looking[node_id] = task
            task.add_done_callback(lambda _: self._looking.pop(node_id, None))
        await asyncio.shield(task)


_NO_MAP: Final = ClusterMap(0, ())
