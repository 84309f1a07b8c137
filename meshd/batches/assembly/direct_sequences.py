"""Direct sequences: samples of packed plans that are read by slices from their objects, without rendering.

Law: the elements read equal the result of the ops on the whole sample, because the ops only name a dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshd.batches.assembly.stored_sequence_format import BAD
from meshd.core.api_errors import busy
from meshd.core.sample_locations import bytes_columns
from meshd.store.errors import StoreError
from meshd.transform.messages import MAX_RAGGED_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from meshd.core.plan_record import Plan
    from meshd.core.sample_locations import PinnedObjects
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.frame.columns import Integers

_OP: Final = "frombuffer"


def direct_dtypes(within: Plan, fields: Sequence[str]) -> tuple[np.dtype[Any], ...] | None:
    """Return the dtype of each field's elements in its objects; None unless all fields are read directly."""
    found = []
    for name in fields:
        ops = [op for op in within.spec.ops if name in op.all_fields]
        if len(ops) != 1 or ops[0].op != _OP:
            return None
        args = ops[0].for_field(name).args
        if args.get("shape") != [None] or args["dtype"] == "bool":
            return None
        found.append(np.dtype(args["dtype"]).newbyteorder("<"))
    return tuple(found)


def direct_lengths(snapshot: Snapshot, fields: Sequence[str], dtypes: Sequence[np.dtype[Any]]) -> Integers:
    """Return the lengths of all samples in elements: int64[n], BAD for those that rendering would refuse."""
    columns = bytes_columns(snapshot)
    sizes = [columns[name].length.astype(np.int64) for name in fields]
    lengths = [size // dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True)]
    bad = sum(sizes) > MAX_RAGGED_BYTES
    for length, size, dtype in zip(lengths, sizes, dtypes, strict=True):
        bad |= (size % dtype.itemsize != 0) | (length != lengths[0])
    return np.where(bad, BAD, lengths[0])


class DirectPieces:
    """A source of pieces: the objects of the snapshot. `prepare` it; `pinned` is closed by its owner."""

    def __init__(
        self,
        pinned: PinnedObjects,
        snapshot: Snapshot,
        fields: Sequence[str],
        dtypes: Sequence[np.dtype[Any]],
    ) -> None:
        columns = bytes_columns(snapshot)
        self._pinned, self._dtypes = pinned, tuple(dtypes)
        self._columns = [columns[name] for name in fields]

    def __repr__(self) -> str:
        return f"<DirectPieces of {self._pinned!r}>"

    async def prepare(self, samples: npt.NDArray[np.int64], pieces: Iterable[tuple[int, int, int]]) -> None:
        """Look up the objects of the samples, and fetch the bytes of (sample, begin, length) that other nodes
        hold. Raises BatchError SnapshotChanged, Busy.
        """
        await self._pinned.look_up(samples.tolist())
        await self._pinned.fetch_ranges(
            [self._range(field, *piece) for piece in pieces for field in range(len(self._columns))]
        )

    def _range(self, field: int, sample: int, begin: int, length: int) -> tuple[int, int, int]:
        column, width = self._columns[field], self._dtypes[field].itemsize
        return int(column.objects_at(sample)), int(column.offsets_at(sample)) + begin * width, length * width

    def read_piece(self, field: int, sample: int, begin: int, length: int) -> npt.NDArray[Any] | None:
        """See `PieceSource`. Raises BatchError Busy, SnapshotChanged."""
        dtype = self._dtypes[field]
        if int(self._columns[field].lengths_at(sample)) < (begin + length) * dtype.itemsize:
            return None
        try:
            data = self._pinned.read_range(*self._range(field, sample, begin, length))
        except StoreError as error:
            raise busy(f"a part of sample {sample} cannot be read now: {error}") from error
        return np.frombuffer(data, dtype)
