"""A loader of a script that `mesh doctor` runs: it gives the batches of a checkup instead of its own.

Law: of all loaders of a process, one is looked into: the first that is iterated, or the one asked for. When
all is measured the process stays where it is, until it is ended: nothing of the script is run any more.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshsdk.doctor import VARIABLE
from meshsdk.doctor.advising import advise
from meshsdk.doctor.checkups import Checkup
from meshsdk.doctor.circumstances import Enquiry
from meshsdk.doctor.examining import doubts
from meshsdk.doctor.stages import split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.batches import Batch
    from meshsdk.loaders import Loader

DIRECTIVE: Final = "directive.json"
REPORT: Final = "report-{}.json"
RUN: Final = "run-{}-{}"  # of a rank, that it has begun this run
_LONGEST: Final = 600.0  # seconds that a rank waits for the others


class Desk:
    """What this process was told to do, and how far it is."""

    def __init__(self, place: Path) -> None:
        self.place, self.pid = place, os.getpid()
        told = json.loads((place / DIRECTIVE).read_text())
        self.steps, self.number, self.doctor = int(told["steps"]), int(told["loader"]), int(told["pid"])
        self.seen: weakref.WeakKeyDictionary[Loader, int] = weakref.WeakKeyDictionary()
        self.count = 0
        self.checkup: Checkup | None = None

    def __repr__(self) -> str:
        return f"<Desk at {self.place}, {self.count} loaders seen>"

    def batches(self, loader: Loader) -> Iterator[Batch] | None:
        """What the loader is to give instead of its own; None: its own."""
        if loader not in self.seen:
            self.count += 1  # of all there have been: those that are gone count
            self.seen[loader] = self.count
        if self.seen[loader] != self.number:
            return None
        if self.checkup is None:
            self.checkup = self._begun(loader)
        return self.checkup.batches()

    def _begun(self, loader: Loader) -> Checkup:
        subject = loader.subject()
        enquiry = Enquiry(subject.transport)

        def done(checkup: Checkup) -> None:
            found = split(checkup.runs, subject.world)
            advice = advise(found, enquiry.circumstances(subject, checkup.network))
            self._report(
                subject.rank,
                {
                    "rank": subject.rank,
                    "here": int(os.environ.get("LOCAL_WORLD_SIZE", subject.world)),
                    "split": {name: getattr(found, name) for name in found.__slots__},
                    "advice": {name: getattr(advice, name) for name in advice.__slots__},
                    "steps": max(run.steps for run in checkup.runs.values()),
                    "notes": doubts(checkup),
                },
            )
            self.stay()

        def begins(run: str) -> None:
            enquiry.begins(run)
            with suppress(OSError):  # nobody is left who would look
                (self.place / RUN.format(subject.rank, run)).touch()

        return Checkup(subject, self.steps, alone=subject.world == 1, done=done, begins=begins)

    def _report(self, rank: int, document: dict[str, Any]) -> None:
        path = self.place / REPORT.format(rank)
        half = path.with_suffix(".half")
        half.write_text(json.dumps(document))
        half.rename(path)

    def stay(self) -> None:
        """Until this process is ended. Raises SystemExit when nobody is left who would do that."""
        until = time.monotonic() + _LONGEST
        while self.place.exists() and _lives(self.doctor) and time.monotonic() < until:
            threading.Event().wait(0.05)
        raise SystemExit("mesh doctor has measured what it wanted")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


_desks: dict[str, Desk] = {}


def enrolled(loader: Loader) -> Iterator[Batch] | None:
    """The batches that `mesh doctor` has this loader give; None when it is not looked into."""
    place = os.environ[VARIABLE]
    desk = _desks.get(place)
    if desk is None or desk.pid != os.getpid():
        desk = _desks[place] = Desk(Path(place))
    return desk.batches(loader)
