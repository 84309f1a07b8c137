"""A contender that stands ready in a process of its own, and takes a round when it is told to.

Law: it says a line when it is warm, and a line of JSON for each round; whatever it has started ends with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import psutil

from bench.interleave import turns
from bench.processes import family
from bench.results import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.servers import Server


class StandingContender:
    """`python -m` `words`, with the keys of `server` in its environment; `python`: the interpreter."""

    def __init__(self, name: str, words: Sequence[str], server: Server, python: str = sys.executable) -> None:
        assert server.account is not None
        self._name = name
        keys = {
            "AWS_ACCESS_KEY_ID": server.account.access_key,
            "AWS_SECRET_ACCESS_KEY": server.account.secret_key,
            "AWS_REGION": "us-east-1",
        }
        self._process = subprocess.Popen(
            [python, "-m", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **keys},
        )

    def __repr__(self) -> str:
        return f"<StandingContender {self._name} pid={self._process.pid}>"

    def __enter__(self) -> StandingContender:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(psutil.Error):
            for process in reversed(family(self._process.pid)):
                process.kill()
        self._process.communicate()

    def wait(self) -> None:
        """Until it is warm; one that failed says so when it is to take a round."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def figure(self, number: int) -> Figure:
        """Of one round; one that has failed says why."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            return Figure(self._name, number, json.loads(self._process.stdout.readline()))
        except (OSError, ValueError):
            return Figure(self._name, number, {}, self._process.stderr.read()[-400:] or "it ended")


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
            contender.wait()
        for number, name in turns(row, running, rounds, say):
            yield running[name].figure(number)
