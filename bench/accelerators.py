"""How many emulated accelerators a loader keeps busy, as MLPerf Storage asks: records, batches and step times
of its workloads for the A100, without the GPUs.

Law: numbers are of github.com/mlcommons/storage, configs/dlio/workload/{resnet50,unet3d,cosmoflow}_a100.yaml.
An epoch repeats the records so often that no trial meets its end. The data is small enough for the page
cache, and all runs on two cores: the counts compare loaders. `hints=off`: no cache node, nothing is fetched
before it is asked for.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bench import photo_dataset
from bench.results import Figure
from tests.support.interpreters import python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from bench.rows import Scale
    from bench.servers import Server

BUCKET: Final = "accelerators"
OURS, MOST = "meshsdk", 32
TRIAL_S: Final = 60  # a trial that takes longer feeds nobody
_NPY_HEAD = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """`record`: bytes of a record; `take`: bytes of it that the model gets, 0 for all; `shard`: records a tar
    shard, 0 for objects; `au`: what counts as busy; `most`: records that are stored at full scale."""

    name: str
    title: str
    batch: int
    step_s: float
    record: int
    au: float
    most: int
    take: int = 0
    shard: int = 0
    peers: tuple[str, ...] = ("s3torchconnector",)

    @property
    def wanted(self) -> int:
        """Bytes of a batch."""
        return self.batch * (self.take or self.record)

    def small(self, times: int) -> Workload:
        """A toy of it: records a `times`-th of the size."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        take = min(self.take, 4096)
        return Workload(
            **{**fields, "record": self.record // times, "take": take, "most": max(16, 2 * self.batch)}
        )


WORKLOADS: Final = (
    Workload("au-resnet50", "ResNet-50", 400, 0.435, 114_660, 0.90, 5004, shard=1251, peers=("webdataset",)),
    Workload("au-unet3d", "U-Net3D", 7, 0.636, 146_600_628, 0.90, 14, take=2_097_152),
    Workload("au-cosmoflow", "CosmoFlow", 1, 0.00551, 2_828_486, 0.70, 256),
)
NAMES: Final = tuple(each.name for each in WORKLOADS)


def workload(name: str, scale: Scale) -> Workload:
    """At the scale's size."""
    found = next(each for each in WORKLOADS if each.name == name)
    return found if scale.accelerated else found.small(1000)


# --- records ----------------------------------------------------------------------------------------------


def _record(work: Workload, number: int) -> bytes:
    """No two alike; with a `take`, an array of bytes as numpy saves it."""
    body = number.to_bytes(8, "little") * (work.record // 8 + 1)
    if not work.take:
        return body[: work.record]
    text = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({work.record - _NPY_HEAD},), }}"
    head = b"\x93NUMPY\x01\x00" + (_NPY_HEAD - 10).to_bytes(2, "little")
    return head + text.encode().ljust(_NPY_HEAD - 11) + b"\n" + body[: work.record - _NPY_HEAD]


def _objects(work: Workload) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if not work.shard:
        suffix = "npy" if work.take else "bin"
        for number in range(work.most):
            yield f"{work.name}/{number:06d}.{suffix}", lambda number=number: _record(work, number)  # type: ignore[misc]
        return
    for first in range(0, work.most, work.shard):
        yield f"{work.name}/{first:06d}.tar", lambda first=first: _tar(work, first)  # type: ignore[misc]


def _tar(work: Workload, first: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as shard:
        for number in range(first, min(first + work.shard, work.most)):
            member = tarfile.TarInfo(f"{number:06d}.bin")
            member.size = work.record
            shard.addfile(member, io.BytesIO(_record(work, number)))
    return out.getvalue()


def fill(work: Workload, server: Server, say: Callable[[str], None]) -> None:
    """Put the records."""
    s3 = photo_dataset.client(server)
    if BUCKET not in [each["Name"] for each in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=BUCKET)
    say(f"{work.name}: putting {work.most} records into {server.name}")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda each: s3.put_object(Bucket=BUCKET, Key=each[0], Body=each[1]()), _objects(work)))


# --- trials -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contender:
    """A loader and the server it reads from."""

    loader: str
    server: Server

    @property
    def name(self) -> str:
        return f"{self.loader} from {self.server.name}"

    def utilisation(self, work: Workload, count: int, seconds: float, root: Path) -> float:
        """The mean of so many accelerators; 0 when they cannot be fed at all. Raises TrialError."""
        argv = [python(), "-m", "bench.emulated"]
        if self.loader != OURS:
            argv = [str(photo_dataset.peers_python(root)), "-m", "bench.peers.emulated", self.loader]
        argv += [self.server.endpoint, BUCKET, work.name, "--accelerators", str(count)]
        argv += ["--batch", str(work.batch), "--wanted", str(work.wanted), "--take", str(work.take)]
        argv += ["--step", str(work.step_s), "--seconds", str(seconds)]
        environment = photo_dataset.environment(self.server)
        try:
            done = subprocess.run(
                argv,
                cwd=photo_dataset.ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=90,
            )
        except subprocess.TimeoutExpired:
            return 0.0
        found = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@ ")]
        if done.returncode or not found:
            last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no output"]
            raise TrialError(f"{count} accelerators: {last[0][:300]}")
        return float(sum(found[0]) / len(found[0]))


class TrialError(RuntimeError):
    """A trial that ended with an error."""


def most_busy(busy: Callable[[int], bool], most: int) -> int:
    """The largest count that is busy, by doubling and halving; 0 if not even one is."""
    low, high = 0, 1
    while high <= most and busy(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if busy(middle) else (low, middle)
    return low


def measure(
    work: Workload, servers: Mapping[str, Server], scale: Scale, root: Path, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Ours from meshd, the peers from the other server; each alone on the machine."""
    wanted = [Contender(OURS, servers["meshd"])] if "meshd" in servers else []
    if "seaweedfs" in servers:
        wanted += [Contender(peer, servers["seaweedfs"]) for peer in work.peers]
    for server in {each.server.name: each.server for each in wanted}.values():
        fill(work, server, say)
    seconds = max(scale.seconds, 6 * work.step_s) if scale.accelerated else 0.2
    most = MOST if scale.accelerated else 2
    for contender in wanted:
        seen: dict[int, float] = {}

        def busy(count: int, contender: Contender = contender, seen: dict[int, float] = seen) -> bool:
            say(f"{work.name}: {count} accelerators fed by {contender.name}")
            seen[count] = contender.utilisation(work, count, seconds, root)
            return seen[count] >= work.au

        try:
            found = most_busy(busy, most)
        except TrialError as error:
            yield Figure(contender.name, 0, {}, str(error))
        else:
            yield Figure(contender.name, 0, {"accelerators": found, "au_of_one": 100 * seen[1]})
