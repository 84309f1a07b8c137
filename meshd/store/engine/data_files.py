"""Data files: append-only segments for small objects, and one tar file per large object.

Law: one thread of one process appends to a segment. Its bytes count only after the index has committed
the segment's end; a failed group or a crash leaves a tail that is cut off. A large object's file is a
draft until `publish`; the next start of its writer removes drafts. All calls block: they run in I/O
threads. The only module of the store that uses ctypes: early writeback is a hint like preallocation, and
where the kernel or the file system lacks them, nothing breaks.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from awscrt import checksums

from meshd.store.engine.member_header import RESERVE
from meshd.store.engine.packs import Pack
from meshd.telemetry import metrics
from meshd.util import failpoints
from meshd.util.disk_space import reserve_space
from meshd.util.durable_directories import sync_directory
from meshwire.formats import tar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshd.store.disks.layout import Disks
    from meshd.store.writer_api import Buffer

_libc = ctypes.CDLL(None, use_errno=True)
_IOV_MAX = 1000
_LARGEST = 1 << 20  # per call: a call of 8 MiB was measured to cost eight times as much per byte
_WRITE = 2
_WAIT = 1 | 2 | 4
RUN_BYTES: Final = 64 << 20
"""Disk space that a segment on a rotational disk reserves at a time: writers that write at the same time do
not get every other piece of it, so that a segment is read with few seeks."""
_FREE_SHARE: Final = 16
"""At most one in so many bytes of the free space is reserved at a time."""
_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""Errors of writing pages out. Others say that the file system lacks the call."""

try:
    _sync_file_range = _libc.sync_file_range
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
except AttributeError:  # pragma: no cover - a libc without these calls
    _sync_file_range = None  # type: ignore[assignment]  # absent: the hint is skipped


