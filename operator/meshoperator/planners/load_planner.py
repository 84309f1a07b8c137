"""Load planner: the next step of a MeshLoad, its phase, and cron schedules. Pure.

Law: the daemons' job and the run number in the status identify a run, so an operator killed between starting
a job and recording it finds the job by its document, or starts it again, which loads only what is missing.
Schedules are those of Debian's cron (`cronsim`); times are UTC.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from cronsim import CronSim, CronSimError

from meshoperator.resources import ResourceError
from meshoperator.resources.spec_types import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshoperator.resources import MeshLoadSpec


_FIELDS: Final = 5


class ScheduleError(ValueError):
    """Not a cron schedule, or one that never comes."""


def next_time(schedule: str, moment: datetime) -> datetime:
    """Return the first time after `moment` that matches a schedule of five fields. Raises ScheduleError."""
    if len(schedule.split()) != _FIELDS:  # cronsim also accepts six, with seconds
        raise ScheduleError(f"{schedule!r} has not five fields: minute hour day month weekday")
    try:
        return next(CronSim(schedule, moment.astimezone(UTC)))
    except CronSimError as error:
        raise ScheduleError(f"{schedule!r}: {error}") from error
    except StopIteration:
        raise ScheduleError(f"{schedule!r} matches no time in the next 50 years") from None


Action = Literal["none", "start", "follow", "cancel", "delete"]
Phase = Literal["Pending", "Waiting", "Running", "Suspended", "Succeeded", "Failed"]
ENDED: Final = ("Succeeded", "Failed")
_LISTING: Final = {"", "planning", "listing"}
_FAILURES: Final = 100
_TEXT: Final = 1024


@dataclass(frozen=True, slots=True)
class RunHistory:
    """What a status says about the runs so far. Times are seconds since 1970; 0 means never."""

    phase: str = ""
    jobs: tuple[str, ...] = ()
    started: float = 0.0
    finished: float = 0.0
    next_run: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadStep:
    """What to do next, and the phase until then. `message`: what it waits for."""

    action: Action
    phase: Phase
    reason: str
    message: str = ""
    next_run: float = 0.0


def parse_history(status: Mapping[str, Any]) -> RunHistory:
    """Parse a status as the API returns it."""
    jobs = tuple(filter(None, (status.get("jobId") or "").split(",")))
    times = (_seconds(status.get(name)) for name in ("startedAt", "finishedAt", "nextRunAt"))
    return RunHistory(status.get("phase") or "", jobs, *times)


def plan_load(spec: MeshLoadSpec, before: RunHistory, now: float, waiting: str = "") -> LoadStep:
    """Return the next step. `waiting`: what must exist or end before the load starts; empty: nothing. Raises
    ResourceError."""
    cron = spec.policy == "Cron"
    next_run = before.next_run
    if cron and not next_run:
        next_run = _next(spec, before.started or now)
    active = before.phase == "Running" and bool(before.jobs)
    if before.phase in ENDED and not cron:
        ttl = spec.ttl_seconds_after_finished
        if ttl is not None and now >= before.finished + ttl:
            return LoadStep("delete", _phase(before), "Expired")
        return LoadStep("none", _phase(before), before.phase)
    if spec.suspend:
        return LoadStep("cancel" if active else "none", "Suspended", "Suspended", "suspend is set", next_run)
    if active:
        return LoadStep("follow", "Running", "Running", next_run=next_run)
    if cron and before.phase != "Suspended" and now < next_run:
        phase = _phase(before) if before.phase in ENDED else "Waiting"
        return LoadStep("none", phase, "Scheduled", f"the next run is at {format_time(next_run)}", next_run)
    if cron and before.phase == "Suspended" and not before.jobs and now < next_run:
        return LoadStep(
            "none", "Waiting", "Scheduled", f"the next run is at {format_time(next_run)}", next_run
        )
    if waiting:
        return LoadStep("none", "Waiting", "Waiting", waiting, next_run)
    if cron:
        next_run = _next(spec, now)
    return LoadStep("start", "Running", "Running", next_run=next_run)


def _phase(before: RunHistory) -> Phase:
    return "Succeeded" if before.phase == "Succeeded" else "Failed"


def _next(spec: MeshLoadSpec, after: float) -> float:
    try:
        return next_time(spec.schedule or "", datetime.fromtimestamp(after, UTC)).timestamp()
    except ScheduleError as error:
        raise ResourceError(f"schedule: {error}") from error


def job_documents(spec: MeshLoadSpec, bucket: str, prefix: str) -> list[dict[str, Any]]:
    """Return the documents of its jobs: one per path, with its share of the bandwidth. Raises
    ResourceError."""
    if spec.manifest:
        found = [_job(bucket, prefix) | {"manifest": f"s3://{bucket}/{prefix}{spec.manifest}"}]
    else:
        found = [_job(bucket, prefix + path.lstrip("/")) for path in spec.paths or ("",)]
    if spec.bandwidth is None:
        return found
    share = parse_quantity(spec.bandwidth) // len(found)
    if not share:
        raise ResourceError(
            f"bandwidth: {spec.bandwidth} is less than 1 byte per second and path; set `suspend` to stop"
        )
    return [each | {"rate": share} for each in found]


def warm_document(spec: MeshLoadSpec, bucket: str, prefix: str) -> dict[str, Any] | None:
    """Return the document of the job that decodes the dataset for a plan; None if none is wanted. Raises
    ResourceError."""
    if spec.warm is None:
        return None
    found = {"kind": "warm", "plan": spec.warm.plan, "source": f"s3://{bucket}/{prefix}"}
    rate = {} if spec.bandwidth is None else {"rate": parse_quantity(spec.bandwidth)}
    return found | ({"epoch": spec.warm.epoch} if spec.warm.epoch else {}) | rate


def is_warm_up_due(spec: MeshLoadSpec, jobs: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the objects are loaded and the job that decodes them is still to be started."""
    return (
        spec.warm is not None
        and all(job["state"] == "done" for job in jobs)
        and not any(job["kind"] == "warm" for job in jobs)
    )


