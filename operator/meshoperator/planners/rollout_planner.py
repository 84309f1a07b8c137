"""Rollout planner: the next actions for a cluster: scale, drain, roll out. Pure.

Law: keeps no state between passes, so a restarted operator continues. A pod that holds data is deleted only
when the cluster map proves that its share is on other nodes, or, in maintenance, when all others are
healthy.
Invariant: actions that can reduce redundancy are taken one at a time.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from meshoperator.planners.cluster_state import holds_no_data, is_settled
from meshoperator.planners.disk_affinity import misplaced_pods
from meshwire.cluster.transitions import TransitionError, cancel_drain, drain_node, remove_node

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshoperator.planners.cluster_state import ClusterState, Pod
    from meshwire.cluster import ClusterMap

MapChange = tuple[Literal["drain", "stay", "leave"], str]
_CHANGES: Final = {"drain": drain_node, "stay": cancel_drain, "leave": remove_node}
_BLANK: Final = ("joining", "down", "away")


@dataclass(frozen=True, slots=True)
class Actions:
    """What to do now. `scale`: pool → replicas. `delete`: pods, with the reason; `force_delete`: pods whose
    Kubernetes node is lost, deleted without its help. `displaced`: pods on each other's Kubernetes nodes, and
    the like, deleted all at once and without grace. `discard`: pods deleted with their disks. `waiting`: what
    is pending, and what it waits for."""

    scale: Mapping[str, int]
    changes: tuple[MapChange, ...]
    delete: tuple[tuple[str, str], ...]
    waiting: tuple[str, ...]
    settled: bool
    force_delete: tuple[tuple[str, str], ...] = ()
    discard: tuple[str, ...] = ()
    displaced: tuple[tuple[str, str], ...] = ()

    @property
    def pending(self) -> bool:
        """Whether anything is being changed, or waits to be."""
        return bool(self.waiting or self.changes or self.delete or self.displaced)


def apply_map_change(cluster: ClusterMap, change: MapChange) -> ClusterMap:
    """Return the map after a change. Raises TransitionError."""
    return _CHANGES[change[0]](cluster, change[1])


def plan_rollout(sight: ClusterState) -> Actions:
    """Return the next actions."""
    return _RolloutPlanner(sight).run()


class _RolloutPlanner:
    def __init__(self, sight: ClusterState) -> None:
        self._sight, self._spec = sight, sight.spec
        self._scale: dict[str, int] = {}
        self._changes: list[MapChange] = []
        self._delete: list[tuple[str, str]] = []
        self._waiting: list[str] = []
        self._victims: set[str] = set()

    def run(self) -> Actions:
        for pool in {**self._sight.wanted, **self._sight.replicas}:
            self._size(pool)
        self._wishes()
        self._depart()
        forget, discard = self._lost_hosts(), self._discardable_pods()
        well = is_settled(self._sight)
        displaced = tuple(misplaced_pods(self._sight))
        self._victims |= {name for name, _ in displaced}
        self._roll(well=well)
        changes, delete, waiting = tuple(self._changes), tuple(self._delete), tuple(self._waiting)
        return Actions(self._scale, changes, delete, waiting, well, forget, discard, displaced)

    # --- size ---------------------------------------------------------------------------------------------

    def _size(self, pool: str) -> None:
        """Scale a pool; a pool that the spec no longer names shrinks to nothing."""
        wanted, there = self._sight.wanted.get(pool, 0), self._sight.replicas.get(pool, 0)
        if there <= wanted or self._spec.scale_down == "Retain":
            self._scale[pool] = wanted
            return
        keep = there
        for ordinal in range(there - 1, wanted - 1, -1):
            name = f"{self._sight.cluster}-{pool}-{ordinal}"
            self._victims.add(name)
            if keep == ordinal + 1 and self._sight.map is not None and self._empty(name):
                keep = ordinal
            else:
                self._drain(name, "the pool shrinks")
        self._scale[pool] = keep

    def _depart(self) -> None:
        """Remove nodes from the map that hold nothing and whose pods are gone for good; a running one would
        rejoin."""
        cluster, pods = self._sight.map, {pod.name for pod in self._sight.pods}
        if cluster is None:
            return
        for node in cluster.nodes:
            if node.node_id in pods or not self._surplus(node.node_id):
                continue
            with suppress(TransitionError):
                remove_node(cluster, node.node_id)
                self._changes.append(("leave", node.node_id))

    def _surplus(self, name: str) -> bool:
        """Return whether no StatefulSet creates a pod of this name any more. The StatefulSet of a pool that
        left the spec is deleted before its pods have ended; then the pod is ours (it has a MeshNode), in no
        pool."""
        for pool, replicas in self._scale.items():
            head, _, ordinal = name.rpartition("-")
            if head == f"{self._sight.cluster}-{pool}" and ordinal.isdecimal():
                return int(ordinal) >= replicas
        return name in self._sight.desired

    def _drain(self, name: str, why: str) -> None:
        cluster = self._sight.map
        node = cluster.node(name) if cluster else None
        if cluster is None or node is None:
            self._waiting.append(f"{name}: the cluster map is unknown")
        elif self._empty(name):
            return
        elif node.leaving:
            self._waiting.append(f"{name} is drained: {why}")
        else:
            try:
                drain_node(cluster, name)
            except TransitionError as error:
                self._waiting.append(str(error))
                return
            self._changes.append(("drain", name))

    # --- what people and Kubernetes ask of single nodes ---------------------------------------------------

    def _wishes(self) -> None:
        for pod in sorted(self._sight.pods, key=lambda pod: pod.name):
            node = self._sight.map.node(pod.name) if self._sight.map else None
            if node is None or pod.name in self._victims or self._surplus(pod.name):
                continue  # a node that leaves must not take its data back
            desired = self._sight.desired.get(pod.name, "Active")
            if desired in ("Drained", "Decommissioned"):
                self._drain(pod.name, f"its desiredState is {desired}")
            elif pod.node in self._sight.cordoned:
                self._drain(pod.name, f"the Kubernetes node {pod.node} is cordoned")
            elif node.leaving and not self._updates_by_drain(pod):
                self._changes.append(("stay", pod.name))

    def _updates_by_drain(self, pod: Pod) -> bool:
        return self._spec.update.mode == "Drain" and self._is_outdated(pod)

    def _discardable_pods(self) -> tuple[str, ...]:
        """Return the decommissioned pods that are proved to be empty."""
        wanted = (name for name, desired in self._sight.desired.items() if desired == "Decommissioned")
        return tuple(sorted(name for name in wanted if self._sight.map is not None and self._empty(name)))

    def _lost_hosts(self) -> tuple[tuple[str, str], ...]:
        """Return pods that no kubelet will end: their Kubernetes node is gone, or it is silent and the mesh
        has given them up."""
        found, hosts, cluster = [], self._sight.hosts, self._sight.map
        if hosts is None:
            return ()
        for pod in self._sight.pods:
            if pod.node and pod.node not in hosts:
                found.append((pod.name, f"its Kubernetes node {pod.node} is gone"))
            elif pod.overdue and not hosts.get(pod.node, True):
                node = cluster.node(pod.name) if cluster else None
                if node is None or node.state == "down":
                    found.append(
                        (pod.name, f"its Kubernetes node {pod.node} is silent, and the mesh has given it up")
                    )
                else:
                    self._waiting.append(
                        f"{pod.name} cannot be stopped: Kubernetes node {pod.node} is silent"
                    )
        return tuple(found)

    # --- roll-out -----------------------------------------------------------------------------------------

    def _is_outdated(self, pod: Pod) -> bool:
        return pod.template != self._sight.templates.get(pod.pool, pod.template)

    def _roll(self, *, well: bool) -> None:
        outdated = [pod for pod in sorted(self._sight.pods, key=lambda p: p.name) if self._is_outdated(pod)]
        outdated = [pod for pod in outdated if not pod.leaving and pod.name not in self._victims]
        if not outdated or self._spec.update.paused:
            return
        broken = [pod for pod in outdated if self._useless(pod)]
        self._delete += [(pod.name, "it is outdated and not working") for pod in broken]
        out = sum(1 for pod in self._sight.pods if not self._works(pod) and not self._never_was(pod))
        out += len(self._missing())
        room = self._spec.update.max_unavailable - out
        pools: Counter[str] = Counter()
        for pod in (pod for pod in outdated if pod not in broken):
            if not well:
                self._waiting.append(f"{pod.name} is outdated; waiting until every node is healthy")
                return
            if room < 1:
                self._waiting.append(f"{pod.name} is outdated; waiting for {out} to be ready")
                return
            if pools[pod.pool]:
                continue
            if self._spec.update.mode == "Drain" and not self._empty(pod.name):
                self._drain(pod.name, "it is outdated")
                return
            self._delete.append((pod.name, "it is outdated"))
            pools[pod.pool] += 1
            room -= 1

    def _missing(self) -> set[str]:
        """Return pods that are about to be created: one that was just deleted is missing, and the map may not
        show that yet."""
        names = {
            f"{self._sight.cluster}-{pool}-{ordinal}"
            for pool, replicas in self._scale.items()
            for ordinal in range(min(replicas, self._sight.replicas.get(pool, 0)))
        }
        return names - {pod.name for pod in self._sight.pods}

    @staticmethod
    def _works(pod: Pod) -> bool:
        return pod.ready and not pod.leaving

    def _useless(self, pod: Pod) -> bool:
        """Return whether a pod may be deleted at once, because nothing depends on it."""
        node = self._sight.map.node(pod.name) if self._sight.map else None
        return not pod.ready and (not pod.scheduled or node is None or node.state in _BLANK)

    def _never_was(self, pod: Pod) -> bool:
        """Return whether a pod cannot be scheduled and the mesh works without it."""
        node = self._sight.map.node(pod.name) if self._sight.map else None
        return not pod.scheduled and (node is None or node.state == "down")

    def _empty(self, name: str) -> bool:
        return self._sight.map is None or holds_no_data(self._sight, name)
