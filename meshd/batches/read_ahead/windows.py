"""Windows: the runs of samples of an epoch whose bytes are read together.

Law: pure. Windows are adjacent, in epoch order, and each sample is in exactly one. In a mesh, the size of a
window depends on the bytes that this node reads itself; samples of other nodes do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from meshd.batches.read_ahead.extents import GAP_BYTES
from meshd.core.sample_locations import bytes_columns
from meshwire.plan.shuffle import BlocksOrder, GlobalOrder, StoredOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from meshd.batches.read_ahead.own_samples import OwnSamples
    from meshd.batches.read_ahead.read_hints import PackedReads
    from meshwire.dataset.snapshot import Snapshot
    from meshwire.plan.shuffle import SampleOrder

    Integers = npt.NDArray[np.int64]
    OwnBetween = Callable[[int, int], tuple[Integers, Integers, Integers]]
    """From the positions first…end−1 to those of them that are the node's own, their samples, and the sizes
    of these in bytes."""

SEEK_BYTES: Final = 2_400_000
"""Bytes that a disk of 200 MB/s reads in the time of one seek and half a turn, 12 ms."""
SHORT_SEEK_BYTES: Final = 1_000_000
"""The same for a seek within a data file, 5 ms."""
MIN_WINDOW_BYTES: Final = 32 << 20
MAX_WINDOW_ROWS: Final = 1 << 18
"""A node's own samples in a window: bounds the memory and time of looking up a window."""
MAX_WINDOW_SPAN: Final = 1 << 24
"""Positions in a window: bounds the time of finding a node's own samples, some 0.3 µs each."""


class CutWindow(msgspec.Struct, frozen=True, eq=False):
    """Positions first…end−1 of an epoch. `samples`: int64[n], those at these positions that the node reads;
    `bytes`: their size."""

    first: int
    end: int
    samples: Integers
    bytes: int


def first_size(order: SampleOrder, batch: float) -> int:
    """Return the bytes of a reader's first window: it costs no more than the seeks of one batch would.
    `batch`: rows of a batch that the node reads."""
    least = 0 if isinstance(order, StoredOrder) else int(batch * SEEK_BYTES)
    return max(MIN_WINDOW_BYTES, least)


def awaited_size(order: SampleOrder, batch: float, snapshot: Snapshot, fraction: float) -> int:
    """Return the bytes of a reader's first window if a batch waits for it. `fraction`: how much of the
    snapshot the node reads.

    In a full shuffle, the rows of the batch lie in all parts of the window. Where the gaps between its
    samples are too large to be read through, each costs a short seek, in a large window as in a small one: so
    the usual first window is halved until it costs no more than the seeks of one batch would, or as long as
    it has the samples of one.
    """
    size, whole = first_size(order, batch), _total_bytes(snapshot)
    mean, total = whole / snapshot.samples, whole * fraction
    if not isinstance(order, GlobalOrder) or total * mean <= size * (mean + GAP_BYTES):
        return size
    most = batch * SEEK_BYTES * mean / (mean + SHORT_SEEK_BYTES)
    while size > most and size // 2 >= batch * mean:
        size //= 2
    return size


def next_size(order: SampleOrder, size: int, budget: int, usual: int = 0) -> int:
    """Return the bytes of the window after one of `size` bytes: twice as many, up to the budget. In stored
    order larger windows would not save any seek. `usual`: of a first window that no batch waits for; smaller
    ones together take its place."""
    if isinstance(order, StoredOrder):
        return size
    return min(2 * usual if size < usual <= 2 * size + 1 else 2 * size, budget)


