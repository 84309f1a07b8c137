"""A contender that stands ready in a process of its own, and takes a round when it is told to.

Law: it says a line when it is warm, and a line of JSON for each round; whatever it has started ends with it.
One that says nothing for `limit_s` seconds hangs: it is killed, and its figure says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from threading import Timer
from typing import TYPE_CHECKING, Final

import psutil

from bench.interleave import turns
from bench.processes import family
from bench.results import Figure
from tests.support import interpreters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.servers import Server


LIMIT_S: Final = 180.0
"""Seconds for a warm-up or a round; the longest ones take about 20 on two cores."""


class StandingContender:
    """`python -m` `words`, with the keys of `server` in its environment; `python`: another interpreter than
    this one, which in tests is forked."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        server: Server,
        python: str = "",
        limit_s: float = LIMIT_S,
    ) -> None:
        assert server.account is not None
        self._name, self._limit_s, self._hung = name, limit_s, False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- closed at exit; a pipe that nobody reads would fill
        keys = {
            "AWS_ACCESS_KEY_ID": server.account.access_key,
            "AWS_SECRET_ACCESS_KEY": server.account.secret_key,
            "AWS_REGION": "us-east-1",
        }
        self._process = subprocess.Popen(
            [python or interpreters.python(), "-m", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **keys},
        )

    def __repr__(self) -> str:
        return f"<StandingContender {self._name} pid={self._process.pid}>"

    def __enter__(self) -> StandingContender:
        return self

    def __exit__(self, *exc: object) -> None:
        self._kill()
        self._process.communicate()
        self._errors.close()

    def wait_ready(self) -> None:
        """Until it is warm; one that failed says so when it is to take a round."""
        self._line()

    def figure(self, number: int) -> Figure:
        """Of one round; one that has failed says why."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            return Figure(self._name, number, json.loads(self._line()))
        except (OSError, ValueError):
            return Figure(self._name, number, {}, self._problem())

    def _line(self) -> str:
        assert self._process.stdout is not None
        timer = Timer(self._limit_s, self._end_hung)
        timer.start()
        try:
            return self._process.stdout.readline()
        finally:
            timer.cancel()

    def _end_hung(self) -> None:
        self._hung = True
        self._kill()

    def _kill(self) -> None:
        with suppress(psutil.Error):
            for process in reversed(family(self._process.pid)):
                process.kill()

    def _problem(self) -> str:
        self._errors.seek(0)
        said = self._errors.read()[-400:]
        return f"no answer for {self._limit_s:.0f} s: {said}" if self._hung else said or "it ended"


def measure_in_turn(
    row: str,
    contenders: Sequence[str],
    start: Callable[[str], StandingContender],
    rounds: int,
    say: Callable[[str], None],
) -> Iterator[Figure]:
    """Start a process for each contender, then take rounds in turn."""
    with ExitStack() as stack:
        running = {name: stack.enter_context(start(name)) for name in contenders}
        for name, contender in running.items():
            say(f"{row}: {name}, warming up")
            contender.wait_ready()
        for number, name in turns(row, running, rounds, say):
            yield running[name].figure(number)
