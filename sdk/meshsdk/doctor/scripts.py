"""A training script run under `mesh doctor`: started, listened to, ended.

Law: the script is run as it is; what tells its loaders what to do is one variable of its environment. It is
ended when its ranks on this machine have reported, with all processes that it started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshsdk.doctor import VARIABLE
from meshsdk.doctor.advising import Advice
from meshsdk.doctor.enrolling import DIRECTIVE, REPORT, RUN
from meshsdk.doctor.showing import Diagnosis
from meshsdk.doctor.stages import RUNS, Split
from meshsdk.errors import ConfigurationError, MeshError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_GRACE: Final = 10.0  # seconds between being asked to end and being ended
_LOOK: Final = 0.05


def examine_script(
    command: Sequence[str],
    *,
    steps: int = 32,
    loader: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """The diagnosis of what a command trains with: of the `loader`-th mesh.Loader that it iterates. What the
    command prints goes to stderr; `progress` is told each run that begins. Raises MeshError when it ends
    before all is measured."""
    with tempfile.TemporaryDirectory(prefix="mesh-doctor-") as folder:
        place = Path(folder)
        told = {"steps": steps, "loader": loader, "pid": os.getpid()}
        (place / DIRECTIVE).write_text(json.dumps(told))
        try:
            process = subprocess.Popen(
                list(command), stdout=2, env={**os.environ, VARIABLE: folder}, start_new_session=True
            )
        except OSError as error:
            hint = f". Is it `mesh doctor -- python {command[0]}`?" if command[0].endswith(".py") else ""
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
        ended = _ended(process)
        while left and any(place.glob(RUN.format("*", left[0]))):
            progress(left.pop(0))
        reports = [json.loads(path.read_text()) for path in sorted(place.glob(REPORT.format("*")))]
        if reports and len(reports) >= reports[0]["here"]:
            return reports
        if ended:
            raise MeshError(_early(process.returncode))


def _early(code: int) -> str:
    """Why there is no diagnosis: a command that failed has said why itself."""
    if code:
        return f"the command failed (exit code {code}) before all was measured: see what it printed"
    return (
        "the command ended before all was measured: its loader must give more batches. Let it run for "
        "longer, or measure fewer with --steps; --loader says which of its loaders trains"
    )


def _ended(process: subprocess.Popen[bytes]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LOOK)
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """It, and what it started: they share a process group that nobody else is in."""
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
