"""The samples that an epoch of a plan reads: each once, in stored order, with the position it is read at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from meshd.batches.assembly.frame_rows import main_objects
from meshd.core.sample_locations import bytes_columns
from meshwire.plan.epoch_order import snapshot_order

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.core.plan_record import Plan
    from meshwire.dataset.build_snapshot import Snapshot

    Integers = npt.NDArray[np.int64]

WINDOW_BYTES: Final = 16 << 20
"""Source bytes of a window; a rotational disk reads them in 0.1 s."""
WINDOW_ROWS: Final = 512


def samples_of(plan: Plan, snapshot: Snapshot, epoch: int) -> tuple[Integers, Integers]:
    """Return (samples, positions), int64[n] each: the samples in stored order, and where each is read first.

    `plan`: not a packed one, but the plan that renders its samples.
    """
    positions = np.arange(plan.positions, dtype=np.int64)
    read = snapshot_order(plan.spec, snapshot, epoch).samples_at(positions)
    samples, first = np.unique(read, return_index=True)
    return samples.astype(np.int64), first.astype(np.int64)


def in_folder(snapshot: Snapshot, samples: Integers, bucket: str, prefix: str) -> npt.NDArray[np.bool_]:
    """Return which samples have most of their bytes in objects of a bucket whose keys begin with `prefix`.
    bool[n].
    """
    numbers, places = np.unique(main_objects(snapshot, samples), return_inverse=True)
    objects = snapshot.objects
    inside = [
        objects.bucket_of(number) == bucket and objects.keys[number].startswith(prefix)
        for number in numbers.tolist()
    ]
    return np.array(inside, np.bool_)[places]


def source_bytes(snapshot: Snapshot, samples: Integers) -> Integers:
    """Return the size of each sample's source bytes. int64[n]."""
    columns = bytes_columns(snapshot).values()
    lengths = [column.lengths_at(samples) for column in columns]
    return np.asarray(np.sum(lengths, axis=0, dtype=np.int64), dtype=np.int64)


def window_end(sizes: Integers, first: int, most: int = WINDOW_BYTES) -> int:
    """Return the end of the window that begins with sample `first`: one sample, or about `most` bytes."""
    ends = np.cumsum(sizes[first : first + WINDOW_ROWS])
    return first + max(1, int(np.searchsorted(ends, most, side="right")))
