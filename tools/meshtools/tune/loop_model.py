"""LoopModel: the speed that a loop would have if something changed, by the model of `mesh sizing`.

Law: pure. A loop waits for one stage most, so the resource of this stage is full at the measured rate,
whatever the assumed rates of hardware say; of every other resource the assumptions hold, unless the
measured rate is above them. Removing a wait gains no more than that wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshtools.sizing.estimate import Design, Hardware, resource_loads, runs_on
from meshtools.sizing.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshtools.sizing.assumptions import Assumptions
    from meshtools.tune.observation import Loop, Observation, PlanFacts, PlanUse

_BUSY: Final = 0.5
WORTH: Final = 0.05
"""A wait below this share of a loop's time is not worth a change."""


class LoopModel:
    """What `loop` does in the observed mesh. `hardware`: of the mesh; `workload`: of the loop alone, at its
    measured rate; `stage`: the one that it waits for most."""

    def __init__(
        self, seen: Observation, loop: Loop, use: PlanUse, facts: PlanFacts, assumed: Assumptions
    ) -> None:
        self.seen, self.loop, self.use, self.facts, self.assumed = seen, loop, use, facts, assumed
        nodes = max(1, len(seen.nodes))
        rotational, solid = int(seen.total("rotational")), int(seen.total("solid"))
        self.rotational = rotational > 0
        self.hardware = Hardware(
            nodes,
            rotational,
            max(solid, 0 if rotational else nodes),
            max(1, round(seen.total("workers") / nodes)),
            assumed["node.base_memory_bytes"] + seen.total("memory_free_bytes") / nodes,
            1,
        )
        self.design = Design("live", "rotational" if rotational else "nvme", copies=1)
        received = sum(other.samples_per_second for other in seen.loops if other.plan == loop.plan)
        prepared = min(1.0, use.rows_per_second / received) if received else 1.0
        size = max(1.0, facts.bytes / max(1, facts.samples))
        self.workload = Workload(
            float(max(1, facts.bytes)),
            float(max(1, facts.samples)),
            gpus=1,
            bytes_per_gpu_second=loop.samples_per_second * size,
            order="full" if facts.order == "global" else "blocks",
            shard_bytes=max(1.0, facts.bytes / max(1, facts.shards)),
            block_shards=max(1, facts.block_shards),
            read_ahead_share=self._read_ahead_share(seen.total("read_ahead_bytes")),
            cpu_seconds_per_sample=use.cpu_seconds_per_row * prepared,
            delivered_bytes_per_sample=(
                seen.sent_bytes_per_second / seen.rows_per_second if seen.rows_per_second else size
            ),
        )
        self._now = self._limits(self.workload, self.hardware)

    def __repr__(self) -> str:
        return f"<LoopModel of {self.loop.name}, which waits for {self.loop.stage}>"

    @property
    def bound(self) -> str:
        """The resource that the loop waits for: decode, disk or network; "" if it waits for nothing."""
        stage = self.loop.stage
        if self.loop.stalls.get(stage, 0.0) < WORTH:
            return ""
        if stage == "preprocessing" and self.disk_busy > max(_BUSY, self.transforms_busy):
            return "disk"  # rows that are queued behind those which wait for a disk count as preprocessing
        return {"preprocessing": "decode", "fetch": "disk", "network": "network"}[stage]

    @property
    def transforms_busy(self) -> float:
        """Share of their time for which the transform processes compute, 0…1."""
        spent = sum(plan.rows_per_second * plan.cpu_seconds_per_row for plan in self.seen.plans.values())
        return spent / max(1.0, self.seen.total("workers"))

    @property
    def disk_busy(self) -> float:
        """Share of their time for which rotational disks read ahead, 0…1."""
        return self.seen.disk_seconds / max(1.0, self.seen.total("rotational"))

    def _read_ahead_share(self, memory: float) -> float:
        return min(1.0, max(1e-6, memory / max(1, self.facts.bytes)))

    def with_read_ahead(self, memory: float) -> Workload:
        """Return the workload with so many bytes for read-ahead, on all nodes together."""
        return replace(self.workload, read_ahead_share=self._read_ahead_share(memory))

    def speed(self, workload: Workload, hardware: Hardware | None = None) -> float:
        """Return the samples a second that the loop would have."""
        limits = self._limits(workload, hardware or self.hardware)
        rate, bound = self.loop.samples_per_second, self.bound
        most = rate / max(1 - self.loop.stalls.get(self.loop.stage, 0.0), 0.01)
        for resource, limit in limits.items():
            now = self._now[resource]
            scale = rate / now if resource == bound else max(1.0, rate / now)
            most = min(most, limit * scale)
        return most

    def scaled(self, factor: float) -> float:
        """Return the samples a second if each sample took `factor` times as much of the bound resource."""
        rate = self.loop.samples_per_second
        return min(rate / max(factor, 1e-9), rate / max(1 - self.loop.stalls[self.loop.stage], 0.01))

    def _limits(self, workload: Workload, hardware: Hardware) -> Mapping[str, float]:
        """Return the samples a second that each resource alone carries."""
        rate = self.loop.samples_per_second
        found: dict[str, float] = {}
        for load in resource_loads(workload, self.design, hardware, self.assumed):
            name = "disk" if load.resource in ("disk", "seeks", "NVMe") else load.resource
            if load.resource != "memory" and load.needed > 0:
                found[name] = min(found.get(name, float("inf")), rate / max(load.utilization, 1e-12))
        for name in ("decode", "disk", "network"):
            found.setdefault(name, float("inf"))
        return found

    def runs(self, *, sharing: bool) -> int:
        """Return how many loops like this one the mesh carries at the planned utilization."""
        return runs_on(self.workload, self.design, self.assumed, self.hardware, sharing=sharing)
