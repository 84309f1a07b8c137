"""The row that holds the simulator against a real mesh: what `mesh simulate` foretold, and what was.

Law: three nodes, each with an emulated drive of its own; the rates of the machine (a drive's bytes a second
and its seek, the nodes' processor time of a sample, the cores that they get) are measured first in the same
run and put in the scenario, so that the comparison is of the model alone.
"""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

import meshsdk as mesh
from bench import owners
from bench.interleave import order
from bench.processes import cpu_seconds
from bench.results import Figure
from bench.rotational_drive import missing as drive_missing
from bench.rotational_drive import rotational_drive
from bench.tables import number, table, verdict
from meshd.batches.read_ahead.disk_reader import DiskReader, DiskWork
from meshd.batches.read_ahead.extents import plan_reads
from meshd.batches.read_ahead.read_cost import SHORT_SEEK_SECONDS
from meshd.util.clock import SystemClock
from meshsdk import ops
from meshtools.simulator.epoch import BUCKET, EpochSimulation, shard_key
from meshtools.simulator.report import epoch_figures
from meshtools.simulator.scenario import Data, Jobs, Mesh, Scenario
from tests.support.daemon_cluster import DaemonCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from bench.drive_model import DriveStats
    from bench.results import RowResult
    from bench.rotational_drive import RotationalDrive
    from bench.rows import Scale
    from meshwire.cluster.cluster_map import ClusterMap

NAME: Final = "foretold"
REAL, SIMULATED = "real", "foretold"
SAMPLE, SHARD, KEPT, BATCH, BLOCK = 96 << 10, 16, 4096, 64, 16
AHEAD, COPIES = 8, 2
READ_AHEAD: Final = 128 << 20
STEP_S: Final = 0.03
SLOW_STEP_S: Final = 2 * STEP_S
DRIVE: Final = 4 << 30
STRIDE, SHORT = 3 << 19, 4096
NODES: Final = ("n1", "n2", "n3")
_CLIENTS: Final = 4
_PATIENCE: Final = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """An alternative that is run for real and simulated; every one begins with a cold page cache."""

    name: str
    shuffle: Literal["blocks", "global", "none"]
    jobs: int = 1
    epochs: int = 1
    sharing: bool = False


WAYS: Final = (
    Way("blocks", "blocks"),
    Way("full shuffle", "global"),
    Way("two jobs that share, two epochs", "blocks", 2, 2, sharing=True),
)
_ALONE: Final = Way("rates", "none")
_ORDERS: Final = (Way("rates of blocks", "blocks"), Way("rates of a full shuffle", "global"))
_SHARED: Final = Way("rates of jobs that share", "none", sharing=True)
MACHINE: Final = "rates of the machine"
CONTENDERS: Final = (*(f"{way.name}, {which}" for way in WAYS for which in (REAL, SIMULATED)), MACHINE)
METRICS: Final = {
    "rate": ("samples/s", 15),
    "seconds": ("seconds", 15),
    "read": ("bytes read", 15),
    "sent": ("bytes sent", 15),
    "cached": ("page cache hits", 15),
    "shared": ("batches of another job", 15),
    "cpu": ("CPU seconds of the nodes", 15),
    "seeks": ("seeks", 15),
    "disk": ("seconds of the drives", 15),
    "p99": ("p99 of a step", 30),
}
"""Metric → its name, and the error in per cent that it may have."""
TEXT: Final = f"""\
Three nodes on loopback, two copies, tar shards of {SHARD} samples of {SAMPLE >> 10} KiB, of which
{KEPT >> 10} KiB are delivered; each node has an emulated drive of 7200 rpm of its own and
{READ_AHEAD >> 20} MiB for read-ahead. Every run begins with a cold page cache; a step takes
{1000 * STEP_S:.0f} ms. `mesh simulate` gets the mesh's map, and the rates of this machine, measured in
the same run: the drive's bytes a second, its seek and its rest between two reads, the nodes' processor time
of samples and bytes, the share of the cores that they get while they are busy. *Error* is what was
foretold over what was, less one; of shares the difference."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine does: bytes a second and seconds of a short seek of a drive, and how long it rests
    between two reads of a node's reader; processor seconds of the nodes for a sample, alone in each order
    (the rows of a batch are in few or many objects) and for jobs that share (whole batches), for one that is
    sent again, for a byte that is read from a drive long before it is wanted, and for a seek between rows
    that are waited for; cores that a busy node gets."""

    bytes_per_second: float
    seek_seconds: float
    rest_seconds: float
    cpu_per_sample: Mapping[str, float]
    cpu_per_shared_sample: float
    cpu_per_sent_sample: float
    cpu_per_read_byte: float
    cpu_per_seek: float
    cores_per_node: float

    def metrics(self) -> dict[str, float]:
        """Return them by name, for the row's file."""
        found = asdict(self)
        orders = {f"cpu_per_sample_{order}": cpu for order, cpu in found.pop("cpu_per_sample").items()}
        return found | orders


