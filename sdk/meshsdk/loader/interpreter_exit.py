"""Closes open iterators at interpreter exit, while the modules they need still exist.

Law: exit is silent. An object that is collected later is already closed, and a daemon thread that continues
to iterate ends without a traceback.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Protocol

from meshsdk.errors import ClosedError

_WAIT = 1.0  # seconds to wait for a daemon thread that was waiting for data


class Closable(Protocol):
    """An object to close at exit; `consumer` is the thread that is waiting for its data, if any."""

    @property
    def consumer(self) -> threading.Thread | None: ...

    def close(self) -> None:
        """Close the object. Idempotent; any thread may call it."""


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
                    consumer.join(_WAIT)  # a thread that is stopped inside torch would abort the process


_ending = _Ending()
atexit.register(_ending.run)


def close_at_exit(what: Closable) -> None:
    """Register an object to be closed at interpreter exit; it is referenced weakly.

    Raises the errors of `check_not_exiting`.
    """
    check_not_exiting()
    _ending.open[id(what)] = what


def check_not_exiting() -> None:
    """Raise ClosedError during interpreter exit.

    In other threads than the main one raise SystemExit, which ends the thread without a traceback.
    """
    if not _ending.begun:
        return
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit
    raise ClosedError("the interpreter is exiting: no more batches are loaded")
