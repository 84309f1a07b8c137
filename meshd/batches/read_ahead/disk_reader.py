"""DiskReader: one thread per disk, which issues the reads of one window after the other into the page cache.

Law: one disk has one arm, so one read at a time; windows that a batch waits for go first. Bytes that are
cached already are not read again. A read that fails is left to the reader of the bytes, which reports it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import mmap
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshd.batches.read_ahead.extents import READ_BYTES
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.batches.read_ahead.extents import Reads
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.read_ahead")
_PROBE_BYTES: Final = 64 << 10
"""Distance of the pages that are probed in the page cache before a read."""


@dataclass(slots=True, eq=False)
class DiskWork:
    """The reads of a window on one disk, `device`. `paths`: the files by number. The disk's thread calls
    `on_done` when the last read has ended, or `cancelled` was set."""

    device: int
    paths: Sequence[str]
    reads: Reads
    on_done: Callable[[], None]
    urgent: bool = False
    cancelled: bool = False
    begun: bool = field(default=False, init=False)


class DiskReader:
    """Reads ahead from one disk. `submit` and `prioritize` may be called from any thread."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._clock = clock
        self._queue: list[tuple[bool, int, DiskWork]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._buffer = mmap.mmap(-1, READ_BYTES)
        self._thread = threading.Thread(target=self._run, name=f"read-ahead-{name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<DiskReader {self._thread.name}, {len(self._queue)} windows queued>"

    def submit(self, work: DiskWork) -> None:
        """Queue the reads of a window."""
        with self._changed:
            heapq.heappush(self._queue, (not work.urgent, next(self._number), work))
            self._changed.notify()

    def prioritize(self, work: DiskWork) -> None:
        """Move a window, which a batch waits for, before those that no batch waits for."""
        with self._changed:
            if not work.urgent and not work.begun:
                work.urgent = True
                self._queue = [(not each.urgent, number, each) for _, number, each in self._queue]
                heapq.heapify(self._queue)

    def close(self) -> None:
        """End the thread after the read in progress; windows that are not read are dropped."""
        with self._changed:
            self._closed = True
            for _, _, work in self._queue:
                work.cancelled = True
            self._changed.notify()
        self._thread.join()
        self._buffer.close()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                self._read_window(work)
            except Exception:
                _log.exception("reads ahead of a window failed")
            work.on_done()

    def _next(self) -> DiskWork | None:
        with self._changed:
            while not self._queue and not self._closed:
                self._changed.wait()
            if not self._queue:
                return None
            work = heapq.heappop(self._queue)[2]
            work.begun = True
            return work

    def _read_window(self, work: DiskWork) -> None:
        reads, fd, opened = work.reads, -1, -1
        done = skipped = seeks = 0
        arm, began = (-1, -1), self._clock.monotonic()  # where the last read ended
        try:
            for file, offset, length in zip(
                reads.files.tolist(), reads.offsets.tolist(), reads.lengths.tolist(), strict=True
            ):
                if work.cancelled or self._closed:
                    break
                if file != opened:
                    if fd >= 0:
                        os.close(fd)
                    fd, opened = open_for_reading(work.paths[file]), file
                if fd < 0:
                    continue
                if is_cached(fd, offset, length):
                    skipped += length
                    continue
                seeks += arm != (file, offset)
                arm = file, offset + length
                with suppress(OSError):  # the reader of these bytes reports the error
                    done += os.preadv(fd, [memoryview(self._buffer)[:length]], offset)
        finally:
            if fd >= 0:
                os.close(fd)
            metrics.read_ahead_bytes.labels("read").inc(done)
            metrics.read_ahead_bytes.labels("cached").inc(skipped)
            metrics.read_ahead_seeks.inc(seeks)
            if done:
                metrics.read_ahead_seconds.inc(self._clock.monotonic() - began)


def open_for_reading(path: str) -> int:
    """Return a descriptor for reads without the kernel's own read-ahead; −1 if the file cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # compacted or removed since the lookup
        return -1
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Return whether the page cache seems to have these bytes: their first, their last, and one in each 64
    KiB between them are there."""
    byte = bytearray(1)
    try:
        for place in (*range(offset, offset + length, _PROBE_BYTES), offset + length - 1):
            os.preadv(fd, [byte], place, os.RWF_NOWAIT)
    except OSError:  # BlockingIOError: not cached; others: the file system cannot tell
        return False
    return True
