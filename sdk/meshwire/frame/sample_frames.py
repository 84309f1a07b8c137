"""Sample frames: samples as raw bytes, with an index first, then the blobs, then a trailer of results.

Law: sizes are fixed before anything is read; a read that fails later is marked in the trailer and never
appears as an empty sample.
Invariant: each blob starts at a multiple of 64 bytes from the start of the frame, and stock `safetensors`
reads the frame.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.checksums.crc import crc32c
from meshwire.frame.tensor_frame import (
    MAX_BODY_BYTES,
    FrameError,
    Status,
    frame_layout,
    parse_frame_header,
    tensor_views,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from meshwire.frame.tensor_frame import Buffer, FrameLayout

CONTENT_TYPE = "application/vnd.shardmesh.samples"
BLOB_ALIGNMENT = 64
INDEX, BLOBS, STATUS, CRC = "__index", "__blobs", "__status", "__crc32c"
_NAMES, _NAME_BOUNDS = "__name.data", "__name.offsets"


@dataclass(frozen=True, slots=True, eq=False)
class SampleLayout:
    """The layout of a sample frame, in bytes. `head`: the frame's bytes before the blobs (header, names,
    index); `places`: int64[n, 2], offset from the start of the frame and length of each blob; `trailer`:
    offset of the results; `size` of the whole frame.
    """

    frame: FrameLayout
    head: bytes
    places: npt.NDArray[np.int64]
    trailer: int
    size: int

    def trailer_bytes(self, status: npt.NDArray[np.uint8], sums: npt.NDArray[np.uint32]) -> bytes:
        """Return the bytes after the last blob: padding, `__status` uint8[n] and `__crc32c` uint32[n]."""
        tail = bytearray(self.size - self.trailer)
        for name, values in ((STATUS, status), (CRC, sums)):
            slot = self.frame.tensors[name]
            start = slot.offset - self.trailer
            tail[start : start + slot.nbytes] = values.astype(values.dtype.newbyteorder("<")).tobytes()
        return bytes(tail)

    def seal(self, frame: bytearray | memoryview, status: npt.NDArray[np.uint8]) -> None:
        """Write the head and the trailer with checksums around the blobs that are already in `frame` (of
        length `size`).
        """
        view = memoryview(frame)
        sums = [crc32c(view[start : start + length]) for start, length in self.places.tolist()]
        view[: len(self.head)] = self.head
        view[self.trailer :] = self.trailer_bytes(status, np.array(sums, dtype=np.uint32))


def sample_layout(
    sizes: Sequence[int] | npt.NDArray[np.int64],
    metadata: Mapping[str, str],
    names: Sequence[str] | None = None,
) -> SampleLayout:
    """Lay out a frame of n blobs of `sizes` bytes, in that order, each with a name if `names` is given.

    Tensors: `__index` I64[n, 2] (offset within `__blobs`, length), `__blobs` U8, `__status` U8[n],
    `__crc32c` U32[n], and with names `__name.data` U8 and `__name.offsets` I64[n+1]. Raises FrameError.
    """
    lengths = np.asarray(sizes, dtype=np.int64)
    if lengths.ndim != 1 or (lengths < 0).any() or lengths.sum(dtype=np.float64) > MAX_BODY_BYTES:
        raise FrameError("blob sizes must be 0 bytes or more and together fit into a frame")
    rooms = -(-lengths // BLOB_ALIGNMENT) * BLOB_ALIGNMENT
    starts = np.cumsum(rooms) - rooms
    blobs = int(starts[-1] + lengths[-1]) if lengths.size else 0
    named = _name_arrays(names, lengths.size)
    arrays: dict[str, npt.NDArray[np.int64] | npt.NDArray[np.uint8]] = {
        INDEX: np.stack((starts, lengths), axis=1),
        **named,
    }
    described = [(name, array.dtype, array.shape) for name, array in arrays.items()]
    n = lengths.size
    results = [(BLOBS, "U8", (blobs,)), (STATUS, "U8", (n,)), (CRC, "U32", (n,))]
    frame = frame_layout([*described, *results], metadata, checksums=False)
    first = frame.tensors[BLOBS].offset
    head = bytearray(first)
    head[: len(frame.header)] = frame.header
    for name, array in arrays.items():
        frame.tensors[name].view(head)[...] = array
    places = np.stack((starts + first, lengths), axis=1)
    return SampleLayout(frame, bytes(head), places, first + blobs, frame.size)


def _name_arrays(
    names: Sequence[str] | None, count: int
) -> dict[str, npt.NDArray[np.int64] | npt.NDArray[np.uint8]]:
    if names is None:
        return {}
    if len(names) != count:
        raise FrameError(f"{len(names)} names for {count} blobs")
    encoded = [name.encode() for name in names]
    bounds = np.zeros(count + 1, dtype=np.int64)
    np.cumsum([len(name) for name in encoded], out=bounds[1:])
    return {_NAMES: np.frombuffer(b"".join(encoded), dtype=np.uint8), _NAME_BOUNDS: bounds}


class SampleFrame:
    """A received sample frame: a sequence of blobs, which are views of the underlying buffer."""

    __slots__ = ("_index", "_names", "blobs", "crc32c", "metadata", "status")

    def __init__(self, frame: Buffer) -> None:
        """Raises FrameError unless `frame` is a complete sample frame whose index stays within its blobs."""
        parsed = parse_frame_header(frame)
        arrays = tensor_views(frame, parsed)
        try:
            index, self.blobs = arrays[INDEX], arrays[BLOBS]
            self.status, self.crc32c = arrays[STATUS], arrays[CRC]
        except KeyError as error:
            raise FrameError(f"not a sample frame: it lacks {error}") from error
        self.metadata = parsed.metadata
        self._check(index)
        self._index = index
        self._names = _read_names(arrays, len(index))

    def _check(self, index: npt.NDArray[np.int64]) -> None:
        expected = {"<i8": index, "|u1": self.blobs, "<u4": self.crc32c}
        if any(array.dtype.str != code for code, array in expected.items()) or self.status.dtype != np.uint8:
            raise FrameError("a tensor of the sample frame has the wrong dtype")
        if index.ndim != 2 or index.shape[1] != 2 or self.blobs.ndim != 1:
            raise FrameError("a tensor of the sample frame has the wrong shape")
        if self.status.shape != index.shape[:1] or self.crc32c.shape != index.shape[:1]:
            raise FrameError("the sample frame's index and results differ in length")
        offsets, lengths = index[:, 0], index[:, 1]
        if (offsets < 0).any() or (lengths < 0).any() or (lengths > self.blobs.size - offsets).any():
            raise FrameError("a sample extends beyond the frame's blobs")

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, row: int) -> memoryview:
        """Return the bytes of a blob. Check `status[row]` first: the bytes of a failed one are
        meaningless."""
        offset, length = self._index[row].tolist()
        return self.blobs[offset : offset + length].data

    def __iter__(self) -> Iterator[memoryview]:
        blobs = self.blobs.data
        return (blobs[offset : offset + length] for offset, length in self._index.tolist())

    def name(self, row: int) -> str | None:
        """Return the name of a blob, or None if the frame carries no names."""
        return None if self._names is None else self._names[row]

    def verify(self) -> None:
        """Raise FrameError naming the first blob, not marked failed, whose bytes do not match its crc32c."""
        blobs = self.blobs.data
        rows = zip(self._index.tolist(), self.crc32c.tolist(), self.status.tolist(), strict=True)
        for row, ((offset, length), expected, status) in enumerate(rows):
            if status != Status.FAILED and crc32c(blobs[offset : offset + length]) != expected:
                raise FrameError(f"sample {row} does not match its checksum; fetch the frame again")

    def __repr__(self) -> str:
        failed = int(np.count_nonzero(self.status == Status.FAILED))
        return f"SampleFrame(samples={len(self)}, bytes={self.blobs.size}, failed={failed})"


def _read_names(arrays: Mapping[str, npt.NDArray[Any]], count: int) -> list[str] | None:
    if _NAMES not in arrays:
        return None
    parts = ragged_rows(arrays, "__name")
    if len(parts) != count:
        raise FrameError(f"{len(parts)} names for {count} samples")
    return [bytes(part).decode(errors="replace") for part in parts]


def ragged_rows(arrays: Mapping[str, npt.NDArray[Any]], field: str) -> list[npt.NDArray[Any]]:
    """Return the rows of a ragged field from `FIELD.data` and `FIELD.offsets` (I64[rows+1]) as views.
    Raises FrameError.
    """
    data, offsets = arrays.get(f"{field}.data"), arrays.get(f"{field}.offsets")
    if data is None or offsets is None or data.ndim < 1 or offsets.dtype != np.int64 or offsets.ndim != 1:
        raise FrameError(f"the frame has no ragged field {field[:60]!r}")
    bounds: list[int] = offsets.tolist()
    rising = bool((offsets[1:] >= offsets[:-1]).all())  # compared, not subtracted: differences may overflow
    if not bounds or bounds[0] != 0 or bounds[-1] != len(data) or not rising:
        raise FrameError(f"the offsets of {field[:60]!r} do not cut its data into rows")
    return [data[start:end] for start, end in itertools.pairwise(bounds)]