def missing() -> str:
    """Why it cannot be measured here; empty when it can."""
    return drive_missing() or owners.missing()


def title(scale: Scale) -> str:
    """What is loaded."""
    return f"The simulator beside a real mesh: {scale.foretold:,} samples on three nodes"


class Site:
    """The mesh with its drives, filled."""

    def __init__(
        self, nodes: DaemonCluster, drives: Sequence[RotationalDrive], client: mesh.Client, scale: Scale
    ) -> None:
        self.nodes, self.drives, self._scale = nodes, drives, scale
        files = mesh.open(f"s3://{BUCKET}/", fields={"x": "bin"}, client=client)
        cut = ops.window("x", [KEPT], at="first")
        self._ds = files.map(ops.frombuffer("x", "uint8", shape=[SAMPLE]), cut)

    def rates(self, count: int) -> Rates:
        """Measure; the page cache has all data after a first epoch, so that later ones are of processors.

        With a trainer that is slower than the drives, bytes are read long before they are wanted; one that
        never rests waits for all rows of a full shuffle.
        """
        first, samples = 1000 + 10 * count, self._scale.foretold
        ahead = self.run(_ALONE, first, step=SLOW_STEP_S)
        there = self.run(_ALONE, first + 1, cold=False, step=SLOW_STEP_S)
        warm = self.run(_ALONE, first + 2, cold=False, step=0.0)
        orders = {way.shuffle: self.run(way, first + 2, cold=False, step=0.0)["cpu"] for way in _ORDERS}
        shared = self.run(_SHARED, first + 3, cold=False, step=0.0)
        again = self.run(_SHARED, first + 3, cold=False, step=0.0)
        scattered = self.run(_ORDERS[1], first + 4, step=0.0)
        per_byte = max(0.0, ahead["cpu"] - there["cpu"]) / ahead["read"]
        more = scattered["cpu"] - orders[_ORDERS[1].shuffle] - per_byte * scattered["read"]
        return Rates(
            *_drive_rates(self.drives[0]),
            {order: cpu / samples for order, cpu in orders.items()},
            shared["cpu"] / samples,
            again["cpu"] / samples,
            per_byte,
            max(0.0, more) / scattered["seeks"],
            warm["cpu"] / warm["seconds"] / len(NODES),
        )

    def run(self, way: Way, seed: int, *, cold: bool = True, step: float = STEP_S) -> dict[str, float]:
        """The jobs of a way, until the last has ended."""
        shuffle = mesh.Blocks(BLOCK) if way.shuffle == "blocks" else way.shuffle == "global"
        share = f"job-{seed}" if way.sharing else None
        with ExitStack() as stack:
            loaders = [
                stack.enter_context(
                    mesh.Loader(
                        self._ds,
                        BATCH,
                        seed=seed,
                        shuffle=shuffle,
                        share=share,
                        cache="off",
                        output="numpy",
                        prefetch_bytes=AHEAD * BATCH * KEPT,
                    )
                )
                for _ in range(way.jobs)
            ]
            for drive in self.drives:
                if cold:
                    drive.drop_caches()
                drive.delay(cold)
                stack.callback(drive.delay, False)
            before, began = self._counted(), time.perf_counter()
            with ThreadPoolExecutor(way.jobs) as pool:
                waits = [
                    wait
                    for each in pool.map(lambda one: _train(one, way.epochs, step), loaders)
                    for wait in each
                ]
            seconds, after = time.perf_counter() - began, self._counted()
            stats = [loader.stats() for loader in loaders]
        count = {name: after[name] - before[name] for name in after}
        samples = sum(each.samples for each in stats)
        frames = sum(sum(each.frames.values()) for each in stats)
        made = sum(each.frames.get("miss", 0) for each in stats)
        return {
            "rate": samples / seconds,
            "seconds": seconds,
            "read": count["bytes"],
            "sent": float(sum(each.bytes for each in stats)),
            "cached": _hits(way, self._scale, count["bytes"]),
            "shared": 1 - made / frames,
            "cpu": count["cpu"],
            "seeks": count["seeks"],
            "disk": count["disk"],
            "p99": step + quantiles(waits, n=100, method="inclusive")[98],
            "samples": samples,
        }

    def _counted(self) -> dict[str, float]:
        stats = [drive.stats() for drive in self.drives]
        return {
            "bytes": float(sum(each.bytes for each in stats)),
            "seeks": float(sum(each.seeks for each in stats)),
            "disk": sum(each.disk_s for each in stats),
            "cpu": sum(cpu_seconds(node.pid) for node in self.nodes.nodes.values()),
        }


