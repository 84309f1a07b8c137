"""A rotational drive in virtual time, with a `DiskReader` and other clients that read from it.

Law: one thread, no waiting: time goes on when the reader waits for the drive or for others. What a request
costs is `bench.drive_model`'s, so a test can hold waits against a bound on any machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bench.drive_model import Drive, Geometry, Request
from meshd.batches.read_ahead import disk_reader
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from meshd.batches.read_ahead.disk_reader import DiskReader

SIZE: Final = 8 << 30
REQUEST: Final = 512 << 10
"""Bytes of a request that the kernel can always make: a longer advice becomes one or more of them, as its
pages happen to lie in memory."""
PAGE: Final = 4096
_STEP: Final = 0.0002


@dataclass(slots=True, eq=False)
class Client:
    """Reads `chain` requests of 4 KiB to 1 MiB one after the other at random places, with `gap` seconds
    between them; then pauses. `waits`: the seconds that each chain took; `passed`: the bytes of the reader
    that the drive began to read while one of the requests waited, of each."""

    chain: int
    pause: float
    gap: float = 0.001
    waits: list[float] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    due: float | None = 0.0
    begun: float = 0.0
    step: int = 0


class VirtualDrive(ManualClock):
    """The drive, and the clock that it shares with a reader."""

    def __init__(self, clients: list[Client], seed: int = 0) -> None:
        super().__init__()
        self.clients, self.now = clients, 0.0
        self.drive = Drive.idle(Geometry(SIZE))
        self._random = random.Random(seed)
        self._ends: dict[int, tuple[float | None, Callable[[], None]]] = {}
        self._kept: dict[int, Request] = {}
        self._begun: dict[int, Callable[[], None]] = {}  # called when the drive takes the request
        self._own: dict[int, int] = {}  # requests of the reader that wait, and their bytes
        self._taken = 0  # bytes of those that the drive has begun
        self._cached = bytearray(SIZE // PAGE)  # pages of the reader's files that have been read

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        """Stand for the event on which the reader pauses."""
        self.go_on(self.now + seconds)

    def attach(self, reader: DiskReader, patch: pytest.MonkeyPatch, base: int = 1 << 30) -> None:
        """Let the reader, whose files begin at `base` bytes, read from this drive."""

        def begin(read: disk_reader._Read, advice_bytes: int) -> None:
            end = read.offset + read.length
            for place in range(read.offset, end, advice_bytes):
                self._advise(base, place, min(advice_bytes, end - place))

        def finish(read: disk_reader._Read, buffer: Any) -> int:
            while 0 in self._pages(read.offset, read.length):
                self.go_on(self.now + _STEP)
            return read.length

        patch.setattr(disk_reader, "is_cached", lambda *_: False)
        patch.setattr(disk_reader, "cached_pages", lambda _, *place: self._pages(*place))
        patch.setattr(disk_reader, "reads_in_flight", lambda _: len(self._ends))
        patch.setattr(disk_reader._Read, "begin", begin)
        patch.setattr(disk_reader._Read, "finish", finish)
        patch.setattr(reader, "_pause", self)
        patch.setattr(reader, "_request_bytes", REQUEST)

    def _pages(self, offset: int, length: int) -> bytes:
        return bytes(self._cached[offset // PAGE : -(-(offset + length) // PAGE)])

    def _advise(self, base: int, offset: int, length: int) -> None:
        """Queue the requests that the kernel makes of one advice."""
        while length:
            size = min(length, self._random.choice((REQUEST, 2 * REQUEST)))
            pages = slice(offset // PAGE, -(-(offset + size) // PAGE))

            def ended(pages: slice = pages) -> None:
                self._cached[pages] = b"\1" * (pages.stop - pages.start)

            number = self.submit(base + offset, size, ended)
            self._own[number] = size
            offset, length = offset + size, length - size

    def submit(self, offset: int, length: int, on_end: Callable[[], None]) -> int:
        """Queue a request; returns its number."""
        request = Request(offset, length, self.now)
        self.drive.submit(request)
        self._ends[id(request)], self._kept[id(request)] = (None, on_end), request
        return id(request)

    def go_on(self, until: float) -> None:
        """Let the drive and the clients do what they do until then."""
        while (event := self._next_event()) is not None and event[0] <= until:
            self.now = max(self.now, event[0])
            event[1]()
        self.now = max(self.now, until)

    def _next_event(self) -> tuple[float, Callable[[], None]] | None:
        found: list[tuple[float, Callable[[], None]]] = []
        if (decides := self.drive.decides_at()) is not None:
            found.append((decides, self._start))
        for number, (end, _) in self._ends.items():
            if end is not None:
                found.append((end, partial(self._end, number)))
        for client in self.clients:
            if client.due is not None:
                found.append((client.due, partial(self._read, client)))
        return min(found, key=lambda event: event[0], default=None)

    def _start(self) -> None:
        if (taken := self.drive.start_next(self.now + 1e-9)) is not None:
            request, end = taken
            self._taken += self._own.pop(id(request), 0)
            self._begun.pop(id(request), lambda: None)()
            self._ends[id(request)] = (end, self._ends[id(request)][1])

    def _end(self, number: int) -> None:
        self._kept.pop(number)
        self._ends.pop(number)[1]()

    def _read(self, client: Client) -> None:
        client.due, client.step = None, client.step + 1
        if client.step == 1:
            client.begun = self.now

        def ended() -> None:
            if client.step < client.chain:
                client.due = self.now + client.gap
                return
            client.waits.append(self.now - client.begun)
            client.step, client.due = 0, self.now + client.pause

        length = 4096 if client.step < client.chain else self._random.choice((128 << 10, 1 << 20))
        taken = self._taken
        number = self.submit(self._random.randrange(SIZE - length) // PAGE * PAGE, length, ended)
        self._begun[number] = lambda: client.passed.append(self._taken - taken)
