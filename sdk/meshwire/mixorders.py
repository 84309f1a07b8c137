"""The order of an epoch of a mix: which part a position belongs to, and which of its samples.

Law: a pure function of (plan, epoch), any position directly, memory O(shards + block). A part that is drawn K
times in an epoch gives each of its n samples ⌊K/n⌋ or ⌈K/n⌉ times in it; where it is drawn less than n times,
the next epoch goes on with the samples that were not.
Invariant: parts are laid over the positions of a block by a keyed permutation (in stored order: evenly).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshwire.mixes import drawn, drawn_before, segments, shares
from meshwire.permutations import BlocksOrder, Feistel, checked_positions
from meshwire.randomness import derive_key

if TYPE_CHECKING:
    from meshwire.mixes import Mix, Segment
    from meshwire.permutations import Indices
    from meshwire.plans import ShuffleSpec

# What a key is used for, as in `permutations`.
_BLOCK, _PART, _TAKEN, _SHARDS, _RUN = 0x626C6F636B, 0x70617274, 0x74616B656E, 0x6D7368617264, 0x72756E
_RUN_SAMPLES = 65_536  # of small parts that are drawn often so many are shuffled together, over all parts
_KEPT = 2


class _Draws(Protocol):
    """What a part gives in an epoch."""

    def many(self, draws: Indices) -> Indices:
        """The samples, counted in the part, of draws 0…K−1."""


class _Stored:
    """One after the other, round and round, going on where the epoch before ended."""

    def __init__(self, n: int, before: int) -> None:
        self._n, self._begin = n, before % n

    def many(self, draws: Indices) -> Indices:
        return (self._begin + draws) % self._n


class _Anywhere:
    """A window of a fixed permutation of the part, shuffled anew in each epoch."""

    def __init__(self, n: int, count: int, before: int, keys: tuple[int, int]) -> None:
        self._n, self._begin = n, before % n
        self._samples, self._taken = Feistel(n, keys[0]), Feistel(count, keys[1])

    def many(self, draws: Indices) -> Indices:
        return self._samples.many((self._begin + self._taken.many(draws)) % self._n)


class _Sequential:
    """A window of the part's shards in a fixed permuted order, in runs, each a `BlocksOrder` of its own."""

    def __init__(
        self,
        starts: Indices,
        window: tuple[int, int],
        width: int,
        run: int,
        key: int,
        shuffled: tuple[int, int],
    ) -> None:
        n, shards = int(starts[-1]), starts.size - 1
        permuted = Feistel(shards, key).many(np.arange(shards))
        self._starts, self._shuffled, self._width = starts[:-1][permuted], shuffled, width
        self._bounds = np.zeros(shards + 1, np.int64)
        np.cumsum(np.diff(starts)[permuted], out=self._bounds[1:])
        count, before = window
        self._n, self._begin, self._end = n, before % n, before % n + count
        self._passes = -(-run // n)
        self._runs: OrderedDict[int, BlocksOrder] = OrderedDict()

    def many(self, draws: Indices) -> Indices:
        places = draws + self._begin
        length = self._passes * self._n
        numbers = places // length
        for number in np.unique(numbers).tolist():
            rows, first = numbers == number, max(number * length, self._begin)
            places[rows] = first + self._run(number).many(places[rows] - first)
        places %= self._n
        shards = np.searchsorted(self._bounds, places, side="right") - 1
        return self._starts[shards] + (places - self._bounds[shards])

    def _run(self, number: int) -> BlocksOrder:
        found = self._runs.get(number)
        if found is None:
            passes = np.arange(number * self._passes, (number + 1) * self._passes) * self._n
            edges = np.append((passes[:, None] + self._bounds[:-1]).reshape(-1), passes[-1] + self._n)
            edges = np.unique(np.clip(edges, self._begin, self._end))
            key, epoch = self._shuffled
            found = BlocksOrder(edges - edges[0], self._width, derive_key(_RUN, key, number), epoch)
            self._runs[number] = found
            if len(self._runs) > _KEPT:
                self._runs.popitem(last=False)
        return found


class MixOrder:
    """The epoch of a mix whose parts begin at `bounds` int64[D+1] of the stored order, each at a shard."""

    __slots__ = (
        "_block", "_bounds", "_drawn", "_evenly", "_key", "_laid", "_parts", "_segments", "_starts", "n",
    )  # fmt: skip

    def __init__(
        self, mix: Mix, bounds: Indices, shard_starts: Indices, shuffle: ShuffleSpec, seed: int, epoch: int
    ) -> None:
        self.n = mix.positions or int(bounds[-1])
        self._bounds, self._block, self._evenly = bounds, mix.block, shuffle.kind == "none"
        self._key = derive_key(_BLOCK, seed, epoch)
        self._segments = segments(mix, self.n, epoch)
        self._starts = np.array([part.start for part in self._segments], np.int64)
        self._drawn = [np.zeros(len(mix.parts), np.int64)]  # before each segment
        for part in self._segments:
            self._drawn.append(self._drawn[-1] + shares(part.weights, part.end - part.start))
        counts, before = drawn(mix, self.n, epoch), drawn_before(mix, self.n, epoch)
        run = max(1, _RUN_SAMPLES // len(counts))
        self._parts = [
            _draws(shuffle, _starts_of(shard_starts, bounds, part), window, run, (seed, epoch, part))
            for part, window in enumerate(zip(counts, before, strict=True))
        ]
        self._laid: tuple[tuple[Segment, int], tuple[Indices, Indices]] | None = None

    def one(self, position: int) -> int:
        """The sample at a position. Raises IndexError outside 0…n−1."""
        return int(self.many(np.array([position], dtype=np.int64))[0])

    def many(self, positions: Indices) -> Indices:
        """The samples at positions (int64[k] → int64[k]). Raises IndexError if any lies outside 0…n−1."""
        positions = checked_positions(positions, self.n)
        parts, draws = np.empty_like(positions), np.empty_like(positions)
        segment = np.searchsorted(self._starts, positions, side="right") - 1
        block = (positions - self._starts[segment]) // self._block
        for number, place in np.unique(np.stack((segment, block)), axis=1).T.tolist():
            rows = np.flatnonzero((segment == number) & (block == place))
            first = int(self._starts[number]) + place * self._block
            parts[rows], draws[rows] = self._in_block(number, first, positions[rows] - first)
        samples = np.empty_like(positions)
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part)
            samples[rows] = self._bounds[part] + self._parts[part].many(draws[rows])
        return samples

    def _in_block(self, number: int, first: int, places: Indices) -> tuple[Indices, Indices]:
        """Part and draw of some places of the block that begins at position `first`."""
        segment = self._segments[number]
        end = min(first + self._block, segment.end)
        before = np.array(shares(segment.weights, first - segment.start), np.int64)
        quotas = shares(segment.weights, end - segment.start) - before
        if self._evenly:
            parts, nth = self._evenly_laid(segment, first, quotas)
            parts, nth = parts[places], nth[places]
        else:
            slots = Feistel(end - first, derive_key(self._key, first)).many(places)
            edges = np.cumsum(quotas)
            parts = np.searchsorted(edges, slots, side="right").astype(np.int64)
            nth = slots - (edges - quotas)[parts]
        return parts, (self._drawn[number] + before)[parts] + nth

    def _evenly_laid(self, segment: Segment, first: int, quotas: Indices) -> tuple[Indices, Indices]:
        """The i-th of a part's q places in a block is (2i+1)/2q through it; of equals the first part."""
        if self._laid is None or self._laid[0] != (segment, first):
            parts = np.repeat(np.arange(quotas.size), quotas)
            nth = np.arange(parts.size) - np.repeat(np.cumsum(quotas) - quotas, quotas)
            turn = np.argsort((2 * nth + 1) / (2 * quotas[parts]), kind="stable")
            self._laid = (segment, first), (parts[turn], nth[turn])
        return self._laid[1]

    def __repr__(self) -> str:
        return f"MixOrder(n={self.n}, parts={len(self._parts)}, segments={len(self._segments)})"


def _starts_of(shard_starts: Indices, bounds: Indices, part: int) -> Indices:
    """Where the shards of a part begin, counted in the part."""
    first, end = np.searchsorted(shard_starts, bounds[part : part + 2])
    starts: Indices = shard_starts[first : end + 1] - bounds[part]
    return starts


def _draws(
    shuffle: ShuffleSpec, starts: Indices, window: tuple[int, int], run: int, where: tuple[int, int, int]
) -> _Draws:
    (seed, epoch, part), n, (count, before) = where, int(starts[-1]), window
    if shuffle.kind == "none":
        return _Stored(n, before)
    shuffled = derive_key(_TAKEN, seed, part)
    if shuffle.kind == "global":
        return _Anywhere(n, count, before, (derive_key(_PART, seed, part), derive_key(shuffled, epoch)))
    key = derive_key(_SHARDS, seed, part)
    return _Sequential(starts, window, shuffle.shards, run, key, (shuffled, epoch))


def mix_bounds(mix: Mix) -> Indices:
    """Where the parts begin in stored order, and where the last ends: int64[D+1]."""
    return np.concatenate(([0], np.cumsum(mix.parts))).astype(np.int64)