def _train(loader: mesh.Loader, epochs: int, step: float) -> list[float]:
    """Take all batches as a trainer does; the wait for each, in seconds."""
    waits = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        began = time.perf_counter()
        for _ in loader:
            waits.append(time.perf_counter() - began)
            time.sleep(step)
            began = time.perf_counter()
    return waits


def _drive_rates(drive: RotationalDrive) -> tuple[float, float, float]:
    """Bytes a second of a drive, seconds of a short seek with its read, and seconds for which the drive rests
    between two reads of a node's reader; of a file on the drive."""
    file = drive.path / "plain"
    size = 64 * STRIDE
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, size)
        opened.write(np.random.default_rng(1).bytes(size))
    drive.drop_caches()
    drive.delay(True)
    places = np.arange(0, size - SHORT, STRIDE)
    try:
        with file.open("rb", buffering=0) as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(opened.fileno(), SHORT, size - SHORT)
            before = drive.stats()
            for place in places.tolist():
                os.pread(opened.fileno(), SHORT, place)
            sought = drive.stats() - before
        whole, _ = _read_ahead(drive, file, places, STRIDE)
        samples, rest = _read_ahead(drive, file, places, SAMPLE)
        assert whole.bytes >= size - STRIDE
        assert samples.seeks >= places.size // 2
    finally:
        drive.delay(False)
        file.unlink()
    return whole.bytes / (whole.media_s + whole.passing_s), sought.disk_s / sought.reads, rest


def _read_ahead(
    drive: RotationalDrive, file: Path, places: npt.NDArray[np.int64], size: int
) -> tuple[DriveStats, float]:
    """Read `size` bytes at each place as a node reads a window; return what that cost the drive, and how long
    it rested for each read, in seconds."""
    reads = plan_reads(np.zeros_like(places), places, np.full_like(places, size), gap=0)
    drive.drop_caches()
    device, done = file.stat().st_dev, threading.Event()
    reader = DiskReader(device, SystemClock())
    try:
        before, began = drive.stats(), time.perf_counter()
        reader.submit(DiskWork(device, [str(file)], reads, done.set))
        if not done.wait(_PATIENCE):
            raise TimeoutError("the emulated drive does not answer")
        seconds, spent = time.perf_counter() - began, drive.stats() - before
    finally:
        reader.close()
    return spent, max(0.0, seconds - spent.disk_s) / len(reads)


def foretell(
    way: Way, seed: int, rates: Rates, scale: Scale, cluster: ClusterMap | None = None
) -> dict[str, float]:
    """Simulate a way with the machine's rates, on the nodes of a map."""
    scenario = Scenario(
        way.name,
        Mesh(
            len(NODES),
            COPIES,
            nodes_per_rack=1,
            disks_per_node=1,
            disk_bytes_per_second=rates.bytes_per_second,
            seek_scale=rates.seek_seconds / SHORT_SEEK_SECONDS,
            disk_rest_seconds=rates.rest_seconds,
            read_ahead_bytes=READ_AHEAD,
            cores_per_node=rates.cores_per_node,
        ),
        Data(
            scale.foretold,
            SAMPLE,
            SHARD,
            rates.cpu_per_shared_sample if way.sharing else rates.cpu_per_sample[way.shuffle],
            rates.cpu_per_sent_sample,
            rates.cpu_per_read_byte,
            rates.cpu_per_seek,
            KEPT,
        ),
        Jobs(
            way.jobs,
            way.epochs,
            BATCH,
            STEP_S,
            AHEAD,
            way.shuffle,
            BLOCK,
            sharing=way.sharing,
        ),
        (),
        None,
        seed,
    )
    simulated = EpochSimulation(scenario, cluster=cluster)
    simulated.run()
    found = epoch_figures(simulated)
    return {
        "rate": found["samples_per_second"],
        "seconds": found["seconds"],
        "read": found["read_bytes"],
        "sent": found["sent_bytes"],
        "cached": _hits(way, scale, found["read_bytes"]),
        "shared": found["shared_share"],
        "cpu": float(simulated.nodes.cpu_seconds.sum()),
        "seeks": float(simulated.nodes.seeks),
        "disk": float(simulated.nodes.disk_seconds.sum()),
        "p99": STEP_S + found["wait_p99_seconds"],
        "samples": float(sum(job.samples for job in simulated.jobs)),
    }


