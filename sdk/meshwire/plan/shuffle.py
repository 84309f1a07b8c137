"""Shuffle order: stateless keyed permutations from positions to samples, and length buckets over them.

Law: any position directly, many at once, memory O(shards), without a shuffle buffer; a bijection of 0…n-1
for every n and key. Changing a constant changes every epoch: golden vectors pin them.
Law: length buckets move samples only within a pool of positions, so an epoch keeps its content.
Invariant: no row of a run is longer than any row of the next longer run of its pool; runs, and the rows in
each, are in random order.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np

from meshwire.plan.keyed_random import MASK64, derive_key, mix64, mix64_many
from meshwire.strict_json import (
    PlanError,
    checked_choice,
    checked_integer,
    checked_object,
    checked_text,
    required_field,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    Indices = npt.NDArray[np.int64]

ROUNDS = 8
_FEW = 24  # values left outside, from which on passes over arrays are faster than over one value
_FEW_BY_TABLE = 4  # the same where rounds are looked up
_TABLE_BITS = 16  # of half a value: rounds of larger ones are computed each time
_WIDE_BITS = 12  # of half a value: up to so many, results in tables are as wide as values, which are not cast
MAX_SAMPLES = 1 << 62
MAX_WINDOW = 1 << 31
Shuffle = Literal["global", "blocks", "none"]
SHUFFLES: tuple[Shuffle, ...] = ("global", "blocks", "none")
# Domain separators: part of the key, so that no two uses share a permutation.
_GLOBAL, _SHARDS, _WINDOW = 0x676C6F62616C, 0x736861726473, 0x77696E646F77


class SampleOrder(Protocol):
    """Maps the positions of an epoch to samples in stored order."""

    @property
    def n(self) -> int:
        """Number of positions in the epoch."""

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at positions (int64[k] → int64[k]). Raises IndexError if any is outside
        0…n−1."""


def checked_positions(positions: Indices, n: int) -> Indices:
    """Return the positions as int64. Raises IndexError if any is outside 0…n−1."""
    positions = np.ascontiguousarray(positions, dtype=np.int64)
    if positions.size and (int(positions.min()) < 0 or int(positions.max()) >= n):
        raise IndexError(f"positions outside 0…{n - 1}")
    return positions


