"""Epochs from a rotational disk: ours and the peers', each with its server on the same emulated drive.

Law: an epoch begins with nothing of the drive in the page cache, and with its process' imports done. What it
asked of the drive is counted by the drive (`bench.rotational_drive`), from that moment until the process has
ended. Between epochs the drive answers at once: filling it takes no drive's time.

A peer that keeps shards in a cache of its own has that on another disk, which costs it nothing here.
"""

from __future__ import annotations

import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from os import POSIX_FADV_RANDOM, posix_fadvise, posix_fallocate, pread
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Final

from bench import photo_dataset
from bench.cold_epoch import Epoch, EpochError, run_epoch
from bench.interleave import turns
from bench.loader_timing import OURS, TIMEOUT_S, TRIES, Turn, argv_of
from bench.page_cache import read_files
from bench.processes import Children, memory_bytes
from bench.results import Figure
from bench.rotational_drive import rotational_drive
from bench.servers import SERVERS, new_account

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from bench.cold_epoch import Drive
    from bench.photo_dataset import Album
    from bench.rows import Scale
    from bench.servers import Server

NAME: Final = "rotational"
SIZE: Final = 12 << 30
"""Bytes of the drive. Its seeks are those of a full one, whatever its size."""
JOBS: Final = 4
PEERS: Final = ("webdataset", "streaming", "litdata", "s3torchconnector")
FOREIGN_BYTES: Final = 64 << 10
FOREIGN_PAUSE_S: Final = 0.05
FOREIGN_EVERY: Final = 8
"""Of the loose objects: so far apart that the read-ahead of one does not bring another."""
MEMORY_EVERY_S: Final = 1.0
FILE: Final = "photographs"
UNCOUNTED: Final = 99
"""The round of an epoch that is not counted."""


