"""DiskReader: one thread per disk, which reads one window after the other into the page cache.

Law: a disk has one arm, so one read at a time; windows that a batch waits for go first. Cached bytes are not
read again. A failed read is left to the reader of the bytes, which reports it.

A disk serves requests in one direction: if the next read of a window is queued whenever one completes, other
reads may wait until the end of the window. So at intervals nothing is queued until those have completed.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import mmap
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.batches.read_ahead.extents import READ_BYTES
from meshd.batches.read_ahead.read_cost import MEDIA_RATE
from meshd.store.disks.disk_type import advice_limit, reads_in_flight, request_limit
from meshd.telemetry import metrics
from meshd.telemetry.training_metrics import record_reading_ahead
from meshd.util.page_cache import cached_pages, is_cached, open_for_reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from meshd.batches.read_ahead.extents import Reads
    from meshd.util.clock import Clock

QUEUED_READS: Final = 1
"""Reads that are queued at the disk behind the one in progress."""
OTHERS_SECONDS: Final = 0.03
"""The longest wait for the reads of others at a time."""
OWN_SHARE: Final = 2 / 5
"""A window has so much of the disk's time at least, however many others read."""
CREDIT_SECONDS: Final = 0.03
"""Media time that counts for that share: of a disk that others left alone, one chain of their reads is
served at once, each after one read of the window."""
SHORT_BYTES: Final = 256 << 10
"""The size of a read while others read, 1.3 ms of media time: they wait for two of the window's at most."""
RECENT_SECONDS: Final = 0.25
"""How long after a read of others."""
NEXT_SECONDS: Final = 0.003
"""How long the disk is kept free for the next read of somebody whose read has ended."""
_POLL_SECONDS: Final = 0.0005
_COLD_SECONDS: Final = 0.001
"""Looking up a file that takes longer has waited for the disk."""
_INODES_AT_A_TIME: Final = 16
"""As many requests as help a disk to find a short way; it is asked for 32 at a time at most."""
_INODES: Final = 256  # after so many, whether the window is still wanted
_TELL_SECONDS: Final = 0.02
"""Seconds between two reports of a window's progress."""
_log = logging.getLogger("meshd.read_ahead")


@dataclass(slots=True, eq=False)
class DiskWork:
    """The reads of a window on one disk, `device`. `paths`: the files by number; `urgent`: a batch waits for
    it; `background`: read behind all others; `plan`: for whose batches, "" for none; `finished`: how many
    reads, from the first on, have ended. The disk's thread calls `on_progress` when that has grown, and
    `on_done` when the last read has ended, or `cancelled` was set."""

    device: int
    paths: Sequence[str]
    reads: Reads
    on_done: Callable[[], None]
    urgent: bool = False
    background: bool = False
    plan: str = ""
    on_progress: Callable[[], None] = lambda: None
    cancelled: bool = False
    begun: bool = field(default=False, init=False)
    finished: int = field(default=0, init=False)

    @property
    def rank(self) -> int:
        """Works of a lower rank are read first."""
        return 0 if self.urgent else 2 if self.background else 1


