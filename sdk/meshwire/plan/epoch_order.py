"""Order of an epoch: its shuffle, mix and length buckets, and which part and sample each position holds.

Law: the order is a pure function of (plan, snapshot, epoch); any position is computed directly, in O(shards +
block) memory. A part of n samples that is drawn K times in an epoch gives each sample floor(K/n) or ceil(K/n)
times, and the next epoch continues with the samples that occurred less often.
Invariant: a keyed permutation spreads the parts over the positions of a block (in stored order: evenly).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import numpy as np

from meshwire.dataset.snapshot import BytesColumn
from meshwire.plan.keyed_random import derive_key
from meshwire.plan.mix import draw_counts, draw_counts_before, segments, shares
from meshwire.plan.shuffle import BlocksOrder, BucketOrder, Feistel, checked_positions, shuffle_order
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.plan.mix import Mix, Segment
    from meshwire.plan.plan_spec import PlanSpec
    from meshwire.plan.shuffle import Indices, SampleOrder, ShuffleSpec


# Domain separators of keys, as in `shuffle`.
_BLOCK, _PART, _TAKEN, _SHARDS, _RUN = 0x626C6F636B, 0x70617274, 0x74616B656E, 0x6D7368617264, 0x72756E
_RUN_SAMPLES = 65_536  # samples of all parts together that a run shuffles, if small parts are drawn often
_CACHED_RUNS = 2


class _PartDraws(Protocol):
    """The draws of one part of a mix in an epoch, numbered 0…K−1."""

    def samples_of(self, draws: Indices) -> Indices:
        """Return the sample of each draw, numbered within the part (int64[k] → int64[k])."""


class _StoredDraws:
    """Draws in stored order, cyclically, continuing where the previous epoch ended."""

    def __init__(self, n: int, before: int) -> None:
        self._n, self._first = n, before % n

    def samples_of(self, draws: Indices) -> Indices:
        return (self._first + draws) % self._n


class _GlobalDraws:
    """A window of `count` draws, after `before` earlier ones, of a fixed permutation of the part's n samples.
    Each epoch reshuffles its window."""

    def __init__(self, n: int, count: int, before: int, keys: tuple[int, int]) -> None:
        self._n, self._first = n, before % n
        self._samples, self._reshuffled = Feistel(n, keys[0]), Feistel(count, keys[1])

    def samples_of(self, draws: Indices) -> Indices:
        return self._samples.samples_at((self._first + self._reshuffled.samples_at(draws)) % self._n)


class _BlockDraws:
    """A window of draws over the part's shards in a fixed permuted order, which repeats after n draws.

    `starts`: where the shards begin, int64[shards+1]; `window`: the draws of this epoch and of all earlier
    ones; `width`: the shards open at a time. The draws are cut into runs of whole passes over the part, at
    least `run` draws each, and each run is shuffled by a `BlocksOrder` of its own. `key` is that of the fixed
    order, `shuffled` the key and epoch of the shuffle.
    """

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
        permuted = Feistel(shards, key).samples_at(np.arange(shards))
        self._starts, self._shuffled, self._width = starts[:-1][permuted], shuffled, width
        self._bounds = np.zeros(shards + 1, np.int64)
        np.cumsum(np.diff(starts)[permuted], out=self._bounds[1:])
        count, before = window
        self._n, self._first, self._end = n, before % n, before % n + count
        self._passes = -(-run // n)
        self._runs: OrderedDict[int, BlocksOrder] = OrderedDict()

    def samples_of(self, draws: Indices) -> Indices:
        places = draws + self._first
        length = self._passes * self._n
        numbers = places // length
        for number in np.unique(numbers).tolist():
            rows, first = numbers == number, max(number * length, self._first)
            places[rows] = first + self._run(number).samples_at(places[rows] - first)
        places %= self._n
        shards = np.searchsorted(self._bounds, places, side="right") - 1
        return self._starts[shards] + (places - self._bounds[shards])

    def _run(self, number: int) -> BlocksOrder:
        found = self._runs.get(number)
        if found is None:
            passes = np.arange(number * self._passes, (number + 1) * self._passes) * self._n
            edges = np.append((passes[:, None] + self._bounds[:-1]).reshape(-1), passes[-1] + self._n)
            edges = np.unique(np.clip(edges, self._first, self._end))
            key, epoch = self._shuffled
            found = BlocksOrder(edges - edges[0], self._width, derive_key(_RUN, key, number), epoch)
            self._runs[number] = found
            if len(self._runs) > _CACHED_RUNS:
                self._runs.popitem(last=False)
        return found


class MixOrder:
    """The order of an epoch of a mix of D parts. `bounds` (int64[D+1]) has the samples at which the parts
    begin in stored order; each begins at a shard boundary."""

    __slots__ = (
        "_block", "_bounds", "_drawn_before", "_evenly", "_key", "_layout", "_parts", "_segments", "_starts",
        "n",
    )  # fmt: skip

    def __init__(
        self, mix: Mix, bounds: Indices, shard_starts: Indices, shuffle: ShuffleSpec, seed: int, epoch: int
    ) -> None:
        self.n = mix.positions or int(bounds[-1])
        self._bounds, self._block, self._evenly = bounds, mix.block, shuffle.kind == "none"
        self._key = derive_key(_BLOCK, seed, epoch)
        self._segments = segments(mix, self.n, epoch)
        self._starts = np.array([part.start for part in self._segments], np.int64)
        self._drawn_before = [np.zeros(len(mix.parts), np.int64)]  # before each segment
        for part in self._segments:
            self._drawn_before.append(self._drawn_before[-1] + shares(part.weights, part.end - part.start))
        counts, before = draw_counts(mix, self.n, epoch), draw_counts_before(mix, self.n, epoch)
        run = max(1, _RUN_SAMPLES // len(counts))
        self._parts = [
            _part_draws(shuffle, _starts_of(shard_starts, bounds, part), window, run, (seed, epoch, part))
            for part, window in enumerate(zip(counts, before, strict=True))
        ]
        self._layout: tuple[tuple[Segment, int], tuple[Indices, Indices]] | None = None

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at positions (int64[k] → int64[k]). Raises IndexError if any is outside
        0…n−1."""
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
            samples[rows] = self._bounds[part] + self._parts[part].samples_of(draws[rows])
        return samples

    def _in_block(self, number: int, first: int, places: Indices) -> tuple[Indices, Indices]:
        """Return part and draw of positions in the block that begins at `first`."""
        segment = self._segments[number]
        end = min(first + self._block, segment.end)
        before = np.array(shares(segment.weights, first - segment.start), np.int64)
        quotas = shares(segment.weights, end - segment.start) - before
        if self._evenly:
            parts, nth = self._even_layout(segment, first, quotas)
            parts, nth = parts[places], nth[places]
        else:
            slots = Feistel(end - first, derive_key(self._key, first)).samples_at(places)
            edges = np.cumsum(quotas)
            parts = np.searchsorted(edges, slots, side="right").astype(np.int64)
            nth = slots - (edges - quotas)[parts]
        return parts, (self._drawn_before[number] + before)[parts] + nth

    def _even_layout(self, segment: Segment, first: int, quotas: Indices) -> tuple[Indices, Indices]:
        """Lay out a block evenly: the i-th of a part's q positions is (2i+1)/2q through the block; ties go
        to the first part."""
        if self._layout is None or self._layout[0] != (segment, first):
            parts = np.repeat(np.arange(quotas.size), quotas)
            nth = np.arange(parts.size) - np.repeat(np.cumsum(quotas) - quotas, quotas)
            turn = np.argsort((2 * nth + 1) / (2 * quotas[parts]), kind="stable")
            self._layout = (segment, first), (parts[turn], nth[turn])
        return self._layout[1]

    def __repr__(self) -> str:
        return f"MixOrder(n={self.n}, parts={len(self._parts)}, segments={len(self._segments)})"