class Segment:
    """An open segment: bytes up to `end` are committed, and the next member goes to `tail`."""

    def __init__(
        self,
        disks: Disks,
        disk: int,
        file: int,
        end: int | None = None,
        framing: int = 0,
        *,
        in_runs: bool = False,
    ) -> None:
        """Creates a new file, or continues one at its committed `end`, with `framing` as in its DataFile.
        `in_runs`: reserves space. Raises OSError."""
        self.disk, self.file = disk, file
        self._directory = disks.directory(disk, file)
        self.path = disks.path(disk, file)
        create = os.O_CREAT | os.O_EXCL if end is None else 0
        self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | create, 0o644)
        self.end = self.tail = end or 0
        self._in_runs, self._reserved = in_runs, 0
        self.framing, self.pending_framing = framing, 0
        self._pending: list[Buffer] = []
        self._pack: Pack | None = None
        self._named = end is not None
        if end is not None:  # cuts off what a crash left behind the committed end
            os.ftruncate(self._fd, end)

    def __repr__(self) -> str:
        return f"<Segment {self.path} end={self.end} tail={self.tail}>"

    def append(self, header: bytes, chunks: Sequence[Buffer], size: int) -> int:
        """Queues a member behind the others; returns the offset of its data. Performs no I/O."""
        data = self.tail + len(header)
        self._pending.append(header)
        self._pending.extend(chunks)
        fill = tar.padding(size)
        if fill:
            self._pending.append(bytes(fill))
        self.tail = data + size + fill
        return data

    def next_start(self, *, packed: bool) -> int:
        """Returns where the header of the next member begins. Ends the pack unless that is an entry of it."""
        if self._pack is not None and (not packed or self._pack.is_full(self.tail)):
            self._finish_pack()
        return self.tail + (tar.BLOCK if packed and self._pack is None else 0)

    def append_entry(self, header: bytes, chunks: Sequence[Buffer], size: int, modified: int) -> int:
        """Queues an entry of a pack behind the others; returns the offset of its data. `modified` is in ms
        since the epoch."""
        if self._pack is None:
            self._pack = Pack(self.tail)
            self._pending.append(self._pack.header)
            self.tail += tar.BLOCK
        self._pack.add(header, self.tail, modified)
        self._pending += [header, *chunks]
        data = self.tail + len(header)
        self.tail = data + size
        return data

    def _finish_pack(self) -> None:
        pack, self._pack = self._pack, None
        if pack is not None:
            rest, framing = pack.finish(self.tail)
            self._pending.append(rest)
            self.tail += len(rest)
            self.pending_framing += framing

    def patch_header(self, offset: int, data: bytes) -> None:
        """Overwrites header bytes of a member that is not committed; pending members are written first.
        Raises OSError."""
        self.write_pending()
        os.pwrite(self._fd, data, offset)

    def write_pending(self) -> None:
        """Writes the pending members. Raises OSError; then call `truncate_uncommitted`."""
        self._finish_pack()
        if self._pending:
            failpoints.hit("store.data.before_write")
            start = self.tail - sum(map(len, self._pending))
            self._reserve_run()
            _write_all(self._fd, self._pending, start)
            self._pending = []
            failpoints.hit("store.data.after_write")

    def _reserve_run(self) -> None:
        """Reserves the space up to the tail, and a run behind it, if the disk has plenty. Cutting off the
        file frees it."""
        if not self._in_runs or self.tail <= self._reserved:
            return
        found = os.fstatvfs(self._fd)
        self._reserved = self.tail + min(RUN_BYTES, found.f_bavail * found.f_frsize // _FREE_SHARE)
        with suppress(OSError):  # it is full: the write says so
            reserve_space(self._fd, 0, self._reserved)

    def sync(self) -> None:
        """Makes written bytes durable. Raises OSError; then call `truncate_uncommitted`."""
        failpoints.hit("store.data.before_sync")
        os.fdatasync(self._fd)
        failpoints.hit("store.data.after_sync")
        if not self._named:  # a new file also needs its directory entry to be durable
            sync_directory(self._directory)
            self._named = True

    def mark_committed(self) -> None:
        """Marks everything up to the tail as committed in the index."""
        self.end = self.tail
        self.framing, self.pending_framing = self.framing + self.pending_framing, 0

    def truncate_uncommitted(self) -> None:
        """Discards and cuts off everything that was not committed."""
        self._pending, self._pack, self.pending_framing = [], None, 0
        self.tail, self._reserved = self.end, 0
        os.ftruncate(self._fd, self.end)

    def seal(self, durable: bool) -> None:
        """Writes the tar end mark and closes the file."""
        self.truncate_uncommitted()
        os.pwrite(self._fd, tar.END, self.end)
        if durable:
            os.fdatasync(self._fd)
        self.close()

    def close(self) -> None:
        os.close(self._fd)


_log = logging.getLogger(__name__)
_WINDOW = 8 << 20  # dirty bytes that a draft may collect before the kernel is asked to write them out


class LargeObjectFile:
    """A large object's file: a draft until `publish`. `size` counts its data bytes so far, `crc` is their
    crc32c.

    If `eager`, the kernel starts writing pages out early; otherwise only when the file is finished, so that a
    file that is not kept costs the disk nothing.
    """

    def __init__(self, disks: Disks, disk: int, file: int, writer: str) -> None:
        self.disk, self.file = disk, file
        self._directory = disks.directory(disk, file)
        self._draft = disks.draft_path(disk, file, writer)
        self.path = disks.path(disk, file)
        self._fd = os.open(self._draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.size = self.crc = 0
        self._asked = 0
        self._published = False
        self.eager = True

    def __repr__(self) -> str:
        return f"<LargeObjectFile {self.path if self._published else self._draft} size={self.size}>"

    def reserve(self, size: int) -> None:
        """Reserves disk space for `size` bytes of data. Raises OSError if there is none."""
        reserve_space(self._fd, 0, RESERVE + size + tar.padding(size) + len(tar.END))

    def append(self, chunks: Sequence[Buffer]) -> None:
        """Writes the next bytes and limits the dirty pages of this file."""
        for chunk in chunks:
            self.crc = checksums.crc32c(chunk, self.crc)
        failpoints.hit("store.own.before_write")
        self.size += _write_all(self._fd, chunks, RESERVE + self.size)
        window = self.size - self._asked
        if self.eager and window >= _WINDOW:
            _start_writeback(self._fd, RESERVE + self._asked, window)
            if self._asked >= _WINDOW:
                _finish_writeback(self._fd, RESERVE + self._asked - _WINDOW)
            self._asked = self.size

    def write_trailer(self) -> None:
        """Writes the padding and the tar end mark."""
        if not self.eager:
            _start_writeback(self._fd, RESERVE, self.size)
        _write_all(self._fd, [bytes(tar.padding(self.size)) + tar.END], RESERVE + self.size)

    def duplicate_fd(self) -> tuple[int, int]:
        """Returns a duplicate descriptor for a reader that follows the growing file, and the offset of the
        data."""
        return os.dup(self._fd), RESERVE

    def sync(self) -> None:
        """Makes the data durable."""
        failpoints.hit("store.own.before_sync")
        os.fdatasync(self._fd)

    def publish(self, header: bytes, durable: bool) -> None:
        """Writes the header and renames the draft to its final path; durable when this returns, if asked
        for."""
        os.pwrite(self._fd, header, 0)
        if durable:  # before the rename: a named file must never have a torn header
            os.fdatasync(self._fd)
        failpoints.hit("store.own.before_rename")
        os.rename(self._draft, self.path)
        self._published = True
        if durable:
            sync_directory(self._directory)
        failpoints.hit("store.own.after_rename")

    def unpublish(self) -> None:
        """Makes the file a draft again, before the index knows it. Raises OSError."""
        os.rename(self.path, self._draft)
        self._published = False

    def patch_header(self, offset: int, data: bytes) -> None:
        """Overwrites header bytes before the index knows the file, durably."""
        os.pwrite(self._fd, data, offset)
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Closes a published file. A close error is only logged: a durable file was synced before.
        Idempotent."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.close(fd)  # the descriptor is invalid afterwards even if this fails
            failpoints.hit("store.own.after_close")
        except OSError as error:
            metrics.store_disk_errors.labels("failed").inc()
            _log.warning("closing a data file failed", extra={"path": self.path, "why": str(error)})

    def discard_draft(self) -> None:
        """Removes the file if it was never published. Idempotent."""
        if not self._published:
            self.discard()

    def discard(self) -> None:
        """Removes the file in any state. Idempotent."""
        if self._fd < 0:
            return
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path if self._published else self._draft)


# system calls that `os` lacks, and writes of whole buffer lists -------------------------------------------


def _start_writeback(fd: int, offset: int, length: int) -> None:
    """Asks the kernel to start writing these pages out; returns at once."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _WRITE)


def _finish_writeback(fd: int, offset: int) -> None:
    """Waits until the window at `offset` is written out. That does not make it durable: only fdatasync does.
    But it reports pages that could not be written, and a later fdatasync of `fd` does not report them again.

    Raises OSError.
    """
    if _sync_file_range is not None and _sync_file_range(fd, offset, _WINDOW, _WAIT):
        number = ctypes.get_errno()
        if number in _LOST:
            raise OSError(number, os.strerror(number))


def _pieces(buffer: Buffer) -> Iterable[Buffer]:
    if len(buffer) <= _LARGEST:
        return (buffer,)
    view = memoryview(buffer)
    return (view[start : start + _LARGEST] for start in range(0, len(view), _LARGEST))


def _batches(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    batch: list[Buffer] = []
    size = 0
    for buffer in buffers:
        for piece in _pieces(buffer):
            if batch and (size + len(piece) > _LARGEST or len(batch) == _IOV_MAX):
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += len(piece)
    if batch:
        yield batch


def _write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Writes all buffers with pwritev, up to 1 MiB per call; returns the number of bytes."""
    total = 0
    for batch in _batches(buffers):
        wanted = sum(map(len, batch))
        written = os.pwritev(fd, batch, offset + total)
        if written < wanted:
            rest = b"".join(batch)
            while written < wanted:
                written += os.pwrite(fd, rest[written:], offset + total + written)
        total += wanted
    return total
