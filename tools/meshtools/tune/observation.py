"""Observation: what loops, plans and nodes did between two activity documents of a mesh.

Law: pure. A figure that the nodes did not report is None or 0, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.admin.cluster_admin import BucketInfo
    from meshsdk.client.read_costs import DiskCost

STAGES: Final = ("network", "preprocessing", "fetch")


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What a plan is: its hash, snapshot and bucket, `order` ("global", "blocks" or "none"), its ops, and
    samples, bytes and shards of the snapshot. `disk_cost`: what orders cost rotational disks."""

    hash: str
    snapshot: str
    bucket: str
    order: str
    ops: tuple[str, ...]
    samples: int
    bytes: int
    shards: int
    disk_cost: DiskCost | None = None
    block_shards: int = 0


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop: samples a second; shares of its time that it waits, in all and by stage. epochs: how
    far it is; epoch_samples: of an epoch. plan: the first digits of its plan's hash, "" if unknown."""

    name: str
    plan: str
    samples_per_second: float
    wait_share: float
    stalls: Mapping[str, float]
    epochs: float
    epoch_samples: float

    @property
    def stage(self) -> str:
        """The stage that it waits for longest."""
        return max(STAGES, key=lambda stage: self.stalls.get(stage, 0.0))

    @property
    def ceiling(self) -> float:
        """Samples a second without any wait."""
        return self.samples_per_second / max(1 - self.wait_share, 0.01)


@dataclass(frozen=True, slots=True)
class PlanUse:
    """What a plan costs: rows rendered a second, processor seconds of each, seeks of each sample that was
    read ahead (None: none was), and the share of requests for frames that found one which was made."""

    rows_per_second: float
    cpu_seconds_per_row: float
    seeks_per_sample: float | None
    shared_share: float


@dataclass(frozen=True, slots=True)
class NodeUse:
    """A node: cores, transform processes, bytes by name; decoded_at_quota: buckets of whose samples
    no more is kept for their quota; free_bytes: of its disks. rotational, solid: how
    many disks it has."""

    cores: float
    transforms: float
    decoded_bytes: float
    decoded_limit: float
    decoded_at_quota: float
    cache_bytes: float
    cache_capacity: float
    memory_free_bytes: float
    read_ahead_bytes: float
    disk_bytes: float
    free_bytes: float
    rotational: int
    solid: int

    @property
    def workers(self) -> float:
        """Cores that ops can use: no more than transform processes."""
        return min(self.cores, self.transforms) if self.transforms else self.cores


@dataclass(frozen=True, slots=True)
class Observation:
    """A mesh between two documents, `seconds` apart.

    decoded_hits, cached_hits: shares of reads that the decoded cache, and the cache of origins, had; None if
    there were none. decoded_saved: processor seconds that a hit saves; None if there was no hit.
    disk_seconds: of rotational disks, a second; sent: bytes a second to clients. facts: of plans, by the
    first digits of their hashes. buckets: None if the caller may not see them.
    """

    seconds: float
    loops: tuple[Loop, ...]
    plans: Mapping[str, PlanUse]
    nodes: Mapping[str, NodeUse]
    decoded_hits: float | None
    decoded_saved: float | None
    cached_hits: float | None
    disk_seconds: float
    sent_bytes_per_second: float
    rows_per_second: float
    silent: tuple[str, ...] = ()
    facts: Mapping[str, PlanFacts] = field(default_factory=dict)
    buckets: Mapping[str, BucketInfo] | None = None

    def total(self, name: str) -> float:
        """Return the sum of a figure of NodeUse over all nodes."""
        return float(sum(getattr(node, name) for node in self.nodes.values()))


