"""Segment files of the decoded cache, as a transform process appends to them and reads them.

Law: one process appends to a segment, and never again after a failed write. A read that fails, for whatever
reason, raises EntryError, so that the caller computes the value instead.

Pages are written into disk space that was reserved for many entries at once: a write of 560 kB takes 77 µs of
processor time instead of 117 on ext4, which otherwise reserves the blocks of each page.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshd.transform.decoded_cache.entry_format import (
    ALIGNMENT,
    BLOCK_BYTES,
    EntryError,
    check_blocks,
    decode_header,
    decode_value,
    encode_entry,
)
from meshd.util import failpoints
from meshd.util.disk_space import reserve_space

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.decoded_cache.entry_format import EntryHeader

_HEAD_BYTES: Final = 4096
"""Bytes that the header of nearly every entry fits in."""
_OPEN_FILES: Final = 64
_RESERVED_BYTES: Final = 8 << 20
"""Disk space that is reserved for a segment at a time."""


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class SegmentFiles:
    """Open segments by path; closes the least recently used first. Not thread-safe."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._ends: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Where the next entry of a segment goes, and the end of its reserved space."""
        self._from_disk, self._disk_reads = True, -1

    def __repr__(self) -> str:
        return f"<SegmentFiles {len(self._open)} open>"

    def append(
        self,
        path: str,
        table: int,
        sample: int,
        value: bytes | npt.NDArray[Any],
        image: tuple[int, int, bool] = (0, 0, False),
        capacity: int = 0,
    ) -> tuple[int, int]:
        """Append an entry to a segment that only this process writes. Returns its (offset, length) in bytes.

        `capacity`: bytes that the segment may grow to, of which some are reserved. Raises OSError; the
        segment must not be used afterwards.
        """
        head, body = encode_entry(table, sample, value, image)
        failpoints.hit("decoded_cache.append")
        fd, length = self._descriptor(path), len(head) + len(body)
        start, reserved = self._ends.get(path) or (_align(os.fstat(fd).st_size), 0)
        if start + length > reserved:
            reserved = max(start + length, min(capacity, start + _RESERVED_BYTES))
            reserve_space(fd, start, reserved - start)
        written = os.pwritev(fd, (head, body), start)
        while written < length:
            rest = body[written - len(head) :] if written >= len(head) else head[written:] + bytes(body)
            more = os.pwrite(fd, rest, start + written)
            if not more:
                raise OSError("the segment takes no more bytes")
            written += more
        self._ends[path] = _align(start + length), reserved
        self._ends.move_to_end(path)
        if len(self._ends) > _OPEN_FILES:
            self._ends.popitem(last=False)
        return start, length

    def read_value(
        self, path: str, table: int, sample: int, offset: int, length: int
    ) -> bytes | npt.NDArray[Any]:
        """Return the value of an entry. Raises EntryError."""
        data = self._read(path, offset, length)
        header = decode_header(data.data, table, sample, length)
        body = data[header.size :]
        check_blocks(header, 0, body.data)
        return decode_value(header, body)

    def read_header(self, path: str, table: int, sample: int, offset: int, length: int) -> EntryHeader:
        """Return the header of an entry. Raises EntryError."""
        try:
            data = self._read(path, offset, min(length, _HEAD_BYTES))
            return decode_header(data.data, table, sample, length)
        except EntryError:
            if length <= _HEAD_BYTES:
                raise
        return decode_header(self._read(path, offset, length).data, table, sample, length)

    def read_rows(
        self, path: str, header: EntryHeader, offset: int, first: int, end: int
    ) -> tuple[npt.NDArray[Any], int]:
        """Return (rows first…end of an array, bytes read). Raises EntryError."""
        itemsize = np.dtype(header.dtype).itemsize
        stride = header.body_bytes // header.shape[0]
        start, stop = first * stride, min(end * stride, header.body_bytes)
        block, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        at, until = block * BLOCK_BYTES, min(last * BLOCK_BYTES, header.body_bytes)
        data = self._read(path, offset + header.size + at, until - at)
        check_blocks(header, block, data.data)
        rows = data[start - at : stop - at]
        if itemsize > 1 and (start - at) % itemsize:
            rows = rows.copy()
        return rows.view(header.dtype).reshape(-1, *header.shape[1:]), until - at

    def _read(self, path: str, offset: int, length: int) -> npt.NDArray[np.uint8]:
        made = np.empty(length, np.uint8)
        try:
            failpoints.hit("decoded_cache.read")
            read = os.preadv(self._descriptor(path), (made.data,), offset)
            while 0 < read < length:
                more = os.preadv(self._descriptor(path), (made.data[read:],), offset + read)
                if not more:
                    break
                read += more
        except OSError as error:
            raise EntryError(f"cannot read it: {error.strerror or error}") from error
        if read != length:
            raise EntryError("it was dropped")
        return made

    def _descriptor(self, path: str) -> int:
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        fd = self._open[path] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if len(self._open) > _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return fd

    def begin_slice(self) -> None:
        """Note that a slice of rows begins. While the reads of this thread come from memory, none are made
        ahead: the kernel would look up each page of them."""
        before, self._disk_reads = self._disk_reads, resource.getrusage(resource.RUSAGE_THREAD).ru_inblock
        self._from_disk = before != self._disk_reads

    def readahead(self, path: str, offset: int, length: int) -> None:
        """Let the kernel read bytes ahead that are needed soon, if they may be on the disk alone."""
        if not self._from_disk:
            return
        with suppress(OSError):
            os.posix_fadvise(self._descriptor(path), offset, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close every file."""
        while self._open:
            os.close(self._open.popitem()[1])