class DiskReader:
    """Reads ahead from the disk `device` (`st_dev`). `submit` and `prioritize` may be called from any
    thread."""

    def __init__(self, device: int, clock: Clock) -> None:
        name = f"{os.major(device)}:{os.minor(device)}"
        self._device, self._clock = device, clock
        self._request_bytes = min(advice_limit(device), request_limit(device))
        self._queue: list[tuple[int, int, DiskWork]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._pause = threading.Event()  # never set
        self._others_at = -RECENT_SECONDS  # when others were last seen to read
        self._buffer = mmap.mmap(-1, READ_BYTES)
        self._thread = threading.Thread(target=self._run, name=f"read-ahead-{name}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<DiskReader {self._thread.name}, {len(self._queue)} windows queued>"

    def submit(self, work: DiskWork) -> None:
        """Queue the reads of a window."""
        with self._changed:
            heapq.heappush(self._queue, (work.rank, next(self._number), work))
            self._changed.notify()

    def prioritize(self, work: DiskWork) -> None:
        """Move a window, which a batch waits for, before those that no batch waits for."""
        with self._changed:
            if not work.urgent and not work.begun:
                work.urgent = True
                self._queue = [(each.rank, number, each) for _, number, each in self._queue]
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
        reads, done, seeks, credit = work.reads, 0, 0, CREDIT_SECONDS
        began, arm = self._clock.monotonic(), (-1, -1)  # file and offset where the last read ended
        ahead, told = deque[_Read](), began
        files: deque[int] = deque()  # open descriptors in order; only the last few have reads in progress
        self._read_inodes(work)
        try:
            for read in self._missing(work, files):
                if credit > 0 and ahead and self._others_read(ahead):
                    while ahead:
                        done += ahead.popleft().finish(self._buffer)
                    credit -= self._let_others_read() * OWN_SHARE / (1 - OWN_SHARE)
                credit = min(CREDIT_SECONDS, credit + read.length / MEDIA_RATE)
                ahead.append(read)
                read.begin(self._request_bytes)
                if len(ahead) > QUEUED_READS:
                    first = ahead.popleft()
                    done += first.finish(self._buffer)
                    work.finished = first.number + first.last
                    if (now := self._clock.monotonic()) > told + _TELL_SECONDS:
                        told = now
                        work.on_progress()
                while len(files) > QUEUED_READS + 2:
                    os.close(files.popleft())
                seeks += arm != (read.fd, read.offset)
                arm = read.fd, read.offset + read.length
            while ahead:
                done += ahead.popleft().finish(self._buffer)
        finally:
            while files:
                os.close(files.popleft())
            metrics.read_ahead_seeks.inc(seeks)
        metrics.read_ahead_bytes.labels("read").inc(done)
        metrics.read_ahead_bytes.labels("cached").inc(reads.bytes - done)
        seconds = self._clock.monotonic() - began if done else 0.0
        metrics.read_ahead_seconds.inc(seconds)
        if work.plan:
            record_reading_ahead(work.plan, seeks, seconds)

    def _read_inodes(self, work: DiskWork) -> None:
        """Have the kernel read the inodes and folders of all files, not each between the bytes of two files.
        From the first cold one on, several at a time, so that the disk takes them in its own order."""
        left = iter(work.paths)
        for path in left:
            if work.cancelled or self._closed:
                return
            began = self._clock.monotonic()
            _read_inode(path)
            if self._clock.monotonic() - began > _COLD_SECONDS:
                break
        with ThreadPoolExecutor(_INODES_AT_A_TIME, "read-inodes") as pool:
            while some := list(itertools.islice(left, _INODES)):
                if work.cancelled or self._closed:
                    return
                list(pool.map(_read_inode, some))

    def _others_read(self, ahead: Iterable[_Read]) -> bool:
        """Return whether the disk has reads to do that are not those of `ahead`.

        Their requests are counted first: one that ends in between may hide a read of others until the next
        look, and nothing else is taken for one.
        """
        own = sum(read.requests_left(self._request_bytes) for read in ahead)
        return reads_in_flight(self._device) > own

    def _let_others_read(self) -> float:
        """Wait, with nothing of this reader queued, until the disk has no reads of others to do; return the
        seconds.

        Nor any that come right after them: the bytes of a file are asked for when its inode and its map of
        extents are there, and would else wait for another read of the window each time.
        """
        began = now = idle = self._clock.monotonic()
        end = now + OTHERS_SECONDS
        while now < end and not self._closed:
            if reads_in_flight(self._device):
                idle = self._others_at = now
            elif now - idle >= NEXT_SECONDS:
                break
            self._pause.wait(_POLL_SECONDS)
            now = self._clock.monotonic()
        return now - began

    def _missing(self, work: DiskWork, files: deque[int]) -> Iterator[_Read]:
        """Yield the reads whose bytes are not cached; appends the descriptors of their files to `files`."""
        reads, fd, opened = work.reads, -1, -1
        table = zip(reads.files.tolist(), reads.offsets.tolist(), reads.lengths.tolist(), strict=True)
        for number, (file, offset, length) in enumerate(table):
            if work.cancelled or self._closed:
                break
            if file != opened:
                if fd >= 0 and (not files or files[-1] != fd):  # nothing of it was missing
                    os.close(fd)
                fd, opened = open_for_reading(work.paths[file]), file
            if fd >= 0 and not is_cached(fd, offset, length):
                if not files or files[-1] != fd:
                    files.append(fd)
                end, now = offset + length, self._clock.monotonic
                while offset < end:
                    others = now() < self._others_at + RECENT_SECONDS
                    size = min(SHORT_BYTES if others else READ_BYTES, end - offset)
                    yield _Read(fd, offset, size, number, last=offset + size == end)
                    offset += size
        if fd >= 0 and (not files or files[-1] != fd):
            os.close(fd)


class _Read(msgspec.Struct, frozen=True):
    """A read of a file, in bytes, or a part of it; its number in the window, and whether it is its `last`
    part."""

    fd: int
    offset: int
    length: int
    number: int
    last: bool = True

    def begin(self, request_bytes: int) -> None:
        """Queue the whole read at the disk, so that the disk always has the next one. `request_bytes`: the
        kernel makes one request of so many.

        A part that was left out would be read after the beginning of the next read, which costs two seeks.
        """
        with suppress(OSError):
            for place in range(self.offset, self.offset + self.length, request_bytes):
                size = min(request_bytes, self.offset + self.length - place)
                os.posix_fadvise(self.fd, place, size, os.POSIX_FADV_WILLNEED)

    def requests_left(self, request_bytes: int) -> int:
        """Return how many of the requests of `begin` the disk has not finished."""
        try:
            pages = cached_pages(self.fd, self.offset, self.length)
        except OSError:
            return -(-self.length // request_bytes)
        step = request_bytes // mmap.PAGESIZE
        return sum(not pages[min(first + step, len(pages)) - 1] for first in range(0, len(pages), step))

    def finish(self, buffer: mmap.mmap) -> int:
        """Wait for the bytes; returns their number. The reader of these bytes reports an error."""
        with suppress(OSError):
            return os.preadv(self.fd, [memoryview(buffer)[: self.length]], self.offset)
        return 0


def _read_inode(path: str) -> None:
    with suppress(OSError):
        os.stat(path)
