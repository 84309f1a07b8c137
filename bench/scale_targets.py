"""The targets of docs/scale.md that are measured by commands of their own, one after the other.

Each command prints its figures with their targets, and whether they are met (`bench.tables.verdict`).
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

from bench.tables import MISSED
from tests.support import interpreters

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

COMMANDS: Final = (
    "bench.open_cost --samples 10000000",
    "bench.open_cost --samples 1000000 --kind tar",
    "bench.open_cost --samples 1000000 --kind objects",
    "bench.open_cost --samples 100000000 --batches 50",
    "bench.page_lookups",
    "bench.raw_samples",
    "bench.raw_samples --kind tar",
    "bench.raw_samples --op cast",
    "bench.raw_samples --files 10 --lines 10000000 --bytes 16 --beside 10000",
    "bench.ingest --bytes 10240 --nodes 1",
    "bench.idle_cost",
    "bench.small_objects",
)
"""As `python -m` takes them. The page's other targets are rows of `python -m bench`."""


def measure(commands: Sequence[str], say: Callable[[str], None]) -> tuple[list[str], list[str]]:
    """Run the commands and pass on what they print. Returns those that missed a target, and those that ended
    with an error."""
    missed, failed = [], []
    for number, command in enumerate(commands, 1):
        say(f"[{number}/{len(commands)}] python -m {command}")
        met, code = _run(command, say)
        if code:
            say(f"ended with exit code {code}")
            failed.append(command)
        elif not met:
            missed.append(command)
    return missed, failed


def _run(command: str, say: Callable[[str], None]) -> tuple[bool, int]:
    met = True
    words = [interpreters.python(), "-m", *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                say(line.rstrip("\n"))
                met = met and MISSED not in line
        except BaseException:
            process.terminate()
            raise
    return met, process.returncode
