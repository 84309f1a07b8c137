"""Format of an entry of the decoded cache: a header with checksums, then the bytes of one value.

Law: a value is returned only if the header names the table and sample that were asked for, and every block
that is read has the header's crc32c. Little-endian; the body begins at a multiple of 64 bytes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from awscrt.checksums import crc32c

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK_BYTES: Final = 64 << 10
"""Bytes of the body that one checksum covers."""
MAX_BODY_BYTES: Final = 64 << 20
"""Larger values are not kept."""
ALIGNMENT: Final = 64
_MAGIC: Final = b"mesh-dc1"
_MAX_DIMENSIONS: Final = 4
# magic, crc32c of what follows; table, sample, bytes of the body; dtype, dimensions and their extents; the
# size in pixels of the image that a window is drawn from, and whether it scales
_FIELDS: Final = struct.Struct("<8sI4xQqq8sB3x4qIIB7x")
_CHECKED_FROM: Final = 16


class EntryError(Exception):
    """The bytes are not the entry that was asked for, or are damaged."""


class EntryHeader(NamedTuple):
    """Describes one value. `dtype` is empty for bytes. `image`: (height, width, scales) of the image that the
    value was decoded from, in pixels, if windows are drawn from it.
    """

    table: int
    sample: int
    dtype: str
    shape: tuple[int, ...]
    image: tuple[int, int, bool]
    body_bytes: int
    sums: tuple[int, ...]

    @property
    def size(self) -> int:
        """The bytes of the header, up to the body."""
        return header_bytes(self.body_bytes)


def header_bytes(body_bytes: int) -> int:
    """Return the size of the header of a body of this size."""
    plain = _FIELDS.size + 4 * -(-body_bytes // BLOCK_BYTES)
    return -(-plain // ALIGNMENT) * ALIGNMENT


def can_keep(value: Any) -> bool:
    """Return whether a value can be an entry: bytes or an array, not too large."""
    if isinstance(value, np.ndarray):
        plain = value.dtype.kind in "biuf" and len(value.dtype.str) <= 8
        return plain and value.ndim <= _MAX_DIMENSIONS and 0 < value.nbytes <= MAX_BODY_BYTES
    return isinstance(value, bytes) and 0 < len(value) <= MAX_BODY_BYTES


def encode_entry(
    table: int, sample: int, value: bytes | npt.NDArray[Any], image: tuple[int, int, bool] = (0, 0, False)
) -> tuple[bytes, memoryview]:
    """Return (header, body) of a value for which `can_keep` is true."""
    if isinstance(value, bytes):
        dtype, shape, body = "", (len(value),), memoryview(value)
    else:
        dtype, shape = value.dtype.str, value.shape
        body = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    starts = range(0, len(body), BLOCK_BYTES)
    sums = [crc32c(body[start : start + BLOCK_BYTES]) for start in starts]
    extents = (*shape, *(0,) * (_MAX_DIMENSIONS - len(shape)))
    fields = _FIELDS.pack(_MAGIC, 0, table, sample, len(body), dtype.encode(), len(shape), *extents, *image)
    checked = fields[_CHECKED_FROM:] + struct.pack(f"<{len(sums)}I", *sums)
    head = _MAGIC + struct.pack("<I4x", crc32c(checked)) + checked
    return head.ljust(header_bytes(len(body)), b"\0"), body


def decode_header(data: bytes | memoryview, table: int, sample: int, length: int) -> EntryHeader:
    """Return the header at the beginning of `data`, of an entry of `length` bytes in all.

    Raises EntryError if it is damaged, or of another sample or table.
    """
    if len(data) < _FIELDS.size:
        raise EntryError("too few bytes for a header")
    magic, checksum, found_table, found_sample, body, dtype, dimensions, *rest = _FIELDS.unpack_from(data)
    blocks = -(-body // BLOCK_BYTES) if 0 < body <= MAX_BODY_BYTES else 0
    end = _FIELDS.size + 4 * blocks
    if magic != _MAGIC or not blocks or end > len(data):
        raise EntryError("not a header")
    if crc32c(memoryview(data)[_CHECKED_FROM:end]) != checksum:
        raise EntryError("the header fails its checksum")
    if (found_table, found_sample) != (table, sample) or header_bytes(body) + body != length:
        raise EntryError("the entry of another sample")
    sums = struct.unpack_from(f"<{blocks}I", data, _FIELDS.size)
    height, width, scales = rest[_MAX_DIMENSIONS:]
    name = dtype.rstrip(b"\0").decode()
    return EntryHeader(
        table, sample, name, tuple(rest[:dimensions]), (height, width, bool(scales)), body, sums
    )


def check_blocks(header: EntryHeader, first: int, data: memoryview) -> None:
    """Verify the blocks from number `first` on, which `data` holds. Raises EntryError."""
    for number, start in enumerate(range(0, len(data), BLOCK_BYTES), first):
        if crc32c(data[start : start + BLOCK_BYTES]) != header.sums[number]:
            raise EntryError(f"block {number} fails its checksum")


def decode_value(header: EntryHeader, body: npt.NDArray[np.uint8]) -> bytes | npt.NDArray[Any]:
    """Return the value of a whole, verified body."""
    if not header.dtype:
        return body.tobytes()
    return body.view(header.dtype).reshape(header.shape)
