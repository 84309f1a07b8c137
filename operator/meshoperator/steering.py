"""What to do next about a cluster: scale, drain, roll out. Pure; looks at everything afresh each time.

Law: nothing is remembered from one look to the next, so that an operator killed anywhere goes on. A pod that
holds data goes only when the cluster map proves that its share is elsewhere, or (in maintenance) when every
other is well. Invariant: one step at a time for what can lose redundancy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from meshwire.cluster.transitions import TransitionError, drained, left, stayed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshoperator.resources.cluster import MeshClusterSpec, NodePool
    from meshwire.cluster import ClusterMap

MapChange = tuple[Literal["drain", "stay", "leave"], str]
_CHANGES: Final = {"drain": drained, "stay": stayed, "leave": left}
_WELL: Final = ("up", "draining")


@dataclass(frozen=True, slots=True)
class Pod:
    """A daemon's pod. `template`: what it was made of."""

    name: str
    pool: str
    template: str
    ready: bool
    scheduled: bool = True
    node: str = ""
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """Everything there is to see. `replicas`: of the StatefulSets that exist; `wanted`, `templates`: by pool;
    `desired`: desiredState by node id; `cordoned`: Kubernetes nodes that take no more pods."""

    cluster: str
    spec: MeshClusterSpec
    wanted: Mapping[str, int]
    templates: Mapping[str, str]
    replicas: Mapping[str, int]
    pods: tuple[Pod, ...]
    map: ClusterMap | None
    desired: Mapping[str, str] = field(default_factory=dict)
    cordoned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Steps:
    """What to do now. `scale`: pool → replicas. `delete`: a pod, with why. `reasons`: for people. `waiting`:
    what is not done, and for what it waits."""

    scale: Mapping[str, int]
    changes: tuple[MapChange, ...]
    delete: tuple[tuple[str, str], ...]
    waiting: tuple[str, ...]
    settled: bool


def settled(sight: Sight) -> bool:
    """Whether every node is well and no data is on its way."""
    if sight.map is None:
        return False
    return not sight.map.moving and all(node.state in _WELL for node in sight.map.nodes)


def applied(cluster: ClusterMap, change: MapChange) -> ClusterMap:
    """The map after a change. Raises TransitionError."""
    return _CHANGES[change[0]](cluster, change[1])


def steer(sight: Sight) -> Steps:
    """The next steps."""
    return _Steering(sight).run()


class _Steering:
    def __init__(self, sight: Sight) -> None:
        self._sight, self._spec = sight, sight.spec
        self._scale: dict[str, int] = {}
        self._changes: list[MapChange] = []
        self._delete: list[tuple[str, str]] = []
        self._waiting: list[str] = []
        self._victims: set[str] = set()

    def run(self) -> Steps:
        for pool in self._spec.node_pools:
            self._size(pool)
        self._wishes()
        well = settled(self._sight)
        self._roll(well=well)
        return Steps(self._scale, tuple(self._changes), tuple(self._delete), tuple(self._waiting), well)

    # --- size ---------------------------------------------------------------------------------------------

    def _size(self, pool: NodePool) -> None:
        wanted, there = self._sight.wanted[pool.name], self._sight.replicas.get(pool.name, 0)
        if there <= wanted or self._spec.scale_down == "Retain":
            self._scale[pool.name] = wanted
            return
        keep = there
        for ordinal in range(there - 1, wanted - 1, -1):
            name = f"{self._sight.cluster}-{pool.name}-{ordinal}"
            self._victims.add(name)
            if keep == ordinal + 1 and self._gone(name):
                keep = ordinal
            else:
                self._drain(name, "the pool becomes smaller")
        self._scale[pool.name] = keep

    def _gone(self, name: str) -> bool:
        """Whether a node holds nothing any more that is not elsewhere; then it is taken from the map."""
        cluster = self._sight.map
        if cluster is None:
            return False  # nobody knows
        if cluster.node(name) is None:
            return True
        try:
            left(cluster, name)
        except TransitionError:
            return False
        self._changes.append(("leave", name))
        return True

    def _drain(self, name: str, why: str) -> None:
        cluster = self._sight.map
        node = cluster.node(name) if cluster else None
        if cluster is None or node is None:
            self._waiting.append(f"{name}: the cluster map is not known")
            return
        if node.leaving or not node.stores:
            self._waiting.append(f"{name} gives its data away: {why}")
            return
        try:
            drained(cluster, name)
        except TransitionError as error:
            self._waiting.append(str(error))
            return
        self._changes.append(("drain", name))

    # --- what people and Kubernetes ask of single nodes ---------------------------------------------------

    def _wishes(self) -> None:
        for pod in sorted(self._sight.pods, key=lambda pod: pod.name):
            node = self._sight.map.node(pod.name) if self._sight.map else None
            if node is None or pod.name in self._victims:
                continue
            desired = self._sight.desired.get(pod.name, "Active")
            if desired in ("Drained", "Decommissioned"):
                self._drain(pod.name, f"its desiredState is {desired}")
            elif pod.node in self._sight.cordoned:
                self._drain(pod.name, f"the Kubernetes node {pod.node} is cordoned")
            elif node.leaving and not self._updates_by_drain(pod):
                self._changes.append(("stay", pod.name))

    def _updates_by_drain(self, pod: Pod) -> bool:
        return self._spec.update.mode == "Drain" and self._outdated(pod)

    # --- roll-out -----------------------------------------------------------------------------------------

    def _outdated(self, pod: Pod) -> bool:
        return pod.template != self._sight.templates.get(pod.pool, pod.template)

    def _roll(self, *, well: bool) -> None:
        outdated = [pod for pod in sorted(self._sight.pods, key=lambda p: p.name) if self._outdated(pod)]
        outdated = [pod for pod in outdated if not pod.leaving and pod.name not in self._victims]
        if not outdated or self._spec.update.paused:
            return
        broken = [pod for pod in outdated if not pod.ready]
        self._delete += [(pod.name, "it is outdated, and does not work") for pod in broken]
        out = sum(1 for pod in self._sight.pods if not pod.ready or pod.leaving)
        room = self._spec.update.max_unavailable - out
        pools: Counter[str] = Counter()
        for pod in (pod for pod in outdated if pod.ready):
            if not well:
                self._waiting.append(f"{pod.name} is outdated; it waits until every node is well")
                return
            if room < 1:
                self._waiting.append(f"{pod.name} is outdated; it waits for {out} others to be ready")
                return
            if pools[pod.pool]:
                continue
            if self._spec.update.mode == "Drain" and not self._empty(pod.name):
                self._drain(pod.name, "it is outdated")
                return
            self._delete.append((pod.name, "it is outdated"))
            pools[pod.pool] += 1
            room -= 1

    def _empty(self, name: str) -> bool:
        """Whether the map proves that a node's share is elsewhere."""
        cluster = self._sight.map
        node = cluster.node(name) if cluster else None
        if cluster is None or node is None or not node.stores:
            return True
        return node.leaving and all(share.node_id != name for share in cluster.present)
