"""This process's view of the cluster: the current map, its routes, and Retry-After estimates.

Law: reading the view never blocks. It shows the newest map that the control store has delivered to this
process; while the store is unreachable, that is the last known one. Only `report_suspect` changes the map,
through the control store. A Retry-After value is an estimate from known leases, at least one second, never a
promise: a silent node is marked `away` at the latest one lease and one second after it fell silent, and then
the other owners take over.
Invariant: a standalone node has a constant map of itself.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from math import ceil, inf
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.control.cluster_map_store import TOPIC, ClusterMapStore
from meshd.rpc.peer_client import StaleMapError
from meshd.store.errors import NotReplicatedError
from meshd.telemetry import metrics
from meshd.util.timeouts import timeout
from meshwire.cluster import ClusterMap, Node, Route, routes
from meshwire.cluster.routes import COMPLETE_STATES, slot_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import numpy.typing as npt

    from meshd.control.control_api import ControlStore
    from meshd.store.records import WriteContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Routes

_NO_MAP: Final = ClusterMap(0, ())
_SINGLE_NODE_SLOTS: Final = 1 << 14
_GONE: Final = ("away", "down")
_ABSENT: Final = (*_GONE, "returning")
_SOON: Final = 1  # second: until a map change in progress arrives, or capacity for a request is free
_PROBE_SECONDS: Final = 1.0  # from the end of a silent node's lease until it is marked away, at most


class RetryAfter:
    """Estimates Retry-After values. `lease`: seconds for which a node's lease holds without renewal."""

    def __init__(self, lease: float, clock: Clock) -> None:
        self._lease, self._clock = lease, clock
        self._silent: dict[str, tuple[float, float]] = {}  # node → first and last time of the current silence

    def __repr__(self) -> str:
        return f"<RetryAfter, silent: {sorted(self._silent)}>"

    @property
    def lease_seconds(self) -> int:
        """The duration of a lease, rounded up to seconds."""
        return max(_SOON, ceil(self._lease))

    def note_silence(self, node_id: str) -> None:
        """Records that a node did not answer. Silences less than a lease apart count as one."""
        now = self._clock.monotonic()
        first, last = self._silent.get(node_id, (now, now))
        self._silent[node_id] = (first if now - last <= self._lease else now, now)

    def estimate_seconds(self, cluster: ClusterMap, node_id: str, *, lease_valid: bool) -> int:
        """Estimates how long requests that node `node_id` rejects have to wait; `lease_valid`: its lease is
        valid."""
        me = cluster.node(node_id)
        if not lease_valid or me is None or me.state in _GONE:
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
        """Returns the seconds until a silent node is marked away. If that time is over and it is not, either
        the node renews its lease but is unreachable from here, or the control store does not answer: then
        another whole lease."""
        left = silent_since + self._lease + _PROBE_SECONDS - now
        return ceil(left) if left > 0 else self.lease_seconds


def single_node_map(node_id: str, endpoint: str) -> ClusterMap:
    """Returns the constant map of a standalone node."""
    return ClusterMap(1, (Node(node_id, endpoint),), _SINGLE_NODE_SLOTS, copies=1)


