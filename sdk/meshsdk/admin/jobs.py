"""Jobs on a node: bulk conversion of objects and archives, started, watched and stopped.

Law: the node validates the job document, and its errors name the field. Starting is idempotent: the same
job has the same id while it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from meshsdk.client.request import Request, json_request
from meshsdk.errors import MeshError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshsdk.client.transport import Transport

ENDED = frozenset({"done", "failed", "cancelled", "paused"})
_WAIT = 25.0  # maximum seconds a request may wait for the job to end


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job; totals are 0 until known. `written` and `there` (left by an earlier run) add
    up to `outputs`; `rate` is in bytes per second. If data goes to several homes, each copy counts:
    `copies` is their number."""

    phase: str = ""
    outputs: int = 0
    outputs_total: int = 0
    samples: int = 0
    samples_total: int = 0
    bytes: int = 0
    bytes_total: int = 0
    written: int = 0
    there: int = 0
    removed: int = 0
    rate: float = 0.0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class JobInfo:
    """One job. `state`: queued, running, cancelling, pausing, done, failed, cancelled, paused. `failures`:
    (name, reason) of the first hundred skipped items; `failed` counts all. `error`: why the job failed.
    Times in ms since 1970. `report`: what a job of kind `warm` or `relayout` has done (docs/jobs.md), else
    empty."""

    id: str
    kind: str
    state: str
    run: int
    owner: str
    spec: Mapping[str, Any]
    progress: JobProgress
    created_ms: int
    started_ms: int
    ended_ms: int
    eta_s: float | None
    failed: int
    failures: tuple[tuple[str, str], ...]
    error: str
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def shard_job(source: str, target: str, **layout: Any) -> dict[str, Any]:
    """Return the document of a job that packs the objects under `source` (`s3://BUCKET/FOLDER`) into
    archives under `target`. `layout`: count or size, shuffle, sort, split, match, name, format
    (docs/jobs.md)."""
    return {"kind": "shard", "source": source, "target": target, **layout}


def reshard_job(source: str, target: str, **layout: Any) -> dict[str, Any]:
    """Return the document of a job that repacks the files in the archives under `source` (a folder, or one
    archive)."""
    return {"kind": "reshard", "source": source, "target": target, **layout}


def extract_job(source: str, target: str, **options: Any) -> dict[str, Any]:
    """Return the document of a job that writes every file in the archives under `source` as an object.
    `options`: match, names, on_bad."""
    return {"kind": "extract", "source": source, "target": target, **options}


def materialize_job(view: str, target: str, prefix: str = "") -> dict[str, Any]:
    """Return the document of a job that writes a view's objects (with `prefix`) as ordinary objects."""
    return {"kind": "materialize", "source": f"s3://{view}/{prefix}", "target": target}


def warm_job(plan: str, **options: Any) -> dict[str, Any]:
    """Return the document of a job that fills the nodes' decoded caches with what a plan (its hash) reads.
    `options`: source (only samples below this URL), epoch, cache (bytes per node), rate (bytes per
    second)."""
    return {"kind": "warm", "plan": plan, **options}


def relayout_job(source: str, **options: Any) -> dict[str, Any]:
    """Return the document of a job that puts the objects below `source` (`s3://BUCKET/PREFIX`) next to each
    other on rotational disks, in order of key. `options`: dry_run (only measure), rate (bytes per second)."""
    return {"kind": "relayout", "source": source, **options}


def start_job(transport: Transport, document: Mapping[str, Any]) -> JobInfo:
    """Start a job, or join it if it is running. Raises ServerError naming the bad field, BusyError."""
    return _job(transport.json(json_request("POST", "/-/jobs", dict(document))))


def list_jobs(transport: Transport) -> tuple[JobInfo, ...]:
    """Return the caller's jobs, newest first."""
    return tuple(_job(item) for item in transport.json(Request("GET", "/-/jobs"))["jobs"])


def show_job(transport: Transport, job_id: str, *, wait: float = 0.0) -> JobInfo:
    """Return a job, waiting up to `wait` seconds (at most 30) for it to end. Raises NotFoundError."""
    query = f"wait={wait:g}" if wait else ""
    return _job(transport.json(Request("GET", f"/-/jobs/{quote(job_id, safe='')}", query)))


def watch_job(transport: Transport, job_id: str, *, every: float = 1.0) -> Iterator[JobInfo]:
    """Yield a job's state every `every` seconds, the last time when it has ended."""
    job = show_job(transport, job_id)
    yield job
    while not job.ended:
        job = show_job(transport, job_id, wait=min(every, _WAIT))
        yield job


def wait_for_job(transport: Transport, job_id: str) -> JobInfo:
    """Wait until a job has ended, and return it."""
    *_, last = watch_job(transport, job_id, every=_WAIT)
    return last


def cancel_job(transport: Transport, job_id: str) -> JobInfo:
    """Cancel a job; what it has written stays. Raises NotFoundError."""
    return _job(transport.json(Request("DELETE", f"/-/jobs/{quote(job_id, safe='')}")))


def pause_job(transport: Transport, job_id: str) -> JobInfo:
    """Pause a job; starting it again with its document resumes it. Raises NotFoundError."""
    return _job(transport.json(Request("DELETE", f"/-/jobs/{quote(job_id, safe='')}", "pause=1")))


def _job(answer: Mapping[str, Any]) -> JobInfo:
    try:
        known = JobProgress.__dataclass_fields__
        progress = {name: value for name, value in answer["progress"].items() if name in known}
        failures = tuple((str(item["name"]), str(item["error"])) for item in answer["failures"])
        rest = {
            name: answer[name]
            for name in JobInfo.__dataclass_fields__
            if name not in ("progress", "failures", "report")
        }
        report = dict(answer.get("report", {}))
        return JobInfo(**rest, progress=JobProgress(**progress), failures=failures, report=report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MeshError(
            f"cannot parse the server's job ({error!r}); upgrade the older of SDK and server"
        ) from error
