"""The rate of a loader that stands ready, and what it costs the two sides; the reader's side of
`ready_process`.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import TYPE_CHECKING, NoReturn, TypeVar

from bench.processes import cpu_seconds
from bench.timing import answer_rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

Batch = TypeVar("Batch")


def measure_steady_rate(
    batches: Iterator[Batch], look: Callable[[Batch], int], seconds: float, server: int
) -> dict[str, float]:
    """The `rate` of items a second, and the CPU time in microseconds an item of this process with its workers
    (`client_us`) and of the process `server` (`server_us`). `look` counts a batch's items, and ends the
    program if they are not what they should be. The first batch is before the clock."""
    look(next(batches))
    begun, before = time.perf_counter(), _clocks(server)
    done, taken = 0, 0.0
    while taken < seconds:
        done += look(next(batches))
        taken = time.perf_counter() - begun
    client, served = (after - then for after, then in zip(_clocks(server), before, strict=True))
    return {"rate": done / taken, "client_us": 1e6 * client / done, "server_us": 1e6 * served / done}


def _clocks(server: int) -> tuple[float, float]:
    return cpu_seconds(os.getpid()), cpu_seconds(server)


def serve_rounds(
    rounds: Generator[Iterator[Batch], None, None],
    look: Callable[[Batch], int],
    seconds: float,
    server: int,
) -> NoReturn:
    """Warm up and say so, then measure a round for each line of the standard input. Ends the process, with
    workers that wait for a batch nobody takes."""
    with closing(rounds):
        measure_steady_rate(next(rounds), look, seconds / 4, server)
        answer_rounds(lambda: measure_steady_rate(next(rounds), look, seconds, server))
    os._exit(0)
