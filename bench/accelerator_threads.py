"""Emulated accelerators in one process: threads that take a batch, then sleep as long as a step would take.

Law: standard library only, so that it runs in the peers' environment too. Utilisation (AU) is the time
computed over the time passed, after the first batch, as MLPerf Storage counts it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


def forever(batches: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError("an epoch without a batch: too few records for so many accelerators")


def utilisation(
    batches: Iterator[Any], size_of: Callable[[Any], int], wanted: int, step_s: float, seconds: float
) -> float:
    """Of one accelerator; a batch with other than `wanted` bytes is an error, not a figure."""
    next(batches)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or not steps:
        time.sleep(step_s)
        steps += 1
        batch = next(batches)
        if size_of(batch) != wanted:
            raise ValueError(f"a batch of {size_of(batch)} bytes, not {wanted}")
        del batch
    return steps * step_s / (time.perf_counter() - began)


def run(
    loaders: Sequence[Iterable[Any]],
    size_of: Callable[[Any], int],
    wanted: int,
    step_s: float,
    seconds: float,
) -> None:
    """All at once; prints one line of JSON with the utilisation of each. Exit code 1 when one failed."""
    found: list[float] = []
    # Workers are forked before there are threads.
    iterators = [forever(loader) for loader in loaders]
    first = [next(each) for each in iterators]
    del first

    def accelerate(each: Iterator[Any]) -> None:
        found.append(utilisation(each, size_of, wanted, step_s, seconds))

    threads = [threading.Thread(target=accelerate, args=(each,)) for each in iterators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) != len(threads):
        sys.exit(1)
    sys.stdout.write("@ " + json.dumps(found) + "\n")
    sys.stdout.flush()
