"""Windows: where the epoch's samples are cut into runs whose bytes are read together.

Law: pure. Windows are adjacent, in the order of the epoch, and each sample is in one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.batches.read_ahead.extents import window_end
from meshd.core.sample_locations import bytes_columns
from meshwire.plan.shuffle import BlocksOrder, StoredOrder

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.dataset.snapshot import Snapshot
    from meshwire.plan.shuffle import SampleOrder

    Integers = npt.NDArray[np.int64]

SEEK_BYTES: Final = 2_400_000
"""Bytes that a disk of 200 MB/s reads in the time of one seek and half a turn, 12 ms."""
MIN_WINDOW_BYTES: Final = 32 << 20
MAX_WINDOW_ROWS: Final = 1 << 18  # bounds the memory and time of looking up a window


@dataclass(frozen=True, slots=True, eq=False)
class CutWindow:
    """Positions first…end−1 of an epoch. `samples`: int64[end − first], the samples at these positions;
    `bytes`: their size."""

    first: int
    end: int
    samples: Integers
    bytes: int


def first_size(order: SampleOrder, batch: int) -> int:
    """Return the bytes of a reader's first window: it costs no more than the seeks of one batch would."""
    return MIN_WINDOW_BYTES if isinstance(order, StoredOrder) else max(MIN_WINDOW_BYTES, batch * SEEK_BYTES)


def next_size(order: SampleOrder, size: int, budget: int) -> int:
    """Return the bytes of the window after one of `size` bytes: twice as many, up to the budget. In stored
    order larger windows would not save any seek."""
    return size if isinstance(order, StoredOrder) else min(2 * size, budget)


def fitting_size(size: int, share: int) -> int:
    """Return the bytes of a window of which two fit a reader's share of the budget."""
    return min(size, max(MIN_WINDOW_BYTES, share // 2))


def cut_window(snapshot: Snapshot, order: SampleOrder, first: int, size: int) -> CutWindow:
    """Return the window that begins at position `first` and has about `size` bytes, or one sample.

    It ends where a block of the shuffle ends, if that leaves at least MIN_WINDOW_BYTES.
    """
    columns = bytes_columns(snapshot).values()
    mean = max(1.0, sum(float(column.length.mean()) for column in columns))
    count = min(int(1.25 * size / mean) + 1, MAX_WINDOW_ROWS, order.n - first)
    samples, lengths = _samples_between(snapshot, order, first, first + count)
    ends = order.window_ends if isinstance(order, BlocksOrder) else None
    end = window_end(lengths, MIN_WINDOW_BYTES, size, first, ends)
    return CutWindow(first, end, samples[: end - first], int(lengths[: end - first].sum()))


def window_between(snapshot: Snapshot, order: SampleOrder, first: int, end: int) -> CutWindow:
    """Return the window of the positions first…end−1, whatever its size."""
    samples, lengths = _samples_between(snapshot, order, first, end)
    return CutWindow(first, end, samples, int(lengths.sum()))


def _samples_between(
    snapshot: Snapshot, order: SampleOrder, first: int, end: int
) -> tuple[Integers, Integers]:
    """Return the samples at the positions first…end−1 and their sizes in bytes: int64[n], int64[n]."""
    samples = order.samples_at(np.arange(first, end, dtype=np.int64))
    columns = bytes_columns(snapshot).values()
    return samples, np.sum([column.length[samples] for column in columns], axis=0, dtype=np.int64)
