"""Estimate: the hardware that a design needs for a workload, its loads, times and costs.

Law: pure. Hardware is the least that carries the steady state at `limits.utilization`; then every load is
computed on the hardware that is bought, rounded up as it is sold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from meshtools.sizing.assumptions import Assumptions
    from meshtools.sizing.workload import Workload

Media = Literal["rotational", "nvme"]
Form = Literal["stored", "decoded", "view"]
"""What is read in later epochs: stored samples, decoded ones that nodes keep, or a materialized view."""
_CORES, _MEMORY_BYTES = 4, 32e9  # sold in multiples of these
_YEAR_SECONDS = 365.25 * 86_400


@dataclass(frozen=True, slots=True)
class Design:
    """An alternative. cache_share: share of the data that NVMe drives cache in front of rotational ones."""

    name: str
    media: Media
    copies: int = 2
    cache_share: float = 0.0
    form: Form = "stored"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A bill of materials. Drives are of all nodes; the rest is of each node."""

    nodes: int
    rotational_drives: int
    nvme_drives: int
    cores_per_node: int
    memory_bytes_per_node: float
    nics_per_node: int


@dataclass(frozen=True, slots=True)
class Load:
    """A resource: how much of it is needed and how much there is, both in `unit`."""

    resource: str
    needed: float
    limit: float
    unit: str

    @property
    def utilization(self) -> float:
        """Needed ÷ limit; 1 is the limit."""
        return self.needed / self.limit if self.limit else math.inf if self.needed else 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a design needs, does and costs. Times are of one job, in seconds: `prepare` before the first epoch
    (views), the first epoch, each later one, and all. `runs`: jobs of this kind that the hardware carries at
    once, each on its own, and `sharing_runs` if they share samples."""

    design: Design
    hardware: Hardware
    loads: tuple[Load, ...]
    bytes_per_second: float
    prepare_seconds: float
    first_epoch_seconds: float
    epoch_seconds: float
    total_seconds: float
    hardware_usd: float
    usd_per_epoch: float
    usd_total: float
    runs: int
    sharing_runs: int
    problems: tuple[str, ...]

    @property
    def bound(self) -> Load:
        """The resource that is nearest to its limit."""
        return max(self.loads, key=lambda load: load.utilization)


@dataclass(frozen=True, slots=True)
class _Needs:
    """What all jobs together need, in the units of Load."""

    rotational_seconds: float  # of disk, a second
    seek_seconds: float  # of these, in seeks
    nvme_bytes: float
    cpu_seconds: float
    network_bytes: float
    read_ahead_bytes: float


def estimate(workload: Workload, design: Design, assumed: Assumptions) -> Estimate:
    """Size the hardware of a design, and compute what it does."""
    steady, cold = _needs(workload, design, assumed), _needs(workload, design, assumed, cold=True)
    hardware = _hardware(workload, design, assumed, steady)
    space = _space(workload, design, hardware, assumed)
    loads = (*_loads(hardware, assumed, steady), *space)
    machine = max(load.utilization for load in _loads(hardware, assumed, cold))
    epoch = workload.data_bytes / workload.demand_bytes_per_second
    first = epoch * max(1.0, machine)
    prepare = 0.0
    if design.form == "view":  # one pass of one job, as fast as the nodes can
        prepare, first = epoch * machine / (1 if workload.sharing else workload.jobs), epoch
    total = prepare + first + (workload.epochs - 1) * epoch
    usd = _hardware_usd(hardware, assumed)
    rate = usd / (assumed["money.lifetime_years"] * _YEAR_SECONDS) + _power_usd_per_second(hardware, assumed)
    gpu = workload.appetite_bytes_per_second
    if gpu:
        used = Load("GPU", workload.demand_bytes_per_second / 1e6, gpu / 1e6, "MB/s a job")
        loads = (*loads, used)
    return Estimate(
        design,
        hardware,
        loads,
        workload.demand_bytes_per_second,
        prepare,
        first,
        epoch,
        total,
        usd,
        rate * epoch,
        rate * total,
        runs_on(workload, design, assumed, hardware, sharing=False),
        runs_on(workload, design, assumed, hardware, sharing=True),
        tuple(_problems(workload, total, usd)),
    )


def rotational_seconds(workload: Workload, read_bytes: float, assumed: Assumptions) -> tuple[float, float]:
    """Return the disk time of a sample of `read_bytes`, and the part of it that is seeks, in seconds.

    In blocks: media time times the measured overhead. In a full shuffle windows leave gaps of (1 − w) ÷ w
    samples: short ones are read through, of others each costs a short seek.
    """
    media = read_bytes / assumed["rotational.bytes_per_second"]
    if workload.order == "blocks":
        disk = media * assumed["rotational.disk_over_media"]
        return disk, disk - media
    window = workload.read_ahead_share / 2  # two windows fit the memory
    gap = (1 - window) / window * read_bytes
    if gap <= assumed["rotational.gap_bytes"]:
        return media + gap / assumed["rotational.bytes_per_second"], 0.0
    seek = assumed["rotational.short_seek_seconds"]
    return media + seek, seek


def resource_loads(
    workload: Workload, design: Design, bought: Hardware, assumed: Assumptions
) -> tuple[Load, ...]:
    """Return the loads of hardware that is there: disks or seeks, NVMe, decode, network and memory."""
    return _loads(bought, assumed, _needs(workload, design, assumed))


def _needs(workload: Workload, design: Design, assumed: Assumptions, *, cold: bool = False) -> _Needs:
    """Return what the steady state needs; `cold`: the pass in which nothing is cached, kept or made yet."""
    prepared, delivered = workload.prepared_per_second, workload.samples_per_second * workload.jobs
    form = "stored" if cold else design.form
    read, cpu = workload.bytes_per_sample, workload.cpu_seconds_per_sample
    if form == "decoded":
        read, cpu = workload.kept_bytes_per_sample, workload.kept_cpu_seconds_per_sample
    elif form == "view":
        read, cpu = workload.delivered_bytes, 0.0
    cached = 0.0 if cold else design.cache_share
    disk = seeks = nvme = crossing = memory = 0.0
    if design.media == "rotational":
        disk, seeks = (each * prepared * (1 - cached) for each in rotational_seconds(workload, read, assumed))
        nvme = prepared * cached * read
        distinct = 1 if workload.sharing else workload.jobs
        whole = 2 * workload.block_shards * workload.shard_bytes
        if workload.order == "full":
            whole = workload.read_ahead_share * workload.data_bytes
        memory = distinct * min(whole, workload.data_bytes)
        if design.cache_share:
            crossing = prepared * (1 - cached) * read  # from the origin to the cache
    else:
        nvme = prepared * read
    network = delivered * workload.delivered_bytes + crossing
    delivery = delivered * workload.delivered_bytes * assumed["delivery.cpu_seconds_per_byte"]
    return _Needs(disk, seeks, nvme, prepared * cpu + delivery, network, memory)


def stored_bytes(workload: Workload, design: Design) -> float:
    """Return the bytes on the drives of the data, all copies and what is kept beside them."""
    extra = 0.0
    if design.form == "decoded":
        extra = workload.samples * workload.kept_bytes_per_sample  # a cache: one copy
    elif design.form == "view":
        extra = workload.samples * workload.delivered_bytes * design.copies
    return workload.data_bytes * design.copies + extra


def _hardware(workload: Workload, design: Design, assumed: Assumptions, needs: _Needs) -> Hardware:
    most, fill = assumed["limits.utilization"], assumed["limits.fill"]
    held = {"rotational": 0.0, "nvme": 0.0, design.media: stored_bytes(workload, design)}
    held["nvme"] += design.cache_share * workload.data_bytes
    drives = {media: held[media] / fill / assumed[f"{media}.bytes_per_drive"] for media in held}
    rotational = _up(max(drives["rotational"], needs.rotational_seconds / most))
    nvme = _up(max(drives["nvme"], needs.nvme_bytes / most / assumed["nvme.bytes_per_second"]))
    cores = needs.cpu_seconds / most
    nics = needs.network_bytes / most / assumed["node.nic_bytes_per_second"]
    base = assumed["node.base_memory_bytes"]
    nodes = max(
        design.copies,
        _up(rotational / assumed["rotational.drives_per_node"]),
        _up(nvme / assumed["nvme.drives_per_node"]),
        _up(cores / assumed["node.most_cores"]),
        _up(nics / assumed["node.most_nics"]),
        _up(needs.read_ahead_bytes / (assumed["node.most_memory_bytes"] - base)),
    )
    memory = base + needs.read_ahead_bytes / nodes
    return Hardware(
        nodes,
        max(rotational, nodes) if rotational else 0,
        max(nvme, nodes) if nvme else 0,
        _CORES * _up(max(8.0, cores / nodes) / _CORES),
        _MEMORY_BYTES * _up(memory / _MEMORY_BYTES),
        max(1, _up(nics / nodes)),
    )


def _space(workload: Workload, design: Design, bought: Hardware, assumed: Assumptions) -> tuple[Load, ...]:
    """Return how full the drives of the data are."""
    drives = bought.rotational_drives if design.media == "rotational" else bought.nvme_drives
    room = drives * assumed[f"{design.media}.bytes_per_drive"] * assumed["limits.fill"]
    return (Load("space", stored_bytes(workload, design) / 1e12, room / 1e12, "TB"),)


def _loads(bought: Hardware, assumed: Assumptions, needs: _Needs) -> tuple[Load, ...]:
    nodes = bought.nodes
    nvme = bought.nvme_drives * assumed["nvme.bytes_per_second"] / 1e6
    base = assumed["node.base_memory_bytes"]
    seeks = needs.seek_seconds > needs.rotational_seconds / 2
    network = nodes * bought.nics_per_node * assumed["node.nic_bytes_per_second"] / 1e6
    memory = nodes * bought.memory_bytes_per_node / 1e9
    return (
        Load("seeks" if seeks else "disk", needs.rotational_seconds, bought.rotational_drives, "disks busy"),
        Load("NVMe", needs.nvme_bytes / 1e6, nvme, "MB/s"),
        Load("decode", needs.cpu_seconds, nodes * bought.cores_per_node, "cores busy"),
        Load("network", needs.network_bytes / 1e6, network, "MB/s"),
        Load("memory", (nodes * base + needs.read_ahead_bytes) / 1e9, memory, "GB"),
    )


def runs_on(
    workload: Workload, design: Design, assumed: Assumptions, bought: Hardware, *, sharing: bool
) -> int:
    """Return how many jobs of this kind the hardware carries at the planned utilization."""

    def carries(jobs: int) -> bool:
        more = replace(workload, jobs=jobs, sharing=sharing)
        loads = _loads(bought, assumed, _needs(more, design, assumed))
        most = assumed["limits.utilization"]
        return all(load.utilization <= (1 if load.resource == "memory" else most) + 1e-9 for load in loads)

    least, beyond = 0, 1
    while carries(beyond) and beyond < 1 << 20:
        least, beyond = beyond, 2 * beyond
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if carries(middle) else (least, middle)
    return least


def _hardware_usd(bought: Hardware, assumed: Assumptions) -> float:
    per_node = (
        assumed["node.usd_base"]
        + bought.cores_per_node * assumed["node.usd_per_core"]
        + bought.memory_bytes_per_node / 1e9 * assumed["node.usd_per_memory_gb"]
        + bought.nics_per_node * assumed["node.usd_per_nic"]
    )
    return bought.nodes * per_node + drives_usd(bought, assumed)


def drives_usd(bought: Hardware, assumed: Assumptions) -> float:
    """Return the price of the drives alone."""
    rotational = bought.rotational_drives * assumed["rotational.usd_per_drive"]
    return rotational + bought.nvme_drives * assumed["nvme.usd_per_drive"]


def _power_usd_per_second(bought: Hardware, assumed: Assumptions) -> float:
    watts = (
        bought.nodes * assumed["node.watts"]
        + bought.rotational_drives * assumed["rotational.watts_per_drive"]
        + bought.nvme_drives * assumed["nvme.watts_per_drive"]
    )
    return watts / 3.6e6 * assumed["money.usd_per_kwh"]


def _problems(workload: Workload, total_seconds: float, usd: float) -> list[str]:
    found = []
    if workload.deadline_seconds is not None and total_seconds > workload.deadline_seconds * 1.000001:
        found.append("misses the deadline")
    if workload.budget_usd is not None and usd > workload.budget_usd:
        found.append("exceeds the budget")
    return found


def _up(number: float) -> int:
    """Round up, except for what floating-point arithmetic adds."""
    return math.ceil(number - 1e-9)
