"""The rotational disk's part of docs/benchmarks.md, and its bars.

Law: nothing is typed in by hand; every number is a median of the row given. Seeks and seconds of the drive do
not depend on how busy the machine was; samples a second are read as ratios.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.loader_report import loader_repeats
from bench.machine import CORES
from bench.rotational_row import (
    AHEAD,
    ALONE,
    AT_RANDOM,
    BESIDE,
    FOUR,
    FULL_SHUFFLE,
    IN_ORDER,
    KEPT,
    LONG,
    LOOSE,
    NAME,
    PEERS,
    SIZE,
    TARS,
    WAYS,
)
from bench.tables import BARS_HEAD, number, table, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.results import RowResult
    from bench.rotational_row import Ours

TEXT: Final = """The first epoch over {rotational:,} photographs (as in the loaders' rows: 70 KB on average,
batches of {batch}) from an emulated drive of 7200 rpm ([how it works](rotational-drive.md)): one arm, seeks
of 0.8 to 15 ms by distance and half a turn after each, 200 MB/s under the head, a queue of 32 taken in one
direction. meshd and SeaweedFS have all their data on it, a file system of {gib} GiB. Nothing of it is in the
page cache when an epoch begins, and every process has imported what it needs. Peers that keep shards in a
cache have that elsewhere, at no cost here. *Seeks* and *seconds* are the drive's own count and depend on no
clock; *media* is how long the bytes that were read pass under the head. *From memory* is the same epoch with
another seed, all of it in the page cache. *Memory* is the most that all processes of the node have of their
own, without page cache. *Foreign GETs* are those of another client: 64 KiB of loose objects, one after the
other, with pauses of 50 ms{beside}. *A plain file* has the photographs one after the other and is read
without a server and without decoding: in order, and {rotational_reads:,} of them at random by 32 threads."""
BESIDE_TEXT: Final = """, during the longer epoch: in one of seconds there are too few for a p99"""
LONG_TEXT: Final = """*A longer epoch* has {long:,} photographs: the same shards in copies. Every epoch waits
once for the first block of its order, of which the first batch needs a row from nearly every place; the
longer the epoch, the less that counts. *Eight batches ahead* is `connections=8` and `prefetch_bytes` for nine
batches."""
COMMAND: Final = """<!-- not run: mounts a disk, and takes minutes -->
```bash
make bench ARGS="--only rotational"     # as root
```"""
DISK_BAR, READ_BAR, WARM_BAR, PEER_BAR, FULL_BAR, SHARED_BAR = 1.3, 1.1, 0.9, 2.0, 3.0, 1.05
FOREIGN_BAR_MS, KEPT_BAR = 50.0, 0.97
HEAD: Final = (
    "",
    "samples/s",
    "from memory",
    "seeks a sample",
    "seconds of disk",
    "of media",
    "disk ÷ media",
    "MB read",
    "memory of the node, MiB",
)


def best_peer(result: RowResult) -> tuple[str, float] | None:
    """The peer with the highest rate."""
    names = [name for name in result.contenders() if name.partition(" from ")[0] in PEERS]
    known = [(name, rate) for name in names if (rate := result.value(name, "rate")) is not None]
    return max(known, key=lambda pair: pair[1]) if known else None


def ratio_to_best_peer(result: RowResult, way: Ours = TARS) -> tuple[str, float] | None:
    """The best peer, and how many times its rate this way of ours has."""
    best, mine = best_peer(result), result.value(way.name, "rate")
    return (best[0], mine / best[1]) if best and mine else None


def _samples(result: RowResult, name: str) -> int:
    """Return the samples of an epoch of this contender."""
    ours = next((way for way in WAYS if way.name == name), TARS)
    return ours.samples(result.setup)


def warm_ratio(result: RowResult, name: str) -> float | None:
    """The first epoch's rate over what memory allows, or the media rate where that is less."""
    rate, warm = result.value(name, "rate"), result.value(name, "warm_rate")
    media_s, disk_s = result.value(name, "media_s"), result.value(name, "disk_s")
    if not rate or not warm or not media_s or not disk_s:
        return None
    allowed = _samples(result, name) / media_s
    return rate / min(warm, allowed)


def running_ratio(result: RowResult, name: str) -> float | None:
    """The same from the first batch on. Both epochs have the same batches; the waits for the first are left
    out."""
    seconds = []
    for rate, wait in (("rate", "first_wait"), ("warm_rate", "warm_wait")):
        per_second, waited = result.value(name, rate), result.value(name, wait)
        if not per_second or waited is None:
            return None
        seconds.append(_samples(result, name) / per_second - waited)
    return seconds[1] / seconds[0]


def unemulated_ratio(result: RowResult, name: str) -> float | None:
    """As `warm_ratio`, with the first epoch shorter by the time of both cores for the drive's emulation."""
    rate, cpu, whole = result.value(name, "rate"), result.value(name, "drive_cpu"), warm_ratio(result, name)
    if not rate or cpu is None or whole is None:
        return None
    seconds = _samples(result, name) / rate
    return whole * seconds / (seconds - cpu / CORES)


