"""Extent reader: open data files, checked reads, and spans for sendfile.

Law: a file that a reader has opened stays readable until the reader releases it, whatever is deleted in
between. Segments stay open in a bounded cache; files of large objects are opened once per read.
Invariant: a descriptor is closed exactly when it is neither cached nor in use.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from awscrt import checksums

from meshd.store.engine.group_commit import store_error_from
from meshd.store.errors import CorruptExtentError, ExtentGoneError, QuarantinedError, StoreError
from meshd.store.integrity.quarantine import require_not_quarantined
from meshd.store.integrity.verification import report_damage
from meshd.store.records import Location, Span
from meshd.telemetry import metrics
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.store.disks.layout import Disks
    from meshd.store.index.index import Index
    from meshd.store.records import Extent, Record

_log = logging.getLogger(__name__)
_OPEN_FILES = 256
_SWEEP_EVERY = 64


class _Handle:
    __slots__ = ("cached", "fd", "uses")

    def __init__(self, fd: int) -> None:
        self.fd, self.uses, self.cached = fd, 0, False


def split_range(extents: Sequence[Extent], offset: int, length: int) -> list[tuple[Extent, int, int]]:
    """Returns (extent, offset in the extent, length) for `length` bytes from `offset` of the object."""
    pieces = []
    for extent in extents:
        if length <= 0:
            break
        if offset >= extent.length:
            offset -= extent.length
            continue
        taken = min(length, extent.length - offset)
        pieces.append((extent, offset, taken))
        offset, length = 0, length - taken
    return pieces


class ExtentReader:
    """Reads extents. Used by one thread (the event loop)."""

    def __init__(self, disks: Disks, *, small: int) -> None:
        self._disks, self._small = disks, small
        self._cache: OrderedDict[int, _Handle] = OrderedDict()
        self._opened = 0

    def __repr__(self) -> str:
        return f"<ExtentReader cached={len(self._cache)}>"

    @contextmanager
    def open_spans(self, record: Record, offset: int, length: int) -> Iterator[list[Span]]:
        """See ObjectStore.open_spans."""
        handles: list[_Handle] = []
        require_not_quarantined(record)
        try:
            spans = []
            for extent, start, taken in split_range(record.extents, offset, length):
                handle = self._acquire(extent)
                handles.append(handle)
                spans.append(Span(handle.fd, extent.offset + start, taken, extent))
            yield spans
        finally:
            for handle in handles:
                self._release(handle)

    @contextmanager
    def open_spans_many(self, wanted: Sequence[tuple[Record, int, int]]) -> Iterator[list[list[Span] | None]]:
        """See ObjectStore.open_spans_many."""
        handles: list[_Handle] = []
        try:
            yield [self._spans_or_none(*each, handles) for each in wanted]
        finally:
            for handle in handles:
                self._release(handle)

    def _spans_or_none(
        self, record: Record, offset: int, length: int, handles: list[_Handle]
    ) -> list[Span] | None:
        extents = record.extents
        try:
            require_not_quarantined(record)
            if len(extents) == 1 and offset + length <= extents[0].length:
                handle = self._acquire(extents[0])
                handles.append(handle)
                return [Span(handle.fd, extents[0].offset + offset, length, extents[0])]
            spans = []
            for extent, start, taken in split_range(extents, offset, length):
                handle = self._acquire(extent)
                handles.append(handle)
                spans.append(Span(handle.fd, extent.offset + start, taken, extent))
        except QuarantinedError:  # logged when it was put there
            return None
        except (StoreError, OSError):
            _log.warning("cannot open the bytes of an object", exc_info=True)
            return None
        return spans

    def read_range(self, record: Record, offset: int, length: int) -> bytes:
        """See ObjectStore.read_range."""
        require_not_quarantined(record)
        pieces = [
            self._pread(extent, start, taken)
            for extent, start, taken in split_range(record.extents, offset, length)
        ]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def try_read_range(self, record: Record, offset: int, length: int) -> bytes | None:
        """See ObjectStore.try_read_range."""
        if len(record.extents) != 1 or record.broken:
            return None
        extent = record.extents[0]
        handle = self._acquire(extent)
        data = bytearray(length)
        try:
            got = os.preadv(handle.fd, (data,), extent.offset + offset, os.RWF_NOWAIT)
        except OSError:  # not cached, or not supported, or a disk error: `read_range` reports the last
            return None
        finally:
            self._release(handle)
        if got != length:
            return None
        self._check(extent, data, length)
        return bytes(data)

    def try_open_span(self, record: Record, offset: int, length: int) -> Span | None:
        """See ObjectStore.try_open_span."""
        if len(record.extents) != 1 or record.broken:
            return None
        extent = record.extents[0]
        handle = self._acquire(extent)
        self._release(handle)  # a cached handle is not closed before the event loop runs again
        return Span(handle.fd, extent.offset + offset, length, extent) if handle.cached else None

    def read_extent(self, extent: Extent) -> bytes:
        """Reads and verifies all bytes of one extent. Raises the same errors as `read_range`."""
        return self._pread(extent, 0, extent.length)

    def _pread(self, extent: Extent, start: int, taken: int) -> bytes:
        handle = self._acquire(extent)
        try:
            failpoints.hit("store.read.before")
            data = os.pread(handle.fd, taken, extent.offset + start)
        except OSError as error:
            report_damage(extent)
            raise store_error_from(error) from error
        finally:
            self._release(handle)
        self._check(extent, data, taken)
        return data

    def _check(self, extent: Extent, data: bytes | bytearray, taken: int) -> None:
        whole = taken == extent.length
        if len(data) == taken and (not whole or checksums.crc32c(data) == extent.crc32c):
            return
        metrics.store_corrupt_reads.inc()
        report_damage(extent)
        path = self._disks.path(extent.disk, extent.file)
        raise CorruptExtentError(
            f"{taken} bytes at {extent.offset} of {path} do not match their checksum; "
            "run meshd fsck and restore the object"
        )

    def locate(self, record: Record) -> list[Location]:
        """See ObjectStore.locate."""
        require_not_quarantined(record)
        path = self._disks.path
        extents = [e for e in record.extents if e.length]
        if self._disks.lost and any(extent.disk in self._disks.lost for extent in extents):
            raise _lost_disk_error()
        return [Location(path(e.disk, e.file), e.offset, e.length, e.crc32c) for e in extents]

    def _acquire(self, extent: Extent) -> _Handle:
        handle = self._cache.get(extent.file)
        if handle is None:
            handle = self._open(extent)
        else:
            self._cache.move_to_end(extent.file)
        handle.uses += 1
        return handle

    def _open(self, extent: Extent) -> _Handle:
        try:
            handle = _Handle(os.open(self._disks.path(extent.disk, extent.file), os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError as error:
            if not self._disks.is_present(extent.disk):
                raise _lost_disk_error() from error
            raise ExtentGoneError(
                "the data file was removed or moved during the read; look the object up again"
            ) from error
        except OSError as error:
            raise store_error_from(error) from error
        if extent.length <= self._small:
            handle.cached = True
            self._cache[extent.file] = handle
            self._trim()
        return handle

    def _trim(self) -> None:
        self._opened += 1
        if self._opened % _SWEEP_EVERY == 0:
            self.forget_deleted()
        while len(self._cache) > _OPEN_FILES:
            self._drop(next(iter(self._cache)))

    def _drop(self, file: int) -> None:
        handle = self._cache.pop(file)
        handle.cached = False
        if handle.uses == 0:
            os.close(handle.fd)

    def _release(self, handle: _Handle) -> None:
        handle.uses -= 1
        if handle.uses == 0 and not handle.cached:
            os.close(handle.fd)

    def forget_deleted(self) -> None:
        """Closes cached files that were deleted, so that their space is freed."""
        for file in [file for file, handle in self._cache.items() if os.fstat(handle.fd).st_nlink == 0]:
            self._drop(file)

    def close(self) -> None:
        """Drops the cache. Open spans keep their files."""
        for file in list(self._cache):
            self._drop(file)


def _lost_disk_error() -> QuarantinedError:
    return QuarantinedError("the disk with these bytes is lost: another node restores them if it has a copy")


def read_segment_extents(disks: Disks, index: Index, record: Record) -> dict[Extent, bytes]:
    """Returns the bytes of those extents of a record that are in segments, not in files of their own
    (blocking)."""
    # Caches nothing: the shared reader belongs to the event loop's thread.
    reader = ExtentReader(disks, small=-1)
    with index.read_transaction() as txn:
        files = {extent.file: index.files.get_file(txn, extent.file) for extent in record.extents}
    own = {file for file, info in files.items() if info is not None and info.kind == "own"}
    return {extent: reader.read_extent(extent) for extent in record.extents if extent.file not in own}