@dataclass(frozen=True, slots=True)
class Ours:
    """A way to read with meshsdk. `blocks`: shards of a window, 0 is a full shuffle; `jobs` share the epoch;
    `foreign`: other clients read too; `keeps`: the node may keep decoded images, as in an epoch before.
    `seed`: apart, so that none finds batches of another. `ahead`: batches that a loader requests at once;
    `long`: an epoch of more photographs, which are put onto the drive before it."""

    name: str
    seed: int
    layout: str
    blocks: int
    jobs: int = 1
    foreign: bool = False
    keeps: bool = False
    ahead: int = 4
    long: bool = False

    def samples(self, setup: Mapping[str, Any]) -> int:
        """Return the samples of an epoch."""
        rotational = int(setup["rotational"])
        return -(-int(setup["rotational_long"]) // rotational) * rotational if self.long else rotational

    def flags(self, number: int) -> list[str]:
        """Of `bench.meshsdk_contender`, for round `number`."""
        shuffle = ["--blocks", str(self.blocks)] if self.blocks else []
        share = ["--share", f"{self.jobs}-{number}"] if self.jobs > 1 else []
        keep = ["--keep"] if self.keeps else []
        return ["--layout", self.layout, "--ahead", str(self.ahead), *shuffle, *share, *keep]


TARS: Final = Ours("Blocks over tar shards", 7000, "tar", 8)
LOOSE: Final = Ours("Blocks over loose objects", 7100, "raw", 2)  # of 1,024: as many samples as 8 tars of 250
FULL_SHUFFLE: Final = Ours("full shuffle of loose objects", 7200, "raw", 0)
FOUR: Final = Ours("four sharing jobs, Blocks over tar shards", 7300, "tar", 8, jobs=JOBS)
KEPT: Final = Ours("Blocks over loose objects, decoded once", 7500, "raw", 2, keeps=True)
AHEAD: Final = Ours("Blocks over tar shards, eight batches ahead", 7700, "tar", 8, ahead=8)
LONG: Final = Ours("Blocks over tar shards, a longer epoch", 7600, "long", 8, long=True)
BESIDE: Final = replace(LONG, name="Blocks over tar shards, beside foreign GETs", seed=7400, foreign=True)
"""Over the longer epoch: a hundredth of the GETs in one of seconds is not one of them."""
WAYS: Final = (TARS, LOOSE, FULL_SHUFFLE, FOUR, KEPT, AHEAD, LONG, BESIDE)
ALONE: Final = (TARS, LOOSE, FULL_SHUFFLE, AHEAD, LONG)
"""Those that are run a second time, from the page cache."""
IN_ORDER: Final = "a plain file, from beginning to end"
AT_RANDOM: Final = "a plain file, a seek for each photograph"
MANY: Final = 32
"""Reads at a time of that file: as many as the drive sorts."""


def title(scale: Scale) -> str:
    """What is asked for."""
    return f"A rotational disk, {scale.rotational:,} photographs, page cache cold"


@dataclass(frozen=True, slots=True)
class Site:
    """The drive, filled, and the servers that have their data on it."""

    drive: Drive
    servers: Mapping[str, Server]
    scale: Scale
    root: Path
    album: Album

    def ours(self, way: Ours, number: int) -> Figure:
        """One of our ways, cold; those alone on the drive a second time, from memory, with another seed."""
        server, waits, memory = self.servers["meshd"], list[float](), list[int]()
        commands = self._commands(way, server, number)
        beside = [partial(_watch_memory, server.child.process.pid, memory)]
        if way.foreign:
            beside.append(partial(_get_until_done, photo_dataset.client(server), waits))
        try:
            if way.long:
                self._fill_long(server)
            if way.keeps:
                before = self._commands(way, server, UNCOUNTED + 1 + number)
                run_epoch(self.drive, before, server, cold=False)
            epoch = run_epoch(self.drive, commands, server, cold=True, beside=beside)
            wanted = way.samples(asdict(self.scale))
            metrics, problem = epoch.metrics, _short(epoch, way.jobs * wanted)
            if way in ALONE:
                read_files(self.drive.path / "meshd")
                again = self._commands(way, server, number + self.scale.rounds)
                warm = run_epoch(self.drive, again, server, cold=False)
                metrics["warm_rate"] = warm.samples / warm.seconds
                metrics["warm_reads"], metrics["warm_wait"] = warm.drive.reads, warm.waited_s
                problem = problem or _short(warm, wanted)
        except (EpochError, subprocess.SubprocessError, OSError) as error:
            return Figure(way.name, number, {}, str(error)[:300])
        metrics["memory_mib"] = max(memory) / (1 << 20)
        return Figure(way.name, number, metrics | _waited(waits), problem)

    def warm_up(self, way: Ours) -> None:
        """An epoch that is not counted: what the node keeps of the data set is made."""
        server = self.servers["meshd"]
        run_epoch(self.drive, self._commands(way, server, UNCOUNTED), server, cold=False)

    def peer(self, loader: str, number: int) -> Figure:
        """A peer's first epoch, in up to `TRIES` runs until one does not fail; `repeats` did."""
        repeats, figure = 0, self._peer_once(loader, number)
        while figure.problem and repeats + 1 < TRIES:
            repeats, figure = repeats + 1, self._peer_once(loader, number)
        return replace(figure, metrics={**figure.metrics, "repeats": repeats})

    def _peer_once(self, loader: str, number: int) -> Figure:
        server = self.servers["seaweedfs"]
        turn = Turn(loader, server)
        argv = argv_of(turn, self.scale, self.root / "peer-cache", self.root, number)
        try:
            epoch = run_epoch(self.drive, [[*argv, "--passes", "1"]], server, cold=True)
        except (EpochError, subprocess.TimeoutExpired, OSError) as error:
            return Figure(turn.name, number, {}, str(error)[:300])
        return Figure(turn.name, number, epoch.metrics, _short(epoch, self.scale.rotational))

    def plain(self, name: str, number: int) -> Figure:
        """A file that has all photographs, read by nobody but a few threads."""
        places = _places(self.album)
        if name == AT_RANDOM:
            places = random.Random(number).sample(places, min(self.scale.rotational_reads, len(places)))
        self.drive.drop_caches()
        self.drive.delay(True)
        before, began = self.drive.stats(), time.perf_counter()
        try:
            _read_file(self.drive.path / FILE, places, at_random=name == AT_RANDOM)
            seconds = time.perf_counter() - began
            epoch = Epoch(len(places), seconds, 0.0, self.drive.stats() - before)
        finally:
            self.drive.delay(False)
        return Figure(name, number, epoch.metrics)

    def _commands(self, way: Ours, server: Server, number: int) -> list[list[str]]:
        argv = argv_of(Turn(OURS[0], server), self.scale, self.root, self.root, way.seed + number)
        return [[*argv, *way.flags(number)]] * way.jobs

    def _fill_long(self, server: Server) -> None:
        """Put the photographs of the longer epoch onto the drive, unless they are there, and open them
        once."""
        if photo_dataset.has_long(server):
            return
        photo_dataset.upload_long(server, self.album, self.scale.rotational_long)
        argv = [*argv_of(Turn(OURS[0], server), self.scale, self.root, self.root, 0), "--layout", LONG.layout]
        environment = photo_dataset.environment(server)
        subprocess.run(
            [*argv, "--open"], cwd=photo_dataset.ROOT, env=environment, check=True, timeout=TIMEOUT_S
        )


def _short(epoch: Epoch, wanted: int) -> str:
    return "" if epoch.samples == wanted else f"{epoch.samples} samples instead of {wanted}"


def _watch_memory(pid: int, found: list[int], done: threading.Event) -> None:
    """Once a second, and at the end, what the server's processes have of their own."""
    while not done.wait(MEMORY_EVERY_S):
        found.append(memory_bytes(pid))
    found.append(memory_bytes(pid))


def _waited(waits: Sequence[float]) -> dict[str, float]:
    if len(waits) < 2:
        return {}
    cuts = quantiles(waits, n=100, method="inclusive")
    return {"p50_ms": cuts[49], "p99_ms": cuts[98], "longest_ms": max(waits), "foreign": len(waits)}


def _get_until_done(s3: Any, waits: list[float], done: threading.Event) -> None:
    """Some loose objects, each once, in an order of chance, with pauses; their milliseconds."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=photo_dataset.BUCKET, Prefix="raw/")
    keys = [entry["Key"] for page in pages for entry in page["Contents"]][::FOREIGN_EVERY]
    random.Random(FOREIGN_BYTES).shuffle(keys)
    for key in keys:
        if done.wait(FOREIGN_PAUSE_S):
            return
        began = time.perf_counter()
        bytes_asked = f"bytes=0-{FOREIGN_BYTES - 1}"
        s3.get_object(Bucket=photo_dataset.BUCKET, Key=key, Range=bytes_asked)["Body"].read()
        waits.append(1000 * (time.perf_counter() - began))


def _places(album: Album) -> list[tuple[int, int]]:
    """(offset, length) of each photograph in the file that has them one after the other."""
    places, offset = [], 0
    for file in album.files():
        length = file.stat().st_size
        places.append((offset, length))
        offset += length
    return places


def _read_file(file: Path, places: Sequence[tuple[int, int]], *, at_random: bool) -> None:
    with file.open("rb") as opened:
        if not at_random:
            while opened.read(1 << 20):
                pass
            return
        descriptor = opened.fileno()
        posix_fadvise(descriptor, 0, 0, POSIX_FADV_RANDOM)
        with ThreadPoolExecutor(MANY) as pool:
            list(pool.map(lambda place: pread(descriptor, place[1], place[0]), places))


def fill(site: Site, say: Callable[[str], None]) -> None:
    """Put the photographs on the drive: into a plain file, in one piece, and into each server."""
    album, files = site.album, site.album.files()
    with (site.drive.path / FILE).open("wb") as file:
        posix_fallocate(file.fileno(), 0, sum(photograph.stat().st_size for photograph in files))
        for photograph in files:
            file.write(photograph.read_bytes())
    for name, server in site.servers.items():
        photo_dataset.upload(server, album, say, photo_dataset.FORMATS if name != "meshd" else ())


def measure_site(site: Site, peers: Sequence[str], say: Callable[[str], None]) -> Iterator[Figure]:
    """Everybody in turns, the drive being filled."""
    if site.scale.warmed:
        for way in (TARS, LOOSE, FULL_SHUFFLE):
            say(f"{NAME}: {way.name}, once uncounted")
            site.warm_up(way)
    contenders: dict[str, Callable[[int], Figure]] = {way.name: partial(site.ours, way) for way in WAYS}
    for peer in peers:
        contenders[Turn(peer, site.servers["seaweedfs"]).name] = partial(site.peer, peer)
    for name in (IN_ORDER, AT_RANDOM):
        contenders[name] = partial(site.plain, name)
    for number, name in turns(NAME, contenders, site.scale.loader_rounds, say):
        yield contenders[name](number)


def measure(
    album: Album, peers: Sequence[str], scale: Scale, root: Path, say: Callable[[str], None]
) -> Iterator[Figure]:
    """Make the drive, start the servers on it, fill it; then all contenders."""
    say(f"{NAME}: making the drive")
    with (
        rotational_drive(root / "run" / "drive", size=SIZE) as drive,
        Children(root / "logs") as children,
    ):
        names = ("meshd", *(("seaweedfs",) if peers else ()))
        servers = {name: SERVERS[name].start(children, drive.path / name, new_account()) for name in names}
        site = Site(drive, servers, scale, root, album)
        fill(site, say)
        yield from measure_site(site, peers, say)