def _line(result: RowResult, name: str) -> list[str]:
    if problem := result.problem(name):
        return [name, f"failed: {problem}".replace("|", "/"), *([""] * (len(HEAD) - 2))]
    read = result.value(name, "read_bytes")
    return [
        name,
        number(result.value(name, "rate"), 0),
        number(result.value(name, "warm_rate"), 0),
        number(result.value(name, "seeks_sample"), 3),
        number(result.value(name, "disk_s"), 1),
        number(result.value(name, "media_s"), 1),
        number(result.ratio_of(name, "disk_s", "media_s"), 2, "×"),
        number(None if read is None else read / 1e6, 0),
        number(result.value(name, "memory_mib"), 0),
    ]


def bars(result: RowResult) -> list[list[str]]:
    """What the project asks of itself, and whether it holds."""
    lines = []
    for way in (TARS, LOOSE):
        spent = result.ratio_of(way.name, "disk_s", "media_s")
        told = verdict(spent, DISK_BAR, at_most=True)
        lines.append([f"{way.name}: seconds of disk ÷ media", number(spent, 2, "×"), told])
        read = result.ratio(way.name, IN_ORDER, "read_bytes")
        told = verdict(read, READ_BAR, at_most=True)
        lines.append([f"{way.name}: bytes read ÷ those of the photographs", number(read, 2, "×"), told])
    measured = result.contenders()
    for way in (each for each in ALONE if each not in (AHEAD, LONG) or each.name in measured):
        bar = WARM_BAR if way not in (FULL_SHUFFLE, AHEAD) else None
        warm = warm_ratio(result, way.name)
        title = f"{way.name}: first epoch ÷ from memory, or the media rate where that is less"
        lines.append([title, number(warm, 2, "×"), verdict(warm, bar)])
        if (running := running_ratio(result, way.name)) is not None:
            lines.append([f"{way.name}: the same from the first batch on", number(running, 2, "×"), ""])
        if (unemulated := unemulated_ratio(result, way.name)) is not None:
            title = f"{way.name}: the same without the processors' time for the emulation of the drive"
            lines.append([title, number(unemulated, 2, "×"), ""])
    for way in (TARS, LOOSE):
        best = ratio_to_best_peer(result, way)
        ratio = best[1] if best else None
        title = f"{way.name} ÷ best peer ({best[0] if best else 'none'})"
        lines.append([title, number(ratio, 2, "×"), verdict(ratio, PEER_BAR)])
    full = result.ratio(FULL_SHUFFLE.name, AT_RANDOM, "rate")
    title = f"{FULL_SHUFFLE.name} ÷ what a seek for each photograph allows"
    lines.append([title, number(full, 2, "×"), verdict(full, FULL_BAR)])
    if KEPT.name in result.contenders():
        kept = result.ratio(KEPT.name, LOOSE.name, "rate")
        lines.append([f"{KEPT.name} ÷ without", number(kept, 2, "×"), verdict(kept, KEPT_BAR)])
    shared = result.ratio(FOUR.name, TARS.name, "read_bytes")
    title = "bytes read for four sharing jobs ÷ for one"
    lines.append([title, number(shared, 2, "×"), verdict(shared, SHARED_BAR, at_most=True)])
    waited, count = result.value(BESIDE.name, "p99_ms"), result.value(BESIDE.name, "foreign")
    title = f"p99 of {number(count, 0)} foreign GETs of 64 KiB, one at a time, during an epoch"
    lines.append([title, number(waited, 1, " ms"), verdict(waited, FOREIGN_BAR_MS, at_most=True)])
    if (longest := result.value(BESIDE.name, "longest_ms")) is not None:
        half = number(result.value(BESIDE.name, "p50_ms"), 1, " ms")
        lines.append([f"the longest of them (half of them: up to {half})", number(longest, 1, " ms"), ""])
    return lines


def section(rows: Mapping[str, RowResult]) -> list[str]:
    """The rotational disk."""
    result = rows.get(NAME)
    if result is None or not result.contenders():
        return []
    size = SIZE if "rotational_long" in result.setup else 8 << 30  # figures of before have no longer epoch
    # Figures of before have no longest GET, and were taken during the epoch of the other ways.
    beside = BESIDE_TEXT if result.value(BESIDE.name, "longest_ms") is not None else ""
    text = TEXT.format(gib=size >> 30, beside=beside, **result.setup)
    if LONG.name in result.contenders():
        text += "\n\n" + LONG_TEXT.format(long=LONG.samples(result.setup))
    lines = [_line(result, name) for name in result.contenders()]
    parts = [f"## {result.title}", text, table(HEAD, lines), *loader_repeats(result)]
    return [*parts, table(BARS_HEAD, bars(result)), COMMAND]