class ClusterView:
    """The cluster as one process sees it.

    `control`: the store that has its map; `copies_of`: the replica count a bucket was created with, 0 for the
    map's; `born_of`: when it was created; `writes_of`: how writes reach its origin, "" if it has none;
    `homes_of`: the nodes that cache its origin's data. `probe_suspect` implements `report_suspect`.
    `on_map_adopted` is called with each map version that this process adopts; `lease_state` returns the
    newest version at the last lease renewal and the seconds left of the lease; `newest` returns the newest
    version that any process of this node has adopted. `standalone_map`: the constant map of a standalone
    node; `retry_after` records silent nodes.
    """

    def __init__(
        self,
        node_id: str,
        control: ControlStore,
        copies_of: Callable[[str], int],
        *,
        standalone_map: ClusterMap | None = None,
        probe_suspect: Callable[[ClusterView, str, int], Awaitable[None]] | None = None,
        writes_of: Callable[[str], str] = lambda bucket: "",
        homes_of: Callable[[str], tuple[str, ...]] = lambda bucket: (),
        born_of: Callable[[str], int] = lambda bucket: 0,
        on_map_adopted: Callable[[int], None] = lambda version: None,
        lease_state: Callable[[], tuple[int, float]] = lambda: (0, inf),
        newest: Callable[[], int] = lambda: 0,
        retry_after: RetryAfter | None = None,
    ) -> None:
        self.node_id = node_id
        self.control, self._copies_of, self._probe_suspect = control, copies_of, probe_suspect
        self._writes_of, self._on_map_adopted, self._lease_state = writes_of, on_map_adopted, lease_state
        self._homes_of, self._born_of, self._newest = homes_of, born_of, newest
        self._standalone_map, self._retry_after = standalone_map, retry_after
        self._maps = None if standalone_map is not None else ClusterMapStore(control)
        self._current: ClusterMap | None = None
        self._routes: dict[int, Routes] = {}
        self._homes: dict[tuple[str, ...], tuple[Node, ...]] = {}
        self._single_node = True
        self._probing: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<ClusterView of {self.node_id}: {self._current or self._standalone_map}>"

    @property
    def standalone(self) -> bool:
        """True for a standalone node, which never joins a cluster."""
        return self._standalone_map is not None

    @property
    def single_node(self) -> bool:
        """True if this node is the only one in the map. Cheap: a dictionary look-up."""
        if self._standalone_map is not None:
            return True
        self.current_map()
        return self._single_node

    @property
    def lease_valid(self) -> bool:
        """True while no other node can have marked this node away for silence without its knowledge."""
        return self.lease_remaining > 0

    @property
    def lease_remaining(self) -> float:
        """Seconds for which the lease remains valid; `inf` for a single node."""
        if self.single_node:
            return inf
        version, left = self._lease_state()
        # A lease renewed under a newer map vouches for that map only: this process has to adopt it first.
        return max(0.0, left) if version <= self.current_map().version else 0.0

    @property
    def lease_confirmed_version(self) -> int:
        """The newest map version that this node's lease confirmed. A message that is read now may be as old
        as that version: if the process was suspended, a newer map may arrive before the messages that
        waited."""
        version = self.current_map().version
        if self._standalone_map is not None:
            return version
        return version if self.lease_valid else min(version, self._lease_state()[0])

    @property
    def newest_version(self) -> int:
        """The newest map version that any process of this node has adopted."""
        return max(self._newest(), self.current_map().version)

    @property
    def retry_after(self) -> int:
        """Seconds after which it is worth repeating a request that is rejected now because it waited too
        long."""
        if self._retry_after is None or self.single_node:
            return 1
        return self._retry_after.estimate_seconds(
            self.current_map(), self.node_id, lease_valid=self.lease_valid
        )

    @property
    def retry_after_absence(self) -> int:
        """Seconds to retry after while an absent node cannot be replaced: its return time is unknown."""
        return 1 if self._retry_after is None else self._retry_after.lease_seconds

    def note_silence(self, node_id: str) -> None:
        """Records that a node did not answer, for `retry_after`."""
        if self._retry_after is not None:
            self._retry_after.note_silence(node_id)

    def current_map(self) -> ClusterMap:
        """Returns the newest known map without waiting; before the first one, an empty map of version 0."""
        if self._standalone_map is not None:
            return self._standalone_map
        assert self._maps is not None
        found = self._maps.current() or _NO_MAP
        if found is not self._current:
            self._current, self._routes, self._homes = found, {}, {}
            self._on_map_adopted(found.version)
            self._single_node = len(found.nodes) == 1 and found.nodes[0].node_id == self.node_id
        return found

    @property
    def own_node(self) -> Node | None:
        """This node's entry in the map."""
        return self.current_map().node(self.node_id)

    def last_absence_version(self, node_id: str) -> int:
        """Returns the map version in which a node was last marked away or returned from that; 0 if never.
        Joining and draining do not count as absence."""
        node = self.current_map().node(node_id)
        if node is None:
            return 0
        return max(node.since, node.turned if node.state in _ABSENT else 0)

    def replica_count(self, bucket: str) -> int:
        """Returns how many copies of a bucket's objects are kept if there are enough storing nodes."""
        cluster = self.current_map()
        if cluster.counts:
            count, born = cluster.copies_of_bucket(bucket), self._born_of(bucket)
            if count is not None and count.born == born:
                return count.copies
        return self._copies_of(bucket) or cluster.copies

    def bucket_routes(self, bucket: str) -> Routes:
        """Returns the routes of a bucket's names in the current map."""
        return self._routes_of(self.current_map(), self.replica_count(bucket))

    def _routes_of(self, cluster: ClusterMap, copies: int) -> Routes:
        found = self._routes.get(copies)
        if found is None:
            found = self._routes[copies] = routes(cluster, copies)
        return found

    def route_for(self, bucket: str, key: str) -> Route:
        """Returns the route of a name. If the bucket has an origin, only the primary reads the name, so that
        data is fetched and cached once; if the bucket also has home nodes, any available one does. Without a
        primary, any node may read from an origin that has every acknowledged write."""
        found = self.bucket_routes(bucket).route_of_key(bucket, key)
        writes = self._writes_of(bucket)
        if not writes:
            return found
        homes = self._available_homes(bucket) if writes == "off" else ()
        if homes:  # the slot spreads names over them
            first = slot_of(bucket, key, self.current_map().slots) % len(homes)
            return Route(found.primary, homes[first:] + homes[:first], found.write_set)
        readers = found.read_set[:1]
        if not readers and writes != "back":
            cluster = self.current_map()
            readers = self._routes_of(cluster, len(cluster.nodes)).route_of_key(bucket, key).read_set[:1]
        return Route(found.primary, readers, found.write_set)

    def slots_read_here(self, bucket: str, *, first_only: bool) -> npt.NDArray[np.bool_]:
        """Returns bool[slots]: whether `route_for` has this node in the read set of the names in a slot;
        `first_only`: at the head of it."""
        found, writes = self.bucket_routes(bucket), self._writes_of(bucket)
        homes = self._available_homes(bucket) if writes == "off" else ()
        if homes:
            heads = [home.node_id == self.node_id for home in homes]
            whole = np.resize(np.array(heads), found.slots)
            return whole if first_only else np.full(found.slots, any(heads))
        return found.reader_slots(self.node_id, first_only=first_only or bool(writes))

    def _available_homes(self, bucket: str) -> tuple[Node, ...]:
        """Returns the home nodes of a bucket that are available."""
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

    def all_nodes_complete(self) -> bool:
        """Returns True if every storing node is present and complete, so that no other copies can exist."""
        nodes = self.current_map().nodes
        return all(node.state in COMPLETE_STATES for node in nodes if node.stores)

    def is_reader(self, bucket: str, key: str) -> bool:
        """Returns True if this node may serve reads of a name."""
        if self.single_node:
            return True
        return any(node.node_id == self.node_id for node in self.route_for(bucket, key).read_set)

    def is_primary(self, bucket: str, key: str) -> bool:
        """Returns True if this node is the primary of a name."""
        if self.single_node:
            return True
        primary = self.route_for(bucket, key).primary
        return primary is not None and primary.node_id == self.node_id

    def require_primary(self, bucket: str, key: str) -> None:
        """Raises StaleMapError, with this node's map version, unless this node is the primary of a name."""
        if not self.is_primary(bucket, key):
            raise StaleMapError(self.current_map().version)

    def other_primary(self, bucket: str, key: str) -> Node | None:
        """Returns the node that is primary of a name; None if it is this one. Raises NotReplicatedError if
        there is none."""
        if self.single_node:
            return None  # whatever state the map shows for this node
        primary = self.route_for(bucket, key).primary
        if primary is None:
            raise NotReplicatedError(
                "every node with this name's data is away: no node can accept writes of it until the one "
                "that left last is back; try again shortly"
            )
        return None if primary.node_id == self.node_id else primary

    def reject_if_abandoned(self, context: WriteContext) -> None:
        """Raises NotReplicatedError if the client may already have received "outcome unknown": then the write
        must not happen any more."""
        if not context.accepted_by:
            return
        for node_id in {self.node_id, context.accepted_by}:
            if self.last_absence_version(node_id) > context.map_version:
                metrics.replication_given_up.inc()
                raise NotReplicatedError(
                    f"node {node_id} was marked away since it accepted the request, so the client may have "
                    "given up; nothing was changed; try again"
                )

    def reject_if_absent_since(self, context: WriteContext) -> None:
        """Raises NotReplicatedError if this node committed a write but was marked away since it was accepted:
        another node was the primary in between, and may have decided without this write."""
        if context.accepted_by and self.last_absence_version(self.node_id) > context.map_version:
            metrics.replication_given_up.inc()
            raise NotReplicatedError(
                f"node {self.node_id} was marked away since it accepted the request, so other nodes may have "
                "decided without it; the write may or may not have taken effect; try again"
            )

    async def wait_for_newer_map(self, version: int, max_wait: float) -> bool:
        """Waits up to `max_wait` seconds for a newer map than `version`; returns True if there is one."""
        if self._standalone_map is None and self.current_map().version <= version:
            try:
                async with timeout(max_wait), aclosing(self.control.watch(TOPIC)) as changes:
                    async for _ in changes:
                        if self.current_map().version > version:
                            break
            except TimeoutError:
                pass
        return self.current_map().version > version

    def start_probe(self, node_id: str, version: int) -> asyncio.Task[None] | None:
        """Starts a task that probes a node which did not answer under map `version`, and marks it `away` if
        it is silent. Returns None if no probe is needed."""
        if self._probe_suspect is None or node_id == self.node_id or self.current_map().version > version:
            return None
        self.note_silence(node_id)
        task = self._probing.get(node_id)
        if task is None:
            task = asyncio.ensure_future(self._probe_suspect(self, node_id, version))
            self._probing[node_id] = task
            task.add_done_callback(lambda _: self._probing.pop(node_id, None))
        return task

    def is_suspect(self, node_id: str) -> bool:
        """Returns whether a node did not answer and has not yet answered its probe."""
        return node_id in self._probing

    async def report_suspect(self, node_id: str, version: int, max_wait: float | None = None) -> None:
        """Reports that a node did not answer under map `version` (`start_probe`). Waits up to `max_wait`
        seconds until the map shows the node's state, as far as it can be found out; the probe then continues
        in the background. Never raises ControlError: while the control store is unreachable, no node changes
        state."""
        task = self.start_probe(node_id, version)
        if task is not None:
            await asyncio.wait([task], timeout=max_wait)
