"""Prefetcher: the consumer's side of the prefetch thread, whose frames it returns in step order.

Invariant: after `close` no thread or socket remains; an abandoned prefetcher closes itself.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING

from meshsdk.errors import ClosedError
from meshsdk.loader import interpreter_exit
from meshsdk.loader.prefetch_worker import PrefetchWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.arena import Arena
    from meshsdk.client.tracing import BatchTraces
    from meshsdk.client.transport import Transport
    from meshsdk.datasets.batch import Frame
    from meshsdk.loader.fetch_spec import FetchSpec
    from meshsdk.loader_stats import Tally


_LATER = 0.01  # seconds

# A loop that is left by `break` closes its iterator where it is collected: what is raised there is printed
# and ignored, a KeyboardInterrupt too, and the program would go on.


@contextlib.contextmanager
def _repeated_interrupt() -> Iterator[None]:
    """Raise a KeyboardInterrupt of the block a moment later, in the code that follows."""
    try:
        yield
    except KeyboardInterrupt:
        again = threading.Timer(_LATER, _thread.interrupt_main)
        again.daemon = True
        again.start()


def _collected(reader: PrefetchWorker, thread: threading.Thread, pid: int) -> None:
    with _repeated_interrupt():
        _shut(reader, thread, pid)


def _shut(reader: PrefetchWorker, thread: threading.Thread, pid: int) -> None:
    """End the thread; a forked child has none, and its sockets belong to the parent."""
    if pid != os.getpid():
        reader.waker.close()
        return
    reader.closing = True
    reader.waker.wake()
    reader.flights.abort()
    try:
        with contextlib.suppress(RuntimeError):  # a thread that an interrupt kept from its start
            if thread is not threading.current_thread():  # collection may run on the prefetch thread itself
                thread.join()
    finally:  # also after an interrupt: the consumer may be another thread, which waits
        reader.waker.close()
        reader.out.put(ClosedError("this iteration is closed: iterate over the loader again"))


class Prefetcher:
    """A running prefetch of `order.steps`; call `next_frame` once per step. For one consumer at a time."""

    def __init__(self, transport: Transport, order: FetchSpec, arena: Arena) -> None:
        self._reader = reader = PrefetchWorker(transport, order, arena)
        self._arena = arena
        self._pid = os.getpid()
        arena.on_return = reader.memory.slot_returned
        # The thread references the worker, not this object, so an abandoned prefetcher is collected.
        self._thread = threading.Thread(target=reader.run, name="mesh-reader", daemon=True)
        self._finalizer = weakref.finalize(self, _collected, reader, self._thread, self._pid)
        self._finalizer.atexit = False  # at exit its epoch iterator closes it
        try:
            self._thread.start()
        except BaseException:  # also an interrupt, while this thread waits for the other one to begin
            self.close()
            raise

    def next_frame(self) -> Frame:
        """Return the next frame, waiting for it. Raises the MeshError with which its step failed."""
        if self.forked:
            raise ClosedError("this iteration belongs to the parent process: start a new one after a fork")
        result = self._reader.out.get()
        if isinstance(result, BaseException):
            self.close()
            interpreter_exit.check_not_exiting()
            raise result
        reader = self._reader
        reader.taken += 1
        reader.memory.frame_taken(last=reader.out.empty())
        return result

    def is_ready(self) -> bool:
        """Return whether `next_frame` would return immediately."""
        return not self._reader.out.empty()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that started the prefetcher."""
        return self._pid != os.getpid()

    @property
    def tally(self) -> Tally:
        return self._reader.tally

    @property
    def traces(self) -> BatchTraces | None:
        return self._reader.traces

    def close(self) -> None:
        """End the thread and close the sockets. Idempotent; frames already returned stay valid."""
        self._finalizer()
        self._arena.on_return = None

    def __repr__(self) -> str:
        state = "running" if self._thread.is_alive() else "closed"
        return f"Prefetcher({state}, {len(self._reader.flights)} in flight)"