def fitting_size(size: int, share: int) -> int:
    """Return the bytes of a window of which two fit a reader's share of the budget."""
    return min(size, max(MIN_WINDOW_BYTES, share // 2))


def has_room(order: SampleOrder, held: Sequence[int], size: int, share: int) -> bool:
    """Return whether another window of up to `size` bytes fits a reader's share of the budget beside those of
    `held` bytes. With blocks it is about as large as the one before, since it ends where a block does."""
    fitting = min(size, share // 2)
    if held and isinstance(order, BlocksOrder):
        fitting = min(fitting, held[-1])
    return sum(held) + fitting <= share


def cut_window(
    snapshot: Snapshot,
    order: SampleOrder,
    first: int,
    size: int,
    own: OwnSamples | None = None,
    packed: PackedReads | None = None,
) -> CutWindow:
    """Return the window that begins at position `first`, and in which about `size` bytes, or one sample, are
    the node's `own`; None: all are. `packed`: what is read, if the order is of packed rows."""
    if own is not None and not own.fraction:
        return CutWindow(first, order.n, np.empty(0, np.int64), 0)
    if packed is None:
        mean = max(1.0, _total_bytes(snapshot) / snapshot.samples)
    else:
        mean = max(1.0, packed.mean_bytes)
    mean *= own.fraction if own else 1.0
    return cut_positions(
        order, first, size, mean, lambda begin, end: _own_between(snapshot, order, begin, end, own, packed)
    )


def cut_positions(
    order: SampleOrder, first: int, size: int, mean: float, own_between: OwnBetween
) -> CutWindow:
    """Return the window that begins at position `first`, and in which about `size` bytes, or one sample, are
    the node's own. `mean`: its own bytes at a position, on average.

    It ends where a block of the shuffle ends, if that leaves at least MIN_WINDOW_BYTES.
    """
    rows = min(int(1.25 * size / mean) + 1, MAX_WINDOW_ROWS)
    last, end, held, count = min(order.n, first + MAX_WINDOW_SPAN), first, 0, 0
    found = []
    while end < last and held <= size and count < MAX_WINDOW_ROWS:
        found.append(own_between(end, min(last, end + rows)))
        end, held = min(last, end + rows), held + int(found[-1][2].sum())
        count += found[-1][0].size
    positions, samples, lengths = (np.concatenate(parts) for parts in zip(*found, strict=True))
    if count > MAX_WINDOW_ROWS:
        end = int(positions[MAX_WINDOW_ROWS])
        positions, lengths = positions[:MAX_WINDOW_ROWS], lengths[:MAX_WINDOW_ROWS]
    ends = order.window_ends if isinstance(order, BlocksOrder) else None
    end = window_end(positions, lengths, MIN_WINDOW_BYTES, size, first, end, ends)
    count = int(np.searchsorted(positions, end))
    return CutWindow(first, end, samples[:count], int(lengths[:count].sum()))


def window_end(
    positions: Integers,
    lengths: Integers,
    least: int,
    most: int,
    first: int,
    last: int,
    boundaries: Integers | None = None,
) -> int:
    """Return the position after a window that begins at `first`: its samples have at most `most` bytes, or
    are one.

    `positions`, ascending, from `first` to before `last`, and `lengths` in bytes: of the samples that count;
    `last`: where the window ends if they all fit. `boundaries`: positions at which a block of the shuffle
    ends, ascending. A window ends at the first of them that gives it `least` bytes, else at the last that
    fits: blocks are read whole, and no more of them than needed.
    """
    sums = np.cumsum(lengths)
    count = max(1, int(np.searchsorted(sums, most, side="right")))
    end = int(positions[count]) if count < sums.size else last
    if boundaries is None:
        return end
    fitting = boundaries[(boundaries > first) & (boundaries <= end)]
    before = np.append(0, sums)[np.searchsorted(positions, fitting)]
    enough = fitting[before >= least]
    return int(enough[0] if enough.size else fitting[-1] if fitting.size else end)


def window_between(
    snapshot: Snapshot,
    order: SampleOrder,
    first: int,
    end: int,
    own: OwnSamples | None = None,
    packed: PackedReads | None = None,
) -> CutWindow:
    """Return the window of the positions first…end−1, whatever its size; see `cut_window`."""
    _, samples, lengths = _own_between(snapshot, order, first, end, own, packed)
    return CutWindow(first, end, samples, int(lengths.sum()))


def _total_bytes(snapshot: Snapshot) -> int:
    return sum(column.total_bytes() for column in bytes_columns(snapshot).values())


def _own_between(
    snapshot: Snapshot,
    order: SampleOrder,
    first: int,
    end: int,
    own: OwnSamples | None,
    packed: PackedReads | None,
) -> tuple[Integers, Integers, Integers]:
    """Return the node's samples at the positions first…end−1: their positions, themselves and their sizes in
    bytes: int64[n] each."""
    positions = np.arange(first, end, dtype=np.int64)
    samples = order.samples_at(positions)
    if packed is not None:
        return positions, samples, packed.bytes_of(samples, own)
    if own is not None:
        kept = own.includes(samples)
        positions, samples = positions[kept], samples[kept]
    columns = bytes_columns(snapshot).values()
    lengths = np.zeros(samples.size, np.int64)
    for column in columns:
        lengths += column.lengths_at(samples)
    return positions, samples, lengths