def _hits(way: Way, scale: Scale, read: float) -> float:
    """Return the share of the epochs' bytes that did not come from a drive. Jobs that share get whole
    batches, for which each node reads all that it has."""
    wanted = way.epochs * scale.foretold * SAMPLE * (COPIES if way.sharing else 1)
    return max(0.0, 1 - read / wanted)


def measure(scale: Scale, root: Path, say: Callable[[str], None]) -> Iterator[Figure]:
    """Make three drives and a mesh on them, fill it, measure its rates; then every way, twice."""
    with ExitStack() as stack:
        say(f"{NAME}: making three drives")
        drives = [stack.enter_context(rotational_drive(root / name, size=DRIVE)) for name in NODES]
        own = {name: ("--disk", str(drive.path / "data")) for name, drive in zip(NODES, drives, strict=True)}
        args = ["--disk-type", "rotational", "--read-ahead", f"{READ_AHEAD >> 20}MiB"]
        args += ["--durability", "relaxed", "--copies", str(COPIES), "--transform-workers", "1"]
        nodes = stack.enter_context(DaemonCluster.start(len(NODES), args=args, own=own))
        endpoints, keys = ",".join(nodes.endpoints.values()), (nodes.access_key, nodes.secret_key)
        client = stack.enter_context(mesh.connect(endpoints, access_key=keys[0], secret_key=keys[1]))
        say(f"{NAME}: filling")
        _fill(client, scale.foretold)
        site, cluster = Site(nodes, drives, client, scale), nodes.map_of()
        site.run(_ALONE, 999, step=0.0)  # what processes do once is not a cost of bytes
        for count in range(scale.rounds):
            say(f"{NAME}: round {count + 1} of {scale.rounds}, the machine's rates")
            rates = site.rates(count)

            for way in order(WAYS, count):
                say(f"{NAME}: round {count + 1} of {scale.rounds}, {way.name}")
                seed = 1 + 10 * count + WAYS.index(way)
                real, said = site.run(way, seed), foretell(way, seed, rates, scale, cluster)
                problem = "" if real["samples"] == said["samples"] else "not all samples came"
                yield Figure(f"{way.name}, {REAL}", count, real, problem)
                yield Figure(f"{way.name}, {SIMULATED}", count, said)
            yield Figure(MACHINE, count, rates.metrics())


def _fill(client: mesh.Client, samples: int) -> None:
    client.create_bucket(BUCKET)

    def put(first: int) -> None:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for sample in range(first, min(first + SHARD, samples)):
                member = tarfile.TarInfo(f"{sample:06}.bin")
                member.size = SAMPLE
                archive.addfile(member, io.BytesIO(np.random.default_rng(sample).bytes(SAMPLE)))
        client.put(BUCKET, shard_key(first // SHARD), file.getvalue())

    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(put, range(0, samples, SHARD)))


def error(result: RowResult, way: str, metric: str) -> float | None:
    """What was foretold over what was, less one, in per cent; of hit ratios the difference, in points."""
    real, said = (result.value(f"{way}, {which}", metric) for which in (REAL, SIMULATED))
    if real is None or said is None:
        return None
    if metric in ("cached", "shared"):
        return 100 * (said - real)
    return 100 * (said / real - 1) if real else None


def _shown(value: float | None) -> str:
    return number(value, 0 if value is not None and value >= 100 else 3)


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """The part of the report."""
    result = rows.get(NAME)
    if result is None:
        return []
    lines = []
    for way in WAYS:
        for metric, (name, bar) in METRICS.items():
            if metric == "shared" and way.jobs == 1:
                continue
            real, said = (result.value(f"{way.name}, {which}", metric) for which in (REAL, SIMULATED))
            found = error(result, way.name, metric)
            told = verdict(None if found is None else abs(found), bar, at_most=True)
            lines.append([f"{way.name}: {name}", _shown(real), _shown(said), number(found, 1, " %"), told])
    return [
        f"## {result.title}",
        TEXT,
        table(["", "real", "foretold", "error", "bar"], lines),
    ]
