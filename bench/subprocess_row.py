"""A row's work in a process of its own, of which every figure is handed over as soon as there is one."""

from __future__ import annotations

from contextlib import closing, suppress
from multiprocessing import get_context
from typing import TYPE_CHECKING

from bench.processes import ChildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from bench.results import Figure


def apart(work: Callable[..., Iterator[Figure]], *args: object) -> Iterator[Figure]:
    """What `work(*args)` yields in a new interpreter; raises ChildError when that ends with an error.

    A consumer that stops closes the pipe: the process is waited for, and ends at the figure it has at hand.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(theirs, work, args))
    child.start()
    theirs.close()
    try:
        with closing(ours), suppress(EOFError):
            while True:
                yield ours.recv()
    finally:
        child.join()
    if child.exitcode:
        raise ChildError(f"{work.__module__} ended with {child.exitcode}; its traceback is above")


def _send(pipe: Connection, work: Callable[..., Iterator[Figure]], args: tuple[object, ...]) -> None:
    with closing(pipe), suppress(BrokenPipeError, KeyboardInterrupt):
        for figure in work(*args):
            pipe.send(figure)