def jobs_with_changed_rate(
    wanted: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the documents of jobs that run at a different rate than wanted."""
    rates = {
        _job_key(job["spec"]): job["spec"].get("rate", 0)
        for job in jobs
        if job["state"] in ("queued", "running")
    }
    return [
        each for each in wanted if "rate" in each and rates.get(_job_key(each), each["rate"]) != each["rate"]
    ]


def _job_key(document: Mapping[str, Any]) -> tuple[str, str, str]:
    return document["kind"], document["source"], document.get("manifest", "")


def _job(bucket: str, prefix: str) -> dict[str, Any]:
    return {"kind": "prefetch", "source": f"s3://{bucket}/{prefix}"}


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Totals over all jobs of a run."""

    states: frozenset[str] = frozenset()
    objects: tuple[int, int] = (0, 0)
    bytes: tuple[int, int] = (0, 0)
    failed: int = 0
    failures: tuple[dict[str, str], ...] = ()
    error: str = ""
    copies: int = 1
    phases: frozenset[str] = field(default_factory=frozenset)
    samples: tuple[int, int] | None = None
    warmed: str = ""
    """What a job that decoded samples says of them."""

    @property
    def ended(self) -> bool:
        """Whether all jobs have ended."""
        return not self.states & {"queued", "running", "cancelling", "pausing"}

    @property
    def listed(self) -> bool:
        """Whether listing is complete, so that the totals are final."""
        return not self.phases & _LISTING


def sum_jobs(jobs: Sequence[Mapping[str, Any]]) -> RunTotals:
    """Sum up jobs as `/-/jobs` reports them."""
    found = RunTotals()
    for job in jobs:
        progress = job["progress"]
        if job["kind"] == "warm":
            found = replace(
                found,
                states=found.states | {job["state"]},
                error=found.error or job["error"],
                samples=(progress["samples"], progress["samples_total"]),
                warmed=_describe_warm_up(job.get("report") or {}),
            )
            continue
        failures = [
            {"path": each["name"][:_TEXT], "error": each["error"][:_TEXT]} for each in job["failures"]
        ]
        found = replace(
            found,
            states=found.states | {job["state"]},
            objects=(
                found.objects[0] + progress["outputs"],
                found.objects[1] + progress["outputs_total"],
            ),
            bytes=(found.bytes[0] + progress["bytes"], found.bytes[1] + progress["bytes_total"]),
            failed=found.failed + job["failed"],
            failures=(*found.failures, *failures)[:_FAILURES],
            error=found.error or job["error"],
            copies=max(found.copies, progress.get("copies", 1)),
            phases=found.phases | {progress["phase"]},
        )
    return found


def _describe_warm_up(report: Mapping[str, Any]) -> str:
    """Return what became of the samples of a warm-up."""
    if not report:
        return ""
    said = [f"{report['stored'] + report['there']} samples decoded"]
    for reasons in (report["left_out"], report["bad"]):
        said += [f"{count} not: {why}" for why, count in sorted(reasons.items())[:3]]
    said += [f"none on {node}: {why}" for node, why in sorted(report["refused"].items())[:3]]
    return "; ".join(said)[:_TEXT]


def outcome(total: RunTotals) -> tuple[Phase, str, str]:
    """Return the phase, reason and message of a run."""
    homes = f", on {total.copies} daemons in total" if total.copies > 1 else ""
    if not total.ended:
        if not total.listed:
            return "Running", "Listing", f"{total.bytes[0]} bytes loaded; the source is still being listed"
        if total.samples is not None:
            done, every = total.samples
            return "Running", "Decoding", f"{done} of {every or '?'} samples decoded for the plan"
        return "Running", "Running", f"{total.bytes[0]} of {total.bytes[1]} bytes loaded{homes}"
    if "failed" in total.states:
        return "Failed", "JobFailed", total.error or "the daemons' job failed"
    if "cancelled" in total.states:
        return "Failed", "Cancelled", "the daemons' job was cancelled"
    if total.failed:
        return "Failed", "SomeFailed", f"{total.failed} objects could not be loaded; `failed` lists the first"
    loaded = f"{total.objects[0]} objects, {total.bytes[0]} bytes loaded{homes}"
    return "Succeeded", "Done", f"{loaded}; {total.warmed}" if total.warmed else loaded


def format_time(seconds: float) -> str:
    """Format a time as Kubernetes writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
