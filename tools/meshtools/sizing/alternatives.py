"""Alternatives: the designs that are shown side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshtools.sizing.estimate import Design, estimate

if TYPE_CHECKING:
    from meshtools.sizing.assumptions import Assumptions
    from meshtools.sizing.estimate import Estimate
    from meshtools.sizing.workload import Workload


def alternatives(workload: Workload, *, copies: int = 2, cache_share: float = 0.3) -> list[Design]:
    """Return the designs that make sense for a workload: kept samples and views only if there are ops, and
    what is kept only if there is a second epoch."""
    designs = [
        Design("rotational", "rotational", copies),
        Design("NVMe", "nvme", copies),
        Design(f"tiered {cache_share:.0%}", "rotational", copies, cache_share),
        Design(f"rotational, {copies + 1} copies", "rotational", copies + 1),
    ]
    if workload.cpu_seconds_per_sample and workload.epochs * workload.jobs > 1:
        if workload.kept_bytes_per_sample:
            designs.append(Design("rotational, decoded kept", "rotational", copies, form="decoded"))
            designs.append(Design("NVMe, decoded kept", "nvme", copies, form="decoded"))
        designs.append(Design("rotational, view", "rotational", copies, form="view"))
        designs.append(Design("NVMe, view", "nvme", copies, form="view"))
    return designs


def compare(
    workload: Workload, assumed: Assumptions, *, copies: int = 2, cache_share: float = 0.3
) -> list[Estimate]:
    """Return the estimates of all alternatives: those without problems first, the cheapest before others."""
    found = [
        estimate(workload, design, assumed)
        for design in alternatives(workload, copies=copies, cache_share=cache_share)
    ]
    return sorted(found, key=lambda each: (len(each.problems), each.hardware_usd))
