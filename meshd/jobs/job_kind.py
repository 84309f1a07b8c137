"""The interface of a job kind, and what a running job receives: services, specification, progress counter.

Law: a job kind plans and writes; state, queueing and persistence belong to the runner. A kind may be
cancelled at any await and restarted from the beginning: it skips outputs that already exist. When it has
ended, nothing of the run is written any more: commits in progress end before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from meshd.control.jobs import Failure, Progress
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identity import Caller
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.jobs.output_store import OutputStore
    from meshd.objects.object_reader import VersionLookup
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.disks.page_loader import PageLoader
    from meshwire.jobs.job_spec import JobSpec

FAILURES: Final = 100
_TEXT: Final = 300


class ProgressCounter:
    """Counts the progress of a job; the runner saves it from time to time."""

    def __init__(self) -> None:
        self.phase = "planning"
        self.copies = 1
        self.outputs_total = self.samples_total = self.bytes_total = 0
        self.samples = self.bytes = self.moved = self.unpacked = 0
        self.written = self.existing = self.removed = self.failed = 0
        self.failures: list[Failure] = []
        self.report: msgspec.Struct | None = None

    def __repr__(self) -> str:
        done = self.written + self.existing
        return f"<ProgressCounter {self.phase} {done} of {self.outputs_total}, {self.failed} failed>"

    def reset(self) -> None:
        """Reset the counters for a new run; existing outputs count as done."""
        self.phase = "planning"
        self.copies = 1
        self.outputs_total = self.samples_total = self.bytes_total = 0
        self.samples = self.bytes = self.removed = self.failed = 0
        self.written = self.existing = 0
        self.failures = []
        self.report = None

    def scale_totals(self, copies: int) -> None:
        """Multiply the totals: this many copies are made of all that was found."""
        self.copies = copies
        self.outputs_total *= copies
        self.samples_total *= copies
        self.bytes_total *= copies

    def record_output(self, samples: int, size: int, *, there: bool) -> None:
        """Count an output that exists, written now or earlier."""
        self.existing += there
        self.written += not there
        self.samples += samples
        self.bytes += size
        metrics.job_outputs.labels("there" if there else "written").inc()

    def record_bytes(self, size: int) -> None:
        """Count bytes written to an output that may not be complete yet."""
        self.moved += size
        metrics.job_bytes.inc(size)

    def record_failure(self, name: str, error: str) -> None:
        """Count something that could not be read; the first hundred are listed by name."""
        self.failed += 1
        metrics.job_failures.inc()
        if len(self.failures) < FAILURES:
            self.failures.append(Failure(name[:_TEXT], error[:_TEXT]))

    def progress(self, rate: float) -> Progress:
        return Progress(
            self.phase,
            self.written + self.existing,
            self.outputs_total,
            self.samples,
            self.samples_total,
            self.bytes,
            self.bytes_total,
            self.written,
            self.existing,
            self.removed,
            rate,
            self.copies,
        )


class JobServices(msgspec.Struct, frozen=True):
    """The services for all job kinds. `store` is this node's; `objects` also covers other nodes.
    `window_bytes`: what a job may load ahead with `pages`, 0 if this node has no rotational disk."""

    store: ObjectStore
    objects: RemoteObjects
    archives: ArchiveService
    versions: VersionLookup
    access: Authorizer
    outputs: OutputStore
    pages: PageLoader
    window_bytes: int


class JobRun(msgspec.Struct, frozen=True):
    """A job while it runs. `name` identifies this run: its scratch objects are below `jobs/name/`.

    `rate`: the present limit in bytes per second, 0 for none; starting the job again with another rate
    changes it.
    """

    job_id: str
    run: int
    spec: JobSpec
    caller: Caller
    tally: ProgressCounter = msgspec.field(default_factory=ProgressCounter)
    rate: Callable[[], float] = lambda: 0.0

    @property
    def name(self) -> str:
        return f"{self.job_id}-{self.run}"


class JobKind(Protocol):
    """Runs the jobs of one kind, or of several similar ones."""

    async def run_job(self, running: JobRun) -> None:
        """Run a job to its end. Raises BatchError, S3Error, PlanError, StoreError if it cannot go on."""
        ...
