"""Frames ahead of need: one thread asks, receives into the arena and puts in order; the consumer takes.

Law: what the thread does is the reader's; here it is started, asked, and ended.
Invariant: after `close` no thread or socket of a delivery remains; an abandoned one closes itself.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshsdk import endings
from meshsdk.errors import ClosedError
from meshsdk.readers import Reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.arenas import Arena
    from meshsdk.frames import Frame
    from meshsdk.meters import Tally
    from meshsdk.parts import Parts
    from meshsdk.transport import Request, Transport


@dataclass(frozen=True, slots=True)
class Order:
    """What to deliver: `ask(step)` for each of `steps`, an ascending range of any stride. `expected` bytes a
    frame if known beforehand, else 0. `verify`: whether checksums are compared of what was sent, or of "all":
    what is taken over as sealed memory, too. `named`: the step its frame says it is of. `parts`: how frames
    may be asked for in parts.
    """

    ask: Callable[[int], Request]
    steps: range
    expected: int = 0
    verify: Literal[True, False, "all"] = True
    connections: int = 4
    deadline: float = 600.0
    named: Callable[[int], int] = operator.index
    parts: Parts | None = None


def _shut(reader: Reader, thread: threading.Thread, pid: int) -> None:
    """Ends the thread; in a forked child there is none, and its sockets are the parent's."""
    if pid != os.getpid():
        reader.waker.close()
        return
    reader.closing = True
    reader.waker.wake()
    reader.flights.abort()
    if thread is not threading.current_thread():  # garbage may be collected on the reader itself
        thread.join()
    reader.waker.close()
    reader.out.put(ClosedError("this pass over the loader is closed: iterate the loader again"))


class Delivery:
    """A running delivery of `order.steps`; `take` once a step. One consumer at a time."""

    def __init__(self, transport: Transport, order: Order, arena: Arena) -> None:
        self._reader = reader = Reader(transport, order, arena)
        self._arena = arena
        self._pid = os.getpid()
        arena.on_return = reader.waker.wake
        # The thread knows the reader, not this object: an abandoned delivery is collected, and shuts itself.
        self._thread = threading.Thread(target=reader.run, name="mesh-reader", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _shut, reader, self._thread, self._pid)
        self._finalizer.atexit = False  # the pass it belongs to closes it then

    def take(self) -> Frame:
        """The next frame, waiting for it; raises what its step ended with (MeshError)."""
        if self.forked:
            raise ClosedError("this pass belongs to the parent process: iterate the loader anew after a fork")
        result = self._reader.out.get()
        if isinstance(result, BaseException):
            self.close()
            endings.check()
            raise result
        self._reader.taken += 1
        self._reader.waker.wake()
        return result

    def ready(self) -> bool:
        """Whether `take` would return at once."""
        return not self._reader.out.empty()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that it runs in."""
        return self._pid != os.getpid()

    @property
    def tally(self) -> Tally:
        return self._reader.tally

    def close(self) -> None:
        """Ends the thread and closes the sockets. Idempotent; frames already taken stay valid."""
        self._finalizer()
        self._arena.on_return = None

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "closed"
        return f"Delivery({state}, {len(self._reader.flights)} in flight)"