def observe(before: Mapping[str, Any], after: Mapping[str, Any]) -> Observation:
    """Compare two documents of `GET /-/activity`. Nodes that are in one of them only, or have restarted in
    between, do not count."""
    pairs = {
        node: (before["nodes"][node], document)
        for node, document in after["nodes"].items()
        if node in before["nodes"]
        and document["time"] > before["nodes"][node]["time"]
        and document["totals"]["requests"] >= before["nodes"][node]["totals"]["requests"]
    }
    seconds = {node: (now["time"] - was["time"]) / 1000 for node, (was, now) in pairs.items()}

    def rate(name: str) -> float:
        gained: float = sum(
            (now["totals"].get(name, 0.0) - was["totals"].get(name, 0.0)) / seconds[node]
            for node, (was, now) in pairs.items()
        )
        return gained

    def share(hit: str, miss: str) -> float | None:
        hits, misses = rate(hit), rate(miss)
        return hits / (hits + misses) if hits + misses > 0 else None

    hits = rate("decoded_hit")
    return Observation(
        seconds=max(seconds.values(), default=0.0),
        loops=tuple(_loops(pairs, seconds)),
        plans=_plans(pairs, seconds),
        nodes={node: _node(now) for node, (_, now) in pairs.items()},
        decoded_hits=share("decoded_hit", "decoded_miss"),
        decoded_saved=rate("decoded_seconds_saved") / hits if hits > 0 else None,
        cached_hits=share("cache_hit", "cache_miss"),
        disk_seconds=rate("read_ahead_seconds"),
        sent_bytes_per_second=rate("bytes_out"),
        rows_per_second=rate("rows"),
        silent=tuple(sorted({*after["silent"], *(set(after["nodes"]) - set(pairs))})),
    )


def _loops(pairs: Mapping[str, tuple[Any, Any]], seconds: Mapping[str, float]) -> list[Loop]:
    """Return the loops that reported in between, over the nodes to which they did."""
    found = []
    for name in sorted({name for _, now in pairs.values() for name in now["loaders"]}):
        gained = {"samples": 0.0, "seconds": 0.0, "waited": 0.0}
        stalls = dict.fromkeys(STAGES, 0.0)
        rate = 0.0
        latest: Mapping[str, Any] = {"plan": "", "epochs": -1.0, "epoch_samples": 0.0}
        for node, (was, now) in pairs.items():
            own = now["loaders"].get(name)
            if own is None:
                continue
            earlier = was["loaders"].get(name, {})
            if own["seconds"] <= earlier.get("seconds", 0.0):
                continue
            for figure in gained:
                gained[figure] += max(own[figure] - earlier.get(figure, 0.0), 0.0)
            rate += max(own["samples"] - earlier.get("samples", 0.0), 0.0) / seconds[node]
            for stage in STAGES:
                stalled = own["stalls"].get(stage, 0.0) - earlier.get("stalls", {}).get(stage, 0.0)
                stalls[stage] += max(stalled, 0.0)
            if own["epochs"] > latest["epochs"]:
                latest = own
        if gained["samples"] <= 0 or gained["seconds"] <= 0:
            continue
        found.append(
            Loop(
                name,
                latest["plan"],
                rate,
                min(gained["waited"] / gained["seconds"], 1.0),
                {stage: min(stalled / gained["seconds"], 1.0) for stage, stalled in stalls.items()},
                float(latest["epochs"]),
                float(latest["epoch_samples"]),
            )
        )
    return found


def _plans(pairs: Mapping[str, tuple[Any, Any]], seconds: Mapping[str, float]) -> dict[str, PlanUse]:
    """Return the plans of which rows were rendered, or frames requested, in between."""
    sums: dict[str, dict[str, float]] = {}
    for node, (was, now) in pairs.items():
        for plan, counted in now.get("plans", {}).items():
            earlier = was.get("plans", {}).get(plan, {})
            own = sums.setdefault(plan, {})
            for figure, value in counted.items():
                own[figure] = own.get(figure, 0.0) + (value - earlier.get(figure, 0.0)) / seconds[node]
    return {
        plan: PlanUse(
            own["rows"],
            own["cpu"] / own["rows"] if own["rows"] else 0.0,
            own["seeks"] / own["read_ahead"] if own["read_ahead"] > 0 else None,
            own["shared"] / (own["made"] + own["shared"]) if own["made"] + own["shared"] > 0 else 0.0,
        )
        for plan, own in sums.items()
        if own["rows"] > 0 or own["made"] + own["shared"] > 0
    }


def _node(document: Mapping[str, Any]) -> NodeUse:
    gauges, disks = document["gauges"], document.get("disks", {})
    return NodeUse(
        gauges["cores"],
        document["totals"].get("transform_processes", 0.0),
        gauges["decoded_cache_bytes"],
        gauges["decoded_cache_limit"],
        gauges.get("decoded_at_quota", 0.0),
        gauges["cache_bytes"],
        gauges["cache_capacity"],
        gauges["memory_free_bytes"],
        gauges.get("read_ahead_bytes", 0.0),
        gauges["disk_bytes"],
        gauges["disk_free_bytes"],
        *(int(disks.get(kind, {}).get("disks", 0)) for kind in ("rotational", "solid-state")),
    )
