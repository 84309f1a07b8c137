"""Cold reads: bytes of large responses that are not in memory, read from rotational disks in long turns.

Law: a disk has one arm. The responses that read from it take turns of several MiB, so that the arm moves once
a turn, and not once for each window that is sent. No byte is read outside of the ranges that were asked for,
and at most one and a half turns ahead of a client; nothing more for a client that has left.

One thread per disk and process reads into the page cache, always with the next read queued behind the one in
progress. A read that fails is reported to its response, after the bytes before it.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.store.disks.disk_type import advice_limit
from meshd.telemetry import metrics
from meshd.util.page_cache import missing_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from meshd.store.disks.disk_type import RotationalDisks
    from meshd.store.records import Span

TURN_BYTES: Final = 8 << 20
"""The longest turn: 42 ms of media time after a seek of 12 ms."""
MIN_TURN_BYTES: Final = 1 << 20
ROW_BYTES: Final = 2 * TURN_BYTES
"""Bytes of turns that continue one another, after which the oldest of the others is next."""
FIRST_BYTES: Final = 8 << 20
"""Bytes of all first turns that wait: with several clients at once, each first turn is shorter."""
FIRST_AHEAD: Final = 8
"""A first turn, whose client has no byte yet, is taken before so many other turns that came before it."""
READ_BYTES: Final = 1 << 20
"""One read: other readers of the disk wait for two of these."""
QUEUED_READS: Final = 1
"""Reads that are queued at the disk behind the one in progress."""


class ColdReader:
    """Reads for all responses of a process. Use on one event loop only; `aclose` at the end.

    `budget`: bytes of page cache for what was read and is not sent yet, of all responses.
    """

    def __init__(self, disks: RotationalDisks, budget: int) -> None:
        self._rotational, self._budget = disks, budget
        self._disks: dict[int, _Disk] = {}
        self._reads: set[ColdRead] = set()

    def __repr__(self) -> str:
        return f"<ColdReader, {len(self._reads)} reads of {len(self._disks)} disks>"

    def begin(self, spans: Sequence[Span], position: int = 0) -> ColdRead | None:
        """Begin to read a body from byte `position` on; None if that byte is not on a rotational disk, or so
        little is left that it takes one read. Call `close` of what is returned before the files are closed.

        `spans`: the whole body. Raises OSError.
        """
        span = _span_at(spans, position)
        if span is None or sum(each.length for each in spans) - position <= READ_BYTES:
            return None
        status = os.fstat(span.fd)
        if not self._rotational.includes(status.st_dev):
            return None
        file = status.st_dev, status.st_ino
        alone = all(each.file != file for each in self._reads)
        read = ColdRead(self, spans, position, file, first=alone)
        self._reads.add(read)
        return read

    async def aclose(self) -> None:
        """End the threads; reads that still wait fail."""
        for read in list(self._reads):
            read.close()
        disks, self._disks = list(self._disks.values()), {}
        await asyncio.gather(*(asyncio.to_thread(disk.close) for disk in disks))

    def turn_bytes(self) -> int:
        """Return the size of a turn: a response has one and a half in memory at most."""
        share = self._budget * 2 // (3 * max(1, len(self._reads)))
        return max(MIN_TURN_BYTES, min(TURN_BYTES, share))

    def ended(self, read: ColdRead) -> None:
        """Forget a read."""
        self._reads.discard(read)

    def submit(self, turn: _Turn, device: int) -> None:
        """Let a turn wait for its disk."""
        disk = self._disks.get(device)
        if disk is None:
            disk = self._disks[device] = _Disk(device)
        disk.submit(turn)


class ColdRead:
    """One response's reads. `fetched`: the bytes from the beginning of the body that were read into the page
    cache, in so far as they were not there; all before the position where it began count. `file`: its device
    and inode, where it began. `first`: nothing else of that file is read, such as other parts for the same
    client. Positions are bytes of the body."""

    def __init__(
        self, reader: ColdReader, spans: Sequence[Span], position: int, file: tuple[int, int], *, first: bool
    ) -> None:
        self._reader, self._spans = reader, spans
        self._size = sum(span.length for span in spans)
        self._loop = asyncio.get_running_loop()
        self.fetched = self._position = self._began = position
        self._turns: deque[_Turn] = deque()  # at most two: one that is read, and the next
        self._error: OSError | None = None
        self._then: Callable[[OSError | None], None] | None = None
        self.file, self._is_first, self._closed = file, first, False

    def __repr__(self) -> str:
        return f"<ColdRead {self.fetched} of {self._size} bytes>"

    def fetch(self, position: int, then: Callable[[OSError | None], None]) -> None:
        """Call `then` once the byte at `position` has been read, or with the error of the disk.

        A position before `fetched` is read again: the kernel has taken the page away.
        """
        again = position < self.fetched
        if again:
            self._drop_turns()
            self.fetched = position
        self._position, self._then = position, then
        self._plan(again=again)
        self._tell()

    async def until(self, position: int) -> None:
        """Wait until the bytes before `position` have been read. Raises OSError."""
        while self.fetched < position:
            if self._closed:
                raise OSError("the read was ended")
            done = self._loop.create_future()
            self.fetch(self.fetched, partial(_settle, done))
            await done

    def advance(self, position: int) -> None:
        """Note that the bytes before `position` were sent: so much more may be read."""
        self._position = position
        self._plan()

    def close(self) -> None:
        """End: nothing more is read for this response. Idempotent."""
        self._closed = True
        self._drop_turns()
        self._reader.ended(self)
        then, self._then = self._then, None
        if then is not None:
            then(OSError("the read was ended"))

    def _drop_turns(self) -> None:
        for turn in self._turns:
            turn.cancelled = True
        self._turns.clear()

    def _plan(self, *, again: bool = False) -> None:
        """Queue the next turn, if the client has received enough of what was read."""
        if self._closed or self._error is not None or len(self._turns) > 1:
            return
        most = self._reader.turn_bytes()
        start = self._turns[-1].end if self._turns else self.fetched
        if start >= self._size or start - self._position > most // 2:
            return
        turn = _Turn(self, start, self._is_first)
        try:
            device = turn.take(self._spans, most)
            if not again and not self._turns and start > self._began and turn.is_cached():
                self.fetched = turn.end
                turn.close_files()
                return
        except OSError as error:
            turn.close_files()
            self._error = error
            return
        self._is_first = False
        self._turns.append(turn)
        self._reader.submit(turn, device)

    def progressed(self, turn: _Turn, reached: int, error: OSError | None) -> None:
        """Note what a turn has read; called in the event loop."""
        if turn.cancelled or self._closed:
            return
        turn.reached, turn.error = (reached, None) if error is None else (turn.reached, error)
        while self._turns:
            first = self._turns[0]
            self.fetched, self._error = first.reached, first.error
            if first.error is not None:
                self._drop_turns()
            elif first.reached == first.end:
                self._turns.popleft()
                continue
            break
        self._plan()
        self._tell()

    def post(self, turn: _Turn, reached: int, error: OSError | None) -> None:
        """Have `progressed` called; may be called from any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.progressed, turn, reached, error)

    def _tell(self) -> None:
        if self._then is not None and (self.fetched > self._position or self._error is not None):
            then, self._then = self._then, None
            then(None if self.fetched > self._position else self._error)


