"""Runs a training script under `mesh doctor`, and replaces the batches of one of its loaders.

Law: the script runs unchanged; its loaders find their instructions through one environment variable. One
loader of a process is measured: the first that is iterated, or the one with the given number. After its
report the process waits, and `mesh doctor` ends it and all processes that it started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshsdk.errors import ConfigurationError, MeshError
from meshsdk.loader.loader_setup import DOCTOR_VARIABLE
from meshtools.doctor.advice import Advice, Diagnosis, advise, disk_notes
from meshtools.doctor.examine_plan import NodeSurvey, uncertainty_notes
from meshtools.doctor.measurement_runs import MeasurementRuns
from meshtools.doctor.stage_times import RUNS, Split, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from meshsdk.datasets.batch import Batch
    from meshsdk.loader.loader import Loader


DIRECTIVE: Final = "directive.json"
REPORT: Final = "report-{}.json"
RUN: Final = "run-{}-{}"  # rank, run: an empty file that says the rank has begun the run
_LONGEST: Final = 600.0  # seconds that a rank waits for the others


class ScriptHook:
    """The instructions for this process, and its progress."""

    def __init__(self, place: Path) -> None:
        self.place, self.pid = place, os.getpid()
        directive = json.loads((place / DIRECTIVE).read_text())
        self.steps, self.number, self.doctor = (
            int(directive["steps"]),
            int(directive["loader"]),
            int(directive["pid"]),
        )
        self.seen: weakref.WeakKeyDictionary[Loader, int] = weakref.WeakKeyDictionary()
        self.count = 0
        self.checkup: MeasurementRuns | None = None

    def __repr__(self) -> str:
        return f"<ScriptHook at {self.place}, {self.count} loaders seen>"

    def measured_batches(self, loader: Loader) -> Iterator[Batch] | None:
        """Returns the batches that the loader yields instead of its own; None if it is not measured."""
        if loader not in self.seen:
            self.count += 1  # of all loaders so far, deleted ones included
            self.seen[loader] = self.count
        if self.seen[loader] != self.number:
            return None
        if self.checkup is None:
            self.checkup = self._begin(loader)
        return self.checkup.batches()

    def _begin(self, loader: Loader) -> MeasurementRuns:
        subject = loader.subject()
        enquiry = NodeSurvey(subject.transport)

        def done(checkup: MeasurementRuns) -> None:
            found = split(checkup.runs, subject.world)
            about = enquiry.plan_facts(subject, checkup.network)
            advice = advise(found, about)
            self._report(
                subject.rank,
                {
                    "rank": subject.rank,
                    "here": int(os.environ.get("LOCAL_WORLD_SIZE", subject.world)),
                    "split": {name: getattr(found, name) for name in found.__slots__},
                    "advice": {name: getattr(advice, name) for name in advice.__slots__},
                    "steps": max(run.steps for run in checkup.runs.values()),
                    "notes": [*disk_notes(about), *uncertainty_notes(checkup)],
                },
            )
            self.wait_for_doctor()

        def begins(run: str) -> None:
            enquiry.on_run_start(run)
            with suppress(OSError):  # `mesh doctor` has ended and removed the folder
                (self.place / RUN.format(subject.rank, run)).touch()

        enquiry.on_start()
        return MeasurementRuns(subject, self.steps, alone=subject.world == 1, done=done, begins=begins)

    def _report(self, rank: int, document: dict[str, Any]) -> None:
        path = self.place / REPORT.format(rank)
        half = path.with_suffix(".half")
        half.write_text(json.dumps(document))
        half.rename(path)

    def wait_for_doctor(self) -> None:
        """Waits until `mesh doctor` ends this process. Raises SystemExit if `mesh doctor` is gone."""
        until = time.monotonic() + _LONGEST
        while self.place.exists() and _lives(self.doctor) and time.monotonic() < until:
            threading.Event().wait(0.05)
        raise SystemExit("mesh doctor has finished its measurement")


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True


_hooks: dict[str, ScriptHook] = {}


def measured_batches(loader: Loader) -> Iterator[Batch] | None:
    """Returns the batches that this loader yields for `mesh doctor` (entry point `doctor`); None if it is not
    measured."""
    place = os.environ[DOCTOR_VARIABLE]
    hook = _hooks.get(place)
    if hook is None or hook.pid != os.getpid():
        hook = _hooks[place] = ScriptHook(Path(place))
    return hook.measured_batches(loader)


_GRACE: Final = 10.0  # seconds between SIGTERM and SIGKILL
_LOOK: Final = 0.05  # seconds between two looks at the reports


def examine_script(
    command: Sequence[str],
    *,
    steps: int = 32,
    loader: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Runs a command and diagnoses the `loader`-th mesh.Loader that it iterates. The command's output goes to
    stderr; `progress` is called with each run that begins. Raises ConfigurationError if the command cannot be
    started, and MeshError if it ends before the measurement is complete."""
    with tempfile.TemporaryDirectory(prefix="mesh-doctor-") as folder:
        place = Path(folder)
        directive = {"steps": steps, "loader": loader, "pid": os.getpid()}
        (place / DIRECTIVE).write_text(json.dumps(directive))
        try:
            process = subprocess.Popen(
                list(command), stdout=2, env={**os.environ, DOCTOR_VARIABLE: folder}, start_new_session=True
            )
        except OSError as error:
            hint = (
                f". Did you mean `mesh doctor -- python {command[0]}`?" if command[0].endswith(".py") else ""
            )
            raise ConfigurationError(f"{command[0]!r} cannot be run: {error.strerror}{hint}") from error
        try:
            reports = _listen(process, place, progress)
        finally:
            _end(process)
    return _diagnosis(reports)


def _listen(
    process: subprocess.Popen[bytes], place: Path, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    left = list(RUNS)
    while True:
        ended = _has_ended(process)
        while left and any(place.glob(RUN.format("*", left[0]))):
            progress(left.pop(0))
        reports = [json.loads(path.read_text()) for path in sorted(place.glob(REPORT.format("*")))]
        if reports and len(reports) >= reports[0]["here"]:
            return reports
        if ended:
            raise MeshError(_early(process.returncode))


def _early(code: int) -> str:
    """Returns why there is no diagnosis. A command that failed has printed the reason itself."""
    if code:
        return f"the command failed (exit code {code}) before the measurement was complete: see its output"
    return (
        "the command ended before the measurement was complete: its loader must yield more batches. Let it "
        "run for longer, measure fewer batches with --steps, or choose the loader that trains with --loader"
    )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LOOK)
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the command and the processes that it started: they have a process group of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _diagnosis(reports: Sequence[dict[str, Any]]) -> Diagnosis:
    ranks = [Split(**report["split"]) for report in reports]
    slow = max(range(len(ranks)), key=lambda number: ranks[number].step)
    notes = sorted({note for report in reports for note in report["notes"]})
    return Diagnosis(ranks, Advice(**reports[slow]["advice"]), int(reports[slow]["steps"]), notes)