class Feistel:
    """A keyed permutation of 0…n−1: a balanced Feistel network over the smallest domain of 2^(2k) ≥ n
    values.

    Results outside n are permuted again until they are inside ("cycle walking"), which keeps it a
    bijection; at most four passes on average. `key` counts modulo 2**64; 0 ≤ n ≤ 2**62.

    A round is a function of half a value. Once as many values were permuted as that has, rounds of up to
    16 bits are looked up in tables (at most 1 MiB), with the same results.
    """

    __slots__ = ("_half", "_keys", "_mask", "_permuted", "_tables", "n")

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= MAX_SAMPLES:
            raise ValueError(f"a permutation of {n} values; 0…2**62 are supported")
        self.n = n
        self._half = max(1, ((max(n, 2) - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        self._keys = tuple(derive_key(key, round_number) for round_number in range(ROUNDS))
        self._permuted = 0
        self._tables: tuple[npt.NDArray[np.int64 | np.uint16], ...] = ()

    def __call__(self, position: int) -> int:
        """Return the value at `position`. Raises IndexError outside 0…n−1."""
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} outside 0…{self.n - 1}")
        value = self._pass(position)
        while value >= self.n:
            value = self._pass(value)
        return value

    def _pass(self, value: int) -> int:
        mask = self._mask
        left, right = value >> self._half, value & mask
        for key in self._keys:
            left, right = right, left ^ (mix64((right + key) & MASK64) & mask)
        return left << self._half | right

    def samples_at(self, positions: Indices) -> Indices:
        """Return the values at positions, int64[k]. Raises IndexError if any is outside 0…n−1."""
        values = self._pass_many(checked_positions(positions, self.n))
        outside = np.flatnonzero(values >= self.n)
        few = _FEW_BY_TABLE if self._tables else _FEW
        while outside.size > few:
            again = self._pass_many(values.take(outside))
            values[outside] = again
            outside = outside.compress(again >= self.n)
        for place in outside.tolist():
            value = int(values[place])
            while value >= self.n:
                value = self._pass(value)
            values[place] = value
        return values

    def _pass_many(self, values: Indices) -> Indices:
        self._permuted += values.size
        if not self._tables and self._half <= _TABLE_BITS and self._permuted > self._mask:
            halves = np.arange(self._mask + 1, dtype=np.uint64)
            width = np.int64 if self._half <= _WIDE_BITS else np.uint16
            self._tables = tuple(self._round(halves, key).astype(width) for key in self._keys)
        if self._tables:
            near, far = values >> self._half, values & self._mask
            for table in self._tables:
                near, far = far, near ^ table.take(far)
            near = near << self._half
            near |= far
            return near
        half, mask = np.uint64(self._half), np.uint64(self._mask)
        whole = values.view(np.uint64)
        left, right = whole >> half, whole & mask
        for key in self._keys:
            left, right = right, left ^ self._round(right, key)
        return (left << half | right).view(np.int64)

    def _round(self, halves: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
        return mix64_many(halves + np.uint64(key)) & np.uint64(self._mask)

    def __repr__(self) -> str:
        return f"Feistel(n={self.n}, bits={2 * self._half})"


class StoredOrder:
    """The identity order: position i is sample i."""

    __slots__ = ("n",)

    def __init__(self, n: int) -> None:
        self.n = n

    def samples_at(self, positions: Indices) -> Indices:
        return checked_positions(positions, self.n).copy()

    def __repr__(self) -> str:
        return f"StoredOrder(n={self.n})"


class GlobalOrder(Feistel):
    """One permutation over all samples."""

    __slots__ = ()

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        super().__init__(n, derive_key(_GLOBAL, seed, epoch))


class BlocksOrder:
    """Shards permuted, cut into windows of `shards`, and samples permuted inside each window.

    A position of window w comes from one of w's shards, so a sequential reader of the epoch needs at most
    one window of shards open and meets each shard in only one window.
    """

    __slots__ = ("_bounds", "_key", "_permutations", "_shards", "_starts", "_windows", "n")

    def __init__(self, shard_starts: Indices, shards: int, seed: int, epoch: int) -> None:
        starts = np.asarray(shard_starts, dtype=np.int64)
        if shards < 1 or starts.ndim != 1 or starts.size < 1 or starts[0] != 0 or (np.diff(starts) < 0).any():
            raise ValueError("shard_starts must rise from 0 to n, and a window needs at least one shard")
        count = starts.size - 1
        self.n = int(starts[-1])
        self._key = derive_key(_WINDOW, seed, epoch)
        self._permutations: OrderedDict[int, Feistel] = OrderedDict()  # of the windows asked for last
        self._shards = Feistel(count, derive_key(_SHARDS, seed, epoch)).samples_at(np.arange(count))
        self._starts = starts[:-1][self._shards]
        self._bounds = np.zeros(count + 1, dtype=np.int64)  # positions where each permuted shard begins
        np.cumsum(np.diff(starts)[self._shards], out=self._bounds[1:])
        edges = np.append(np.arange(0, count, shards), count)
        self._windows = self._bounds[edges]

    @property
    def window_ends(self) -> Indices:
        """Return the position after each window, ascending."""
        ends: Indices = self._windows[1:]
        return ends

    def samples_at(self, positions: Indices) -> Indices:
        positions = checked_positions(positions, self.n)
        if not positions.size:
            return positions
        inside = self._inside_windows(positions)
        slots = np.searchsorted(self._bounds, inside, side="right") - 1
        return self._starts[slots] + (inside - self._bounds[slots])

    def _inside_windows(self, positions: Indices) -> Indices:
        """Map each position to its permuted position within its window."""
        windows = np.searchsorted(self._windows, positions, side="right") - 1
        result = np.empty_like(positions)
        order = np.argsort(windows, kind="stable")
        numbers, firsts = np.unique(windows[order], return_index=True)
        for number, rows in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
            start = int(self._windows[number])
            result[rows] = self._permutation(number).samples_at(positions[rows] - start) + start
        return result

    def _permutation(self, number: int) -> Feistel:
        found = self._permutations.get(number)
        if found is None:
            size = int(self._windows[number + 1] - self._windows[number])
            found = self._permutations[number] = Feistel(size, derive_key(self._key, number))
            if len(self._permutations) > _KEPT:
                self._permutations.popitem(last=False)
        return found

    def __repr__(self) -> str:
        return f"BlocksOrder(n={self.n}, shards={self._shards.size}, windows={self._windows.size - 1})"


@dataclass(frozen=True, slots=True)
class ShuffleSpec:
    """A shuffle. `shards`: shards per window of a `blocks` shuffle; 0 for the other kinds."""

    kind: Shuffle = "global"
    shards: int = 0


def parse_shuffle(value: Any) -> ShuffleSpec:
    """Parse a shuffle specification. Raises PlanError with the path of the bad field."""
    document = checked_object(value, "shuffle", ("kind", "shards"))
    kind = cast("Shuffle", checked_choice(document.get("kind", "global"), "shuffle.kind", SHUFFLES))
    if kind == "blocks":
        shards = required_field(document, "shards", "shuffle")
        return ShuffleSpec(kind, checked_integer(shards, "shuffle.shards", 1, MAX_WINDOW))
    if "shards" in document:
        raise PlanError("shuffle.shards", f"only a blocks shuffle has windows; leave it out for {kind!r}")
    return ShuffleSpec(kind)


def shuffle_document(shuffle: ShuffleSpec) -> dict[str, Any]:
    """Return the specification as plain JSON values; `parse_shuffle` restores it."""
    document: dict[str, Any] = {"kind": shuffle.kind}
    if shuffle.kind == "blocks":
        document["shards"] = shuffle.shards
    return document


def shuffle_order(shuffle: ShuffleSpec, shard_starts: Indices, seed: int, epoch: int) -> SampleOrder:
    """Return the order of one epoch. `shard_starts` is int64[S+1], rising from 0 to n, as in a snapshot."""
    n = int(shard_starts[-1])
    if shuffle.kind == "none":
        return StoredOrder(n)
    if shuffle.kind == "blocks":
        return BlocksOrder(shard_starts, shuffle.shards, seed, epoch)
    return GlobalOrder(n, seed, epoch)


MAX_POOL = 1 << 18
_RUNS, _ROWS = 0x72756E73, 0x726F7773  # domain separators of keys, as above
_KEPT = 2


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Length buckets: runs of `rows` positions, the rows of a global batch; a pool has `window` runs.
    `field`: its stored size is the length.
    """

    field: str
    rows: int
    window: int

    @property
    def pool(self) -> int:
        return self.rows * self.window


def parse_buckets(value: Any) -> BucketSpec:
    """Parse a bucket specification. Raises PlanError with the path of the bad field."""
    document = checked_object(value, "buckets", ("field", "rows", "window"))
    found = BucketSpec(
        checked_text(required_field(document, "field", "buckets"), "buckets.field", at_most=100),
        checked_integer(required_field(document, "rows", "buckets"), "buckets.rows", 1, MAX_POOL),
        checked_integer(required_field(document, "window", "buckets"), "buckets.window", 2, MAX_POOL),
    )
    if found.pool > MAX_POOL:
        raise PlanError("buckets.window", f"{found.pool} positions per pool; at most {MAX_POOL} are allowed")
    return found


def buckets_document(buckets: BucketSpec) -> dict[str, Any]:
    """Return the specification as plain JSON values; `parse_buckets` restores it."""
    return {"field": buckets.field, "rows": buckets.rows, "window": buckets.window}


class BucketOrder:
    """The epoch of `order` with its pools sorted. `lengths`: of every sample, int64."""

    __slots__ = ("_buckets", "_key", "_lengths", "_order", "_pools", "n")

    def __init__(
        self, order: SampleOrder, lengths: Indices, buckets: BucketSpec, seed: int, epoch: int
    ) -> None:
        self.n = order.n
        self._order, self._lengths, self._buckets = order, lengths, buckets
        self._key = derive_key(_RUNS, seed, epoch)
        self._pools: OrderedDict[int, Indices] = OrderedDict()

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at positions (int64[k] → int64[k]). Raises IndexError if any is outside
        0…n−1."""
        positions = checked_positions(positions, self.n)
        pools, places = np.divmod(positions, self._buckets.pool)
        samples = np.empty_like(positions)
        for number in np.unique(pools).tolist():
            rows = pools == number
            samples[rows] = self._pool(number)[places[rows]]
        return samples

    def _pool(self, number: int) -> Indices:
        found = self._pools.get(number)
        if found is None:
            found = self._pools[number] = self._sort_pool(number)
            if len(self._pools) > _KEPT:
                self._pools.popitem(last=False)
        return found

    def _sort_pool(self, number: int) -> Indices:
        """Return a pool's samples: sorted by length, cut into runs; whole runs in random order, an
        incomplete run last."""
        first, width = number * self._buckets.pool, self._buckets.rows
        samples = self._order.samples_at(np.arange(first, min(first + self._buckets.pool, self.n)))
        samples = samples[np.argsort(self._lengths[samples], kind="stable")]
        places = np.arange(samples.size)
        key, whole = derive_key(self._key, number), samples.size // width
        turns = np.append(Feistel(whole, key).samples_at(np.arange(whole)), whole)
        drawn = mix64_many(places.astype(np.uint64) + np.uint64(derive_key(_ROWS, key)))
        laid: Indices = samples[np.lexsort((drawn, turns[places // width]))]
        return laid

    def __repr__(self) -> str:
        return f"BucketOrder({self._order!r}, {self._buckets!r})"
