"""Moves bytes between two sockets inside the kernel: splice(2) through a pipe.

It runs in the callbacks of both sockets, without a task; the slower side sets the pace. `done` is called
once; then the pipe is empty or the transfer has failed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.rpc.peer_client import PeerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

_PIPE: Final = 1 << 20  # requested size; the system may grant less
_TURN: Final = 4 << 20  # bytes before other connections get their turn
_GATHERED: Final = 128 << 10
_KEPT: Final = 32  # pipes kept for reuse
_IDLE_SECONDS: Final = 120.0  # without a byte moved
_FLAGS: Final = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK


class _Pipe:
    """An empty pipe."""

    _kept: Final[list[_Pipe]] = []

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.size = fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE)
        except OSError:
            self.size = fcntl.fcntl(self.writer, fcntl.F_GETPIPE_SZ)

    def __repr__(self) -> str:
        return f"<_Pipe of {self.size} bytes>"

    @classmethod
    def take(cls) -> _Pipe:
        """Return a kept pipe or a new one. Raises OSError."""
        return cls._kept.pop() if cls._kept else cls()

    def give_back(self, *, empty: bool) -> None:
        if empty and len(self._kept) < _KEPT:
            self._kept.append(self)
            return
        os.close(self.reader)
        os.close(self.writer)


class Splice:
    """Moves `left` bytes from `source` to `drain`, non-blocking sockets that the loop does not watch; both
    stay open. `moved` is called when bytes were sent, `done` at the end with the error, if any:
    PeerUnreachableError or OSError (TimeoutError: no byte for minutes)."""

    def __init__(
        self,
        source: socket.socket,
        drain: socket.socket,
        left: int,
        moved: Callable[[], None],
        done: Callable[[Exception | None], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._in, self._out = source, drain
        self._left, self._held, self._passed = left, 0, 0
        self._moved, self._done = moved, done
        self._reading = self._writing = self._closed = False
        self._least = 1
        self._seen = -1
        self._pipe = _Pipe.take()
        self._again: asyncio.Handle | None = None
        self._watchdog: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Splice, {self._passed} bytes passed, {self._left} to come, {self._held} held>"

    @property
    def bytes_sent(self) -> int:
        """Bytes that were sent."""
        return self._passed

    def start(self) -> None:
        self._look()
        self._step()

    def close(self) -> None:
        """Stop. Idempotent; `done` is not called any more."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        for handle in (self._again, self._watchdog):
            if handle is not None:
                handle.cancel()
        self._ask_for(1)
        self._pipe.give_back(empty=not self._held)

    def _step(self) -> None:
        """Move as much as possible now."""
        if self._closed:
            return
        turn = self._passed + _TURN
        try:
            while self._left or self._held:
                came = self._fill()
                if self._held:
                    if not self._empty():
                        self._watch(reading=False)
                        return
                elif not came:
                    self._ask_for(min(self._left, _GATHERED))
                    self._watch(reading=True)
                    return
                if self._passed >= turn:
                    self._unwatch()
                    self._again = self._loop.call_soon(self._step)
                    return
        except (PeerUnreachableError, OSError) as error:
            self._end(error)
        else:
            self._end(None)

    def _fill(self) -> int:
        room = min(self._left, self._pipe.size - self._held)
        if not room:
            return 0
        try:
            taken = os.splice(self._in.fileno(), self._pipe.writer, room, flags=_FLAGS)
        except BlockingIOError:
            return 0
        if not taken:
            raise PeerUnreachableError("a node closed the connection in the middle of a response", begun=True)
        self._left -= taken
        self._held += taken
        return taken

    def _empty(self) -> int:
        flags = _FLAGS | (os.SPLICE_F_MORE if self._left else 0)
        try:
            given = os.splice(self._pipe.reader, self._out.fileno(), self._held, flags=flags)
        except BlockingIOError:
            return 0
        self._held -= given
        self._passed += given
        self._moved()
        return given

    def _ask_for(self, least: int) -> None:
        """Make the source readable only when `least` bytes have arrived."""
        if least != self._least:
            self._least = least
            with suppress(OSError):
                self._in.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _watch(self, *, reading: bool) -> None:
        if reading != self._reading:
            if reading:
                self._loop.add_reader(self._in, self._step)
            else:
                self._loop.remove_reader(self._in)
            self._reading = reading
        if reading == self._writing:
            if reading:
                self._loop.remove_writer(self._out)
            else:
                self._loop.add_writer(self._out, self._step)
            self._writing = not reading

    def _unwatch(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._in)
        if self._writing:
            self._loop.remove_writer(self._out)
        self._reading = self._writing = False

    def _look(self) -> None:
        """Fail if nothing was moved since the last check."""
        if self._passed == self._seen:
            self._end(TimeoutError(f"no byte of a response moved for {_IDLE_SECONDS:.0f} seconds"))
            return
        self._seen = self._passed
        self._watchdog = self._loop.call_later(_IDLE_SECONDS, self._look)

    def _end(self, error: Exception | None) -> None:
        if not self._closed:
            self.close()
            self._done(error)
