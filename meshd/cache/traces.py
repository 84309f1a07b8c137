"""Traces of reads: as files, and made.

Law: a trace file is JSON lines (`{"key": …, "size": …, "bucket": …}`) or CSV with those names in its first
line; `bucket` may be missing. A made trace is the same for the same seed, in every version of Python.
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, chain
from random import Random
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meshd.cache.policies.interface import Item

_MAX_SIZE = 1 << 53
_DIGITS = 16


class TraceError(ValueError):
    """A trace cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a whole item; `size` in bytes."""

    item: Item
    size: int


def parse(stream: IO[str]) -> list[Read]:
    """A whole file. Raises TraceError."""
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


def _json_lines(lines: Iterable[str]) -> Iterator[Read]:
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


def _csv_lines(lines: Iterable[str]) -> Iterator[Read]:
    rows = csv.DictReader(lines)
    missing = {"key", "size"}.difference(rows.fieldnames or ())
    if missing:
        raise TraceError(
            f"line 1 must name the columns key and size; {' and '.join(sorted(missing))} missing"
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


def _read(number: int, bucket: object, key: object, size: object) -> Read:
    if not isinstance(key, str) or not key or not isinstance(bucket, str):
        raise TraceError(f"line {number}: key must be a text that is not empty, bucket a text")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size < _MAX_SIZE:
        raise TraceError(f"line {number}: size must be bytes, 1 or more, not {size!r}")
    return Read((bucket, key), size)


def epochs(
    count: int, items: int, size: int, *, shuffled: bool = True, seed: int = 0, bucket: str = "data"
) -> list[Read]:
    """Every item once an epoch; in a new order each, or always in the same."""
    random = Random(seed)
    data = [Read((bucket, f"sample-{number:08d}"), size) for number in range(items)]
    reads: list[Read] = []
    for _ in range(count):
        if shuffled:
            random.shuffle(data)
        reads += data
    return reads


def zipf(exponent: float, reads: int, items: int, size: int, *, seed: int = 0) -> list[Read]:
    """Independent reads; the item of rank r with a weight of r to the power of -exponent."""
    random = Random(seed)
    sums = list(accumulate((rank + 1) ** -exponent for rank in range(items)))
    data = [Read(("popular", f"object-{number:08d}"), size) for number in range(items)]
    return [data[bisect_left(sums, random.random() * sums[-1])] for _ in range(reads)]


def mixed(traces: Iterable[list[Read]], *, seed: int = 0) -> list[Read]:
    """Several side by side: at each step one of them goes on, in proportion to what it has left."""
    random = Random(seed)
    kept = list(traces)
    order = [number for number, trace in enumerate(kept) for _ in trace]
    random.shuffle(order)
    streams = [iter(trace) for trace in kept]
    return [next(streams[number]) for number in order]