def _settle(done: asyncio.Future[None], error: OSError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


def _span_at(spans: Sequence[Span], position: int) -> Span | None:
    """Return the rest of the span that has this byte of the body; None at its end."""
    for span in spans:
        if position < span.length:
            return span.sub_span(position, span.length - position)
        position -= span.length
    return None


class _Part(msgspec.Struct, frozen=True):
    """Bytes of a file that a turn reads; `fd` is the turn's own."""

    fd: int
    offset: int
    length: int


class _Turn:
    """The bytes from `start` to `end` of a body, which are read one after the other. `place`: the file
    (inode) and offset where they begin; `reached`: the bytes before it have been read."""

    def __init__(self, read: ColdRead, start: int, first: bool) -> None:
        self.read, self.start, self.first = read, start, first
        self.end = self.reached = start
        self.error: OSError | None = None
        self.cancelled = self.failed = False
        self.number = 0
        self.place = (0, 0)
        self._parts: list[_Part] = []

    def __repr__(self) -> str:
        return f"<_Turn {self.start} to {self.end} of {self.read!r}>"

    def take(self, spans: Sequence[Span], most: int) -> int:
        """Take at most `most` bytes of the body, all on one device, and return the device. Raises OSError."""
        device, at = -1, self.start
        while self.end - self.start < most:
            span = _span_at(spans, at)
            if span is None:
                break
            status = os.fstat(span.fd)
            if device not in (-1, status.st_dev):
                break
            if device == -1:
                device, self.place = status.st_dev, (status.st_ino, span.offset)
            length = min(span.length, most - (self.end - self.start))
            self._parts.append(_Part(os.dup(span.fd), span.offset, length))
            self.end = at = at + length
        return device

    def is_cached(self) -> bool:
        """Whether nothing has to be read. Raises OSError."""
        return not any(missing_bytes(part.fd, part.offset, part.length) for part in self._parts)

    def shorten(self, most: int) -> None:
        """Leave out what is beyond `most` bytes."""
        self.end = min(self.end, self.start + most)

    def reads(self) -> Iterator[_Read]:
        """Yield the reads in order, until it is cancelled; the last one may have no bytes."""
        at = self.start
        for part in self._parts:
            offset, end = part.offset, part.offset + part.length
            while offset < end and at < self.end:
                if self.cancelled or self.failed:
                    yield _Read(self, part.fd, offset, 0, at, last=True)
                    return
                size = min(READ_BYTES, end - offset, self.end - at)
                at += size
                yield _Read(self, part.fd, offset, size, at, last=at == self.end)
                offset += size

    def close_files(self) -> None:
        """Close its files."""
        parts, self._parts = self._parts, []
        for part in parts:
            os.close(part.fd)


class _Read(msgspec.Struct, frozen=True):
    """A read of a file, in bytes; after it, the body has been read to `reached`."""

    turn: _Turn
    fd: int
    offset: int
    length: int
    reached: int
    last: bool


class _Disk:
    """One disk and its thread."""

    def __init__(self, device: int) -> None:
        self._advice_bytes = advice_limit(device)
        self._changed = threading.Condition()
        self._waiting: list[_Turn] = []
        self._numbers = itertools.count()
        self._closed = False
        self._arm = (0, 0)  # the file and the offset where the last turn ended
        self._row = 0  # bytes of the turns that continued one another
        self._buffer = mmap.mmap(-1, READ_BYTES)
        name = f"cold-reads-{os.major(device)}:{os.minor(device)}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<_Disk {self._thread.name}, {len(self._waiting)} turns wait>"

    def submit(self, turn: _Turn) -> None:
        """Let a turn wait."""
        with self._changed:
            turn.number = next(self._numbers) - (FIRST_AHEAD if turn.first else 0)
            self._waiting.append(turn)
            self._changed.notify()

    def close(self) -> None:
        """End the thread after the reads in progress (blocking)."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._buffer.close()

    def _serve(self) -> None:
        begun: deque[_Read] = deque()
        reads: Iterator[_Read] = iter(())
        while True:
            read = next(reads, None)
            if read is None:
                turn = self._next_turn(wait=not begun)
                if turn is not None:
                    reads = turn.reads()
                    continue
                if not begun:
                    return
            else:
                self._begin(read)
                begun.append(read)
            if read is None or len(begun) > QUEUED_READS:
                self._finish(begun.popleft())

    def _next_turn(self, *, wait: bool) -> _Turn | None:
        """Take the next turn. None if none waits and `wait` is false, or when the disk is closed."""
        with self._changed:
            while True:
                for turn in [each for each in self._waiting if each.cancelled or self._closed]:
                    turn.close_files()
                    self._waiting.remove(turn)
                if self._waiting:
                    return self._choose()
                if self._closed or not wait:
                    return None
                self._changed.wait()

    def _choose(self) -> _Turn:
        """Take the turn that continues where the arm is, for a while, and unless a client waits for its first
        byte; otherwise the oldest."""
        waiting, arm = self._waiting, self._arm
        turn = next((each for each in waiting if each.place == arm), None)
        if turn is None or self._row >= ROW_BYTES or any(each.first for each in waiting):
            turn, self._row = min(waiting, key=lambda each: each.number), 0
        if turn.place != arm:
            metrics.cold_read_seeks.inc()
        if turn.first:
            turn.shorten(max(MIN_TURN_BYTES, FIRST_BYTES // sum(each.first for each in waiting)))
        waiting.remove(turn)
        self._row += turn.end - turn.start
        return turn

    def _begin(self, read: _Read) -> None:
        """Queue a read at the disk."""
        with suppress(OSError):
            for place in range(read.offset, read.offset + read.length, self._advice_bytes):
                size = min(self._advice_bytes, read.offset + read.length - place)
                os.posix_fadvise(read.fd, place, size, os.POSIX_FADV_WILLNEED)
        if read.last:
            with suppress(OSError):
                self._arm = os.fstat(read.fd).st_ino, read.offset + read.length

    def _finish(self, read: _Read) -> None:
        """Wait for a read, and tell."""
        turn, error = read.turn, None
        if not (turn.cancelled or turn.failed):
            try:
                done = os.preadv(read.fd, [memoryview(self._buffer)[: read.length]], read.offset)
                metrics.cold_read_bytes.inc(done)
            except OSError as failure:
                error, turn.failed = failure, True
            turn.read.post(turn, read.reached, error)
        if read.last:
            turn.close_files()
