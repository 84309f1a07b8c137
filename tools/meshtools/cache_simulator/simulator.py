"""Replays traces of reads on eviction policies and reports their hit ratios (`mesh cache simulate`).

Every policy sees the same reads and has the same capacity; a hit is a whole item. `warm` ratios exclude
first reads, which no cache could serve. A trace file is JSON lines or CSV with key, size and optionally
bucket. A generated trace is the same for the same seed in every Python version.
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain
from random import Random
from typing import IO, TYPE_CHECKING

from meshd.origins.eviction.policy_api import SEGMENT_BYTES
from meshd.origins.eviction.segment_policy import SegmentPolicy
from meshtools.cache_simulator.comparison_policies import Belady, Lru, S3Fifo, Sieve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from meshd.origins.eviction.policy_api import EvictionSettings, Item, Policy


_MAX_SIZE = 1 << 53
_DIGITS = 16


class TraceError(ValueError):
    """A trace is malformed; the message names the line."""


@dataclass(frozen=True, slots=True)
class TraceRead:
    """One read of a whole item; `size` in bytes."""

    item: Item
    size: int


def parse_trace(stream: IO[str]) -> list[TraceRead]:
    """Reads a whole trace file. Raises TraceError."""
    lines = iter(stream)
    first = next(lines, "")
    while first and not first.strip():
        first = next(lines, "")
    whole = chain([first], lines)
    try:
        found = list(_json_lines(whole) if first.lstrip().startswith("{") else _csv_lines(whole))
    except csv.Error as error:
        raise TraceError(f"the trace is not CSV: {error}") from None
    if not found:
        raise TraceError("the trace has no reads")
    return found


def _json_lines(lines: Iterable[str]) -> Iterator[TraceRead]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"line {number} is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise TraceError(f"line {number} is not a JSON object")
        yield _read(number, document.get("bucket", ""), document.get("key"), document.get("size"))


def _csv_lines(lines: Iterable[str]) -> Iterator[TraceRead]:
    rows = csv.DictReader(lines)
    missing = {"key", "size"}.difference(rows.fieldnames or ())
    if missing:
        raise TraceError(
            f"line 1 must name the columns key and size: {' and '.join(sorted(missing))} missing"
        )
    for row in rows:
        size = row["size"] or ""
        number = rows.line_num
        yield _read(
            number,
            row.get("bucket") or "",
            row["key"],
            int(size) if size.isdecimal() and len(size) <= _DIGITS else size[:40],
        )


def _read(number: int, bucket: object, key: object, size: object) -> TraceRead:
    if not isinstance(key, str) or not key or not isinstance(bucket, str):
        raise TraceError(f"line {number}: key must be a non-empty string, and bucket a string")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < _MAX_SIZE:
        raise TraceError(f"line {number}: size must be a number of bytes, 1 or more, not {size!r}")
    return TraceRead((bucket, key), size)


def epoch_trace(
    count: int, items: int, size: int, *, shuffled: bool = True, seed: int = 0, bucket: str = "data"
) -> list[TraceRead]:
    """Generates a trace with every item once per epoch, in a new order each time or always in the same
    order."""
    random = Random(seed)
    data = [TraceRead((bucket, f"sample-{number:08d}"), size) for number in range(items)]
    reads: list[TraceRead] = []
    for _ in range(count):
        if shuffled:
            random.shuffle(data)
        reads += data
    return reads


def zipf_trace(exponent: float, reads: int, items: int, size: int, *, seed: int = 0) -> list[TraceRead]:
    """Generates independent reads; the item of rank r has a weight of r to the power of -exponent."""
    random = Random(seed)
    sums = list(accumulate((rank + 1) ** -exponent for rank in range(items)))
    data = [TraceRead(("popular", f"object-{number:08d}"), size) for number in range(items)]
    return [data[bisect_left(sums, random.random() * sums[-1])] for _ in range(reads)]


def mix_traces(traces: Iterable[list[TraceRead]], *, seed: int = 0) -> list[TraceRead]:
    """Interleaves traces: each step takes the next read of one of them, chosen in proportion to the reads
    that it has left."""
    random = Random(seed)
    kept = list(traces)
    order = [number for number, trace in enumerate(kept) for _ in trace]
    random.shuffle(order)
    streams = [iter(trace) for trace in kept]
    return [next(streams[number]) for number in order]


_SEGMENTS = 64
_PLAN = "trace"

PLANNED, BOUND = "segments+plan", "belady"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a policy on a trace. `warm` ratios are shares of the reads, or bytes, that could hit."""

    policy: str
    objects: float
    bytes: float
    warm_objects: float
    warm_bytes: float
    moved: int
    evictions: int


def footprint(trace: Sequence[TraceRead]) -> int:
    """Returns the bytes of all items of a trace, each at its largest size."""
    sizes: dict[Item, int] = {}
    for read in trace:
        sizes[read.item] = max(read.size, sizes.get(read.item, 0))
    return sum(sizes.values())


def default_segment(capacity: int) -> int:
    """Returns the segment size of a store, or a smaller one so that a small cache has some dozens of
    segments."""
    return max(1, min(SEGMENT_BYTES, capacity // _SEGMENTS))


def simulate(name: str, trace: Sequence[TraceRead], settings: EvictionSettings) -> Result:
    """Replays a trace on the policy `name`. Raises KeyError for a policy that is not one of POLICIES."""
    policy = POLICIES[name](settings, trace)
    steps = policy if name == PLANNED and isinstance(policy, SegmentPolicy) else None
    seen: set[Item] = set()
    hits = hit_bytes = warm = warm_bytes = total = 0
    for position, read in enumerate(trace, 1):
        if steps is not None:
            steps.advance(_PLAN, position)  # the policy decides by the use after this one
        got = policy.read_item(read.item, read.size)
        total += read.size
        hits += got == read.size
        hit_bytes += got
        if read.item in seen:
            warm += 1
            warm_bytes += read.size
        seen.add(read.item)
    return Result(
        name,
        hits / len(trace),
        hit_bytes / total,
        hits / max(warm, 1),
        hit_bytes / max(warm_bytes, 1),
        policy.moved,
        policy.evictions if isinstance(policy, SegmentPolicy) else 0,
    )


def _policy_with_plan(settings: EvictionSettings, trace: Sequence[TraceRead]) -> SegmentPolicy:
    policy = SegmentPolicy(settings)
    policy.plan(_PLAN, (read.item for read in trace))
    return policy


POLICIES: dict[str, Callable[[EvictionSettings, Sequence[TraceRead]], Policy]] = {
    "segments": lambda settings, _: SegmentPolicy(settings),
    PLANNED: _policy_with_plan,
    "lru": lambda settings, _: Lru(settings.capacity),
    "s3-fifo": lambda settings, _: S3Fifo(settings.capacity),
    "sieve": lambda settings, _: Sieve(settings.capacity),
    BOUND: lambda settings, trace: Belady(settings.capacity, (read.item for read in trace)),
}
