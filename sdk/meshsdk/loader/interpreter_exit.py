"""Interpreter exit: closes what is still open while its modules still exist.

Law: exit is silent. An object collected later finds itself closed; a daemon thread that keeps asking
ends quietly.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Protocol

from meshsdk.errors import ClosedError

_WAIT = 1.0  # seconds for a daemon thread that waited for data to end


class Closable(Protocol):
    """`consumer`: the thread that waits for something of it, if one does."""

    @property
    def consumer(self) -> threading.Thread | None: ...

    def close(self) -> None:
        """Idempotent; from any thread."""


class _Ending:
    def __init__(self) -> None:
        self.begun = False
        self.open: weakref.WeakValueDictionary[int, Closable] = weakref.WeakValueDictionary()

    def run(self) -> None:
        self.begun = True
        for reference in self.open.valuerefs():
            if (what := reference()) is not None:
                consumer = what.consumer
                what.close()
                if consumer is not None:
                    consumer.join(_WAIT)  # stopped within torch instead, it would abort the process


_ending = _Ending()
atexit.register(_ending.run)


def close_at_exit(what: Closable) -> None:
    """Has it closed at the interpreter's end, unless it is gone by then. Raises as `check` does."""
    check_not_exiting()
    _ending.open[id(what)] = what


def check_not_exiting() -> None:
    """Raises once the interpreter ends: ClosedError; in a thread, whose traceback nobody is there to catch,
    SystemExit, which ends it."""
    if not _ending.begun:
        return
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit
    raise ClosedError("the program ends: nothing is loaded any more")