def _starts_of(shard_starts: Indices, bounds: Indices, part: int) -> Indices:
    """Return where the shards of a part begin, counted within the part."""
    first, end = np.searchsorted(shard_starts, bounds[part : part + 2])
    starts: Indices = shard_starts[first : end + 1] - bounds[part]
    return starts


def _part_draws(
    shuffle: ShuffleSpec, starts: Indices, window: tuple[int, int], run: int, where: tuple[int, int, int]
) -> _PartDraws:
    (seed, epoch, part), n, (count, before) = where, int(starts[-1]), window
    if shuffle.kind == "none":
        return _StoredDraws(n, before)
    shuffled = derive_key(_TAKEN, seed, part)
    if shuffle.kind == "global":
        return _GlobalDraws(n, count, before, (derive_key(_PART, seed, part), derive_key(shuffled, epoch)))
    key = derive_key(_SHARDS, seed, part)
    return _BlockDraws(starts, window, shuffle.shards, run, key, (shuffled, epoch))


def mix_bounds(mix: Mix) -> Indices:
    """Return where the parts begin in stored order, and where the last ends: int64[D+1]."""
    return np.concatenate(([0], np.cumsum(mix.parts))).astype(np.int64)


def epoch_order(
    spec: PlanSpec, shard_starts: Indices, epoch: int, bounds: Indices | None = None
) -> SampleOrder:
    """Return the order of an epoch without its length buckets. `bounds`: where the parts begin; needed only
    for a mix whose rows are not samples."""
    if spec.mix is None:
        return shuffle_order(spec.shuffle, shard_starts, spec.seed, epoch)
    bounds = mix_bounds(spec.mix) if bounds is None else bounds
    return MixOrder(spec.mix, bounds, shard_starts, spec.shuffle, spec.seed, epoch)


def snapshot_order(spec: PlanSpec, snapshot: Snapshot, epoch: int) -> SampleOrder:
    """Return the order of an epoch whose rows are samples. Raises PlanError as `bucket_lengths` does."""
    found = epoch_order(spec, snapshot.shard_starts, epoch)
    if spec.buckets is None:
        return found
    return BucketOrder(found, bucket_lengths(spec, snapshot), spec.buckets, spec.seed, epoch)


def bucket_lengths(spec: PlanSpec, snapshot: Snapshot) -> Indices:
    """Return the stored sizes of the field used for buckets. Raises PlanError if it is not a bytes field,
    or rows are packed."""
    assert spec.buckets is not None
    if spec.pack is not None:
        raise PlanError("buckets", "packed rows all have the same length; leave out `buckets` or `pack`")
    name = spec.buckets.field
    column = snapshot.fields.get(name)
    if not isinstance(column, BytesColumn):
        if column is not None:
            raise PlanError(
                "buckets.field", f"{name!r} is a class label, whose rows all have the same length"
            )
        hint = suggestion(name, snapshot.fields)
        raise PlanError("buckets.field", f"the snapshot has no bytes field {name!r}{hint}")
    return column.length
