"""Reports of estimates: a table for people, records for programs, charts.

Law: shows numbers of an estimate, computes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshtools.quantities import bytes_text, seconds_text
from meshtools.sizing.estimate import drives_usd
from meshtools.svg_chart import Bars, bars_svg

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshtools.sizing.assumptions import Assumptions
    from meshtools.sizing.estimate import Estimate
    from meshtools.sizing.workload import Workload


def head(workload: Workload) -> str:
    """Return what was asked, in one line."""
    jobs = "" if workload.jobs == 1 else f", {workload.jobs} jobs{' that share' if workload.sharing else ''}"
    gpus = ""
    if workload.gpus:
        gpus = f", {workload.gpus} GPUs × {bytes_text(workload.bytes_per_gpu_second)}/s"
    deadline = ""
    if workload.deadline_seconds is not None:
        deadline = f", within {seconds_text(workload.deadline_seconds)}"
    return (
        f"{bytes_text(workload.data_bytes)} in {workload.samples:,.0f} samples of "
        f"{bytes_text(workload.bytes_per_sample)}{gpus}, {workload.epochs} "
        f"epoch{'s' * (workload.epochs != 1)}{jobs}{deadline}: "
        f"{bytes_text(workload.demand_bytes_per_second)}/s a job"
    )


def table(estimates: Sequence[Estimate], assumed: Assumptions) -> Iterator[str]:
    """Yield the lines of a table of alternatives."""
    ports = ports_text(assumed)
    yield (
        f"{'design':26} {'nodes':>5} {'disks':>6} {'NVMe':>5} {'cores':>6} {'memory':>8} {ports:>6} "
        f"{'drives $':>10} {'all $':>10} {'epoch':>8} {'total':>8} {'$/epoch':>8} {'runs':>5}  bound"
    )
    for each in estimates:
        bought, bound = each.hardware, each.bound
        bound_text = f"{_resource_text(bound.resource)} {bound.utilization:.0%}"
        if each.problems:
            bound_text += f" ({', '.join(each.problems)})"
        yield (
            f"{each.design.name:26} {bought.nodes:5} {bought.rotational_drives:6} {bought.nvme_drives:5} "
            f"{bought.nodes * bought.cores_per_node:6} "
            f"{bytes_text(bought.nodes * bought.memory_bytes_per_node):>8} "
            f"{bought.nodes * bought.nics_per_node:6} {drives_usd(bought, assumed):10,.0f} "
            f"{each.hardware_usd:10,.0f} {seconds_text(each.epoch_seconds):>8} "
            f"{seconds_text(each.total_seconds):>8} {each.usd_per_epoch:8.2f} {each.runs:5}  {bound_text}"
        )


def ports_text(assumed: Assumptions) -> str:
    """Return the kind of the nodes' ports: `25 GbE`."""
    return f"{assumed['node.nic_bytes_per_second'] * 8 / 1e9:g} GbE"


def loads_text(each: Estimate, assumed: Assumptions) -> Iterator[str]:
    """Yield what to buy for an alternative, and how near each resource is to its limit."""
    bought = each.hardware
    drives = [
        f"{count} {name} of {bytes_text(assumed[f'{media}.bytes_per_drive'])}"
        for count, name, media in (
            (bought.rotational_drives, "disks", "rotational"),
            (bought.nvme_drives, "NVMe drives", "nvme"),
        )
        if count
    ]
    yield (
        f"{each.design.name}: {bought.nodes} nodes of {bought.cores_per_node} cores, "
        f"{bytes_text(bought.memory_bytes_per_node)} and {bought.nics_per_node} × {ports_text(assumed)}, "
        f"with {' and '.join(drives)}; {each.design.copies} cop{'y' if each.design.copies == 1 else 'ies'}"
    )
    for load in sorted(each.loads, key=lambda load: -load.utilization):
        if load.limit:
            yield (
                f"  {_resource_text(load.resource):8} {load.utilization:6.1%}  "
                f"{_number_text(load.needed)} of {_number_text(load.limit)} {load.unit}"
            )
    yield (
        f"  first epoch {seconds_text(each.first_epoch_seconds)}"
        + (f" after {seconds_text(each.prepare_seconds)} for the view" if each.prepare_seconds else "")
        + f", later ones {seconds_text(each.epoch_seconds)}; such runs at once: {each.runs}, "
        f"or {each.sharing_runs} that share; all epochs cost ${each.usd_total:,.2f}"
    )


def _resource_text(resource: str) -> str:
    return "cores" if resource == "decode" else resource


def _number_text(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def record(each: Estimate, assumed: Assumptions) -> dict[str, Any]:
    """Return an estimate as plain JSON values; units are in the names."""
    bought = each.hardware
    return {
        "design": each.design.name,
        "copies": each.design.copies,
        "nodes": bought.nodes,
        "rotational_drives": bought.rotational_drives,
        "nvme_drives": bought.nvme_drives,
        "cores_per_node": bought.cores_per_node,
        "memory_bytes_per_node": round(bought.memory_bytes_per_node),
        "nics_per_node": bought.nics_per_node,
        "drives_usd": round(drives_usd(bought, assumed), 2),
        "hardware_usd": round(each.hardware_usd, 2),
        "bytes_per_second": round(each.bytes_per_second),
        "prepare_seconds": round(each.prepare_seconds, 1),
        "first_epoch_seconds": round(each.first_epoch_seconds, 1),
        "epoch_seconds": round(each.epoch_seconds, 1),
        "total_seconds": round(each.total_seconds, 1),
        "usd_per_epoch": round(each.usd_per_epoch, 4),
        "usd_total": round(each.usd_total, 4),
        "runs": each.runs,
        "sharing_runs": each.sharing_runs,
        "bound": each.bound.resource,
        "utilization": {load.resource: round(load.utilization, 4) for load in each.loads},
        "problems": list(each.problems),
    }


def plot(estimates: Sequence[Estimate], assumed: Assumptions) -> str:
    """Return SVG: hardware and drives of each alternative in USD, and which of its hardware is nearest to the
    limit."""
    names = [each.design.name for each in estimates]
    prices = [each.hardware_usd for each in estimates]
    drives = [drives_usd(each.hardware, assumed) for each in estimates]
    bounds = [
        max((load for load in each.loads if load.resource != "GPU"), key=lambda load: load.utilization)
        for each in estimates
    ]
    return bars_svg(
        [
            Bars("Hardware, USD", [(n, v, f"{v:,.0f}") for n, v in zip(names, prices, strict=True)]),
            Bars("Drives alone, USD", [(n, v, f"{v:,.0f}") for n, v in zip(names, drives, strict=True)]),
            Bars(
                "Nearest to its limit, without GPUs",
                [
                    (n, load.utilization, f"{_resource_text(load.resource)} {load.utilization:.0%}")
                    for n, load in zip(names, bounds, strict=True)
                ],
            ),
        ]
    )
