"""What a run is doing now: one line that is rewritten on a terminal, lines that follow each other elsewhere.

They go to stderr: what is measured goes to stdout.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import Progress as Bars
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.catalogue import Entry


class Progress:
    """A context; `begin` a row, `say` what it does. Where stderr is not a terminal a line looks like
    `12:03:05 [3/30] get-10k: meshd, round 2 of 5`."""

    def __init__(self, entries: Sequence[Entry], *, toy: bool) -> None:
        self._entries, self._toy, self._place = entries, toy, 0
        console = Console(stderr=True, highlight=False)
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._bars = Bars(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._bars.add_task("starting", total=None) if self._bars else None

    def __repr__(self) -> str:
        return f"<Progress {self._place} of {len(self._entries)} rows>"

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bars:
            self._bars.stop()

    def begin(self, entry: Entry) -> None:
        """The next row; how long it and those after it take by the catalogue, unless sizes are toys."""
        left = self._entries[self._place :]
        self._place += 1
        minutes = sum(each.minutes for each in left)
        said = "" if self._toy else f", about {entry.minutes:g} min of {minutes:g} min that are left"
        self.say(f"{entry.name}: looking how busy the machine is{said}")

    def say(self, text: str) -> None:
        """What happens now."""
        line = f"[{self._place}/{len(self._entries)}] {text}"
        if self._bars and self._task is not None:
            self._bars.update(self._task, description=line)
        else:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
            sys.stderr.flush()
