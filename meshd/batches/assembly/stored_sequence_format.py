"""Format of stored sequences: chunks with the elements of consecutive samples, and an index at the end.

Law: a chunk is a function of the inner plan, the packed fields and its number; reading any bytes returns the
elements that were stored or raises ChunkError. A chunk is one object. Layout: the elements of all samples,
field by field; the index, a column document with the lengths and a crc32c for each block; the size of the
index (uint32, little endian), magic.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from awscrt.checksums import crc32c

from meshwire.frame.columns import ColumnError, ColumnReader, ColumnWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from meshd.core.plan_record import Plan
    from meshwire.frame.columns import Integers

BAD: Final = -1
"""Length of a sample that cannot be rendered."""
PART: Final = 16_384
"""Samples of a part; a chunk does not extend beyond its part."""
CHUNK_SOURCE_BYTES: Final = 16 << 20
"""Source bytes after which a chunk ends; a larger sample has a chunk of its own."""
BLOCK_BYTES: Final = 16 << 10
"""Bytes that one checksum covers: what is read and verified for one piece, at least."""
_KIND, _VERSION = "shardmesh.sequences", 1
_END: Final = struct.Struct("<I8s")
_MAGIC: Final = b"mesh-seq"
_MAX_INDEX: Final = 64 << 20
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
END_BYTES: Final = _END.size


class ChunkError(Exception):
    """The bytes are not the requested chunk, or are damaged."""


def chunk_starts(source_bytes: Integers) -> Integers:
    """Return the first sample of each chunk, and the number of samples at the end: int64[chunks + 1].

    `source_bytes`: int64[n], the stored bytes of each sample.
    """
    count = source_bytes.size
    before = np.cumsum(source_bytes) - source_bytes
    parts = np.arange(count) // PART
    before -= before[parts * PART] if count else 0
    stretch = before // CHUNK_SOURCE_BYTES
    begins = np.ones(count, np.bool_)
    begins[1:] = (stretch[1:] != stretch[:-1]) | (parts[1:] != parts[:-1])
    return np.append(np.flatnonzero(begins), count).astype(np.int64)


class SequenceSet(msgspec.Struct, frozen=True, eq=False):
    """The sequences of one inner plan. `starts`: int64[chunks + 1], first samples; `prefix`: of the keys of
    its chunks; `share`: of the chunks that are stored, 0…1.
    """

    plan: Plan
    fields: tuple[str, ...]
    starts: Integers
    prefix: str
    share: float

    def chunks_of(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the chunk of each sample."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def samples_in(self, chunk: int) -> range:
        """Return the samples of a chunk."""
        return range(int(self.starts[chunk]), int(self.starts[chunk + 1]))

    def key(self, chunk: int) -> str:
        """Return the key of a chunk in the reserved bucket."""
        return f"{self.prefix}{chunk:08x}"

    def is_stored(self, chunk: int) -> bool:
        """Return whether the chunk belongs to the share that is stored."""
        mixed = (chunk + 1) * _MIX & _MASK
        return mixed < self.share * (_MASK + 1)


def encode_chunk(lengths: Integers, columns: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Encode a chunk. `lengths`: int64[n], BAD for bad samples; `columns`: the elements of all samples, by
    field.
    """
    data = b"".join(np.ascontiguousarray(column).tobytes() for column in columns.values())
    view = memoryview(data)
    sums = [crc32c(view[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES)]
    writer = ColumnWriter(
        _KIND,
        _VERSION,
        {"fields": ",".join(columns), "dtypes": ",".join(c.dtype.name for c in columns.values())},
    )
    writer.add_integers("lengths", lengths - BAD)
    writer.add_integers("sums", np.array(sums, np.int64))
    index = writer.to_bytes()
    return data + index + _END.pack(len(index), _MAGIC)


class ChunkIndex(msgspec.Struct, frozen=True, eq=False):
    """The index of a chunk. `starts`: int64[n + 1], elements before each sample; `bases`: the byte at which
    each field begins; `size`: bytes of all elements.
    """

    lengths: Integers
    starts: Integers
    dtypes: tuple[str, ...]
    bases: tuple[int, ...]
    sums: tuple[int, ...]
    size: int

    def read_piece(
        self, field: int, place: int, begin: int, length: int, read: Callable[[int, int], bytes]
    ) -> npt.NDArray[Any] | None:
        """Return elements [begin, begin + length) of a field of the sample at `place` in the chunk; None if
        it has fewer. `read` returns bytes by (offset, length). Raises ChunkError.
        """
        if int(self.lengths[place]) < begin + length:
            return None
        dtype = np.dtype(self.dtypes[field])
        start = self.bases[field] + (int(self.starts[place]) + begin) * dtype.itemsize
        end = start + length * dtype.itemsize
        first, last = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        origin = first * BLOCK_BYTES
        data = memoryview(read(origin, min(last * BLOCK_BYTES, self.size) - origin))
        for number in range(first, last):
            at = number * BLOCK_BYTES - origin
            if crc32c(data[at : at + BLOCK_BYTES]) != self.sums[number]:
                raise ChunkError(f"block {number} fails its checksum")
        return np.frombuffer(data[start - origin : end - origin], dtype)

    def block_ranges(
        self, field: int, places: Integers, begins: Integers, lengths: Integers
    ) -> tuple[Integers, Integers]:
        """Return the offsets and lengths of the bytes that `read_piece` reads for many pieces: int64[n] each,
        at most; of a piece that its sample does not have, nothing is read."""
        there = self.lengths[places] >= begins + lengths
        places, begins, lengths = places[there], begins[there], lengths[there]
        width = np.dtype(self.dtypes[field]).itemsize
        starts = self.bases[field] + (self.starts[places] + begins) * width
        firsts = starts // BLOCK_BYTES * BLOCK_BYTES
        ends = np.minimum(-(-(starts + lengths * width) // BLOCK_BYTES) * BLOCK_BYTES, self.size)
        return firsts, ends - firsts


def index_span(end: bytes, size: int) -> tuple[int, int]:
    """Return (offset, length) of the index of a chunk of `size` bytes, from its last END_BYTES.

    Raises ChunkError.
    """
    if len(end) != END_BYTES:
        raise ChunkError("too short for a chunk")
    length, magic = _END.unpack(end)
    if magic != _MAGIC or not 0 < length <= min(_MAX_INDEX, size - END_BYTES):
        raise ChunkError("not a chunk")
    return size - END_BYTES - length, length


def decode_index(document: bytes, size: int, count: int, fields: Sequence[str]) -> ChunkIndex:
    """Return the index of a chunk of `count` samples whose elements have `size` bytes. Raises ChunkError."""
    try:
        reader = ColumnReader(document, _KIND, _VERSION)
        lengths = reader.read_integers("lengths", low=0, high=1 << 40, count=count) + BAD
        sums = reader.read_integers("sums", low=0, high=(1 << 32) - 1, count=-(-size // BLOCK_BYTES))
        dtypes = tuple(reader.read_text("dtypes").split(","))
        named = reader.read_text("fields")
    except ColumnError as error:
        raise ChunkError(str(error)) from error
    if named != ",".join(fields) or len(dtypes) != len(fields):
        raise ChunkError("the chunk of other fields")
    starts = np.concatenate(([0], np.cumsum(np.maximum(lengths, 0)))).astype(np.int64)
    sizes = [int(starts[-1]) * np.dtype(dtype).itemsize for dtype in dtypes]
    if sum(sizes) != size:
        raise ChunkError("the lengths of its samples do not add up to its size")
    bases = tuple(sum(sizes[:number]) for number in range(len(sizes)))
    return ChunkIndex(lengths, starts, dtypes, bases, tuple(sums.tolist()), size)
