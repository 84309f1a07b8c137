"""Job service: start, list, describe, wait for and cancel jobs.

Law: the node that receives a job runs it; every node can show and cancel it. Users and root see the
user's jobs; a restricted key sees the jobs it started and those whose data it may read and write in
full. A user's identical documents are one job: starting it while it runs joins it with the new rate
limit, and starting it after it ended runs it again. Above the limits, the service answers Busy.
"""

from __future__ import annotations

import json
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.auth.required_actions import RequiredAction
from meshd.control.control_api import ControlError
from meshd.control.jobs import TOPIC, Job
from meshd.core.api_errors import BatchError, busy
from meshd.jobs.authorization import capture_principal, is_same_credential
from meshd.util.timeouts import timeout
from meshwire.errors import S3Error
from meshwire.jobs.job_spec import parse_job
from meshwire.strict_json import PlanError, suggestion

if TYPE_CHECKING:
    from meshd.auth.authorizer import Authorizer
    from meshd.auth.identity import Caller
    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import BucketTable
    from meshd.control.control_api import ControlStore
    from meshd.control.jobs import JobTable
    from meshd.util.clock import Clock
    from meshwire.jobs.job_spec import JobSpec

MAX_WAITING: Final = 64
MAX_WAITING_EACH: Final = 16
"""Limits of jobs that are queued or running, of all users and per user."""
MAX_WAIT: Final = 30.0
_RETRY_AFTER: Final = 5


class JobService:
    """Starts, lists and cancels jobs, for a worker."""

    def __init__(
        self,
        table: JobTable,
        control: ControlStore,
        buckets: BucketTable,
        access: Authorizer,
        clock: Clock,
        mesh: ClusterView,
    ) -> None:
        self._mesh = mesh
        self._table, self._control, self._buckets = table, control, buckets
        self._access, self._clock = access, clock

    async def start(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Start a job and return the answer to `POST /-/jobs`.

        Raises BatchError: InvalidPlan, NoSuchBucket, AccessDenied, Busy.
        """
        try:
            spec = parse_job(body)
            self._check(caller, spec)
        except PlanError as error:
            raise BatchError("InvalidPlan", str(error), detail={"path": error.path}) from error
        principal = capture_principal(caller)
        job_id, text = spec.job_id(principal.user_id), spec.to_json().decode()

        def decide(present: Job | None) -> Job | None:
            if present is not None and not present.ended:
                if present.cancel:
                    raise busy("this job is being cancelled; start it again when it has ended")
                return msgspec.structs.replace(present, spec=text)  # differs at most in its rate
            self._require_room(principal.user_id)
            run = present.run + 1 if present is not None else 1
            now = self._clock.now_ms()
            return Job(job_id, spec.kind, text, principal, now, run=run, node=self._mesh.node_id)

        job = await self._table.update_job(job_id, decide)
        assert job is not None
        return job_to_json(job)

    def _check(self, caller: Caller, spec: JobSpec) -> None:
        """Check what can be known at once; the job authorizes each key while it runs."""
        source = self._buckets.get(spec.source.bucket)
        if spec.kind == "materialize" and (source is None or not source.view):
            raise PlanError(
                "source", f"{spec.source.bucket!r} is not a view; the name of a view is BUCKET--NAME"
            )
        if spec.kind not in {"materialize", "prefetch", "warm"} and source is not None and source.view:
            raise PlanError("source", f"{spec.source.bucket!r} is a view: use the kind materialize")
        if source is not None and source.view:
            _check_feedback(json.loads(source.view), spec)
        if spec.kind == "warm":  # the job itself checks the rights to read the plan's samples
            if spec.source.bucket:
                self._require_source(caller, spec)
            return
        if spec.kind == "prefetch":
            self._check_prefetch(caller, spec, backed=source is not None and source.origin is not None)
            return
        if spec.kind == "relayout" and source is not None and source.origin is not None:
            raise PlanError(
                "source", f"{spec.source.bucket!r} has an origin: relayout does not apply to cached objects"
            )
        target = self._buckets.get(spec.target.bucket)
        if target is not None and target.view:
            raise PlanError("target", f"{spec.target.bucket!r} is a view, which is read-only")
        self._require_source(caller, spec)
        self._require(caller, RequiredAction("s3:PutObject", spec.target.bucket, f"{spec.target.prefix}*"))

    def _check_prefetch(self, caller: Caller, spec: JobSpec, *, backed: bool) -> None:
        self._require_source(caller, spec)
        if not backed:
            raise PlanError("source", f"{spec.source.bucket!r} has no origin: there is nothing to prefetch")

    def _require_source(self, caller: Caller, spec: JobSpec) -> None:
        self._require(caller, _listing(spec))
        self._require(caller, RequiredAction("s3:GetObject", spec.source.bucket, f"{spec.source.prefix}*"))

    def _require(self, caller: Caller, need: RequiredAction) -> None:
        try:
            self._access.require_action(caller.identity, need, caller.context)
        except S3Error as error:
            if error.code == "NoSuchBucket":
                raise BatchError("NoSuchBucket", f"there is no bucket {need.bucket!r}") from error
            raise BatchError("AccessDenied", error.message) from error

    def _require_room(self, user_id: str) -> None:
        alive = [job for job in self._table.list_all().values() if not job.ended]
        mine = sum(job.principal.user_id == user_id for job in alive)
        if len(alive) >= MAX_WAITING or mine >= MAX_WAITING_EACH:
            raise BatchError(
                "Busy",
                f"{len(alive)} jobs are queued or running, {mine} of them yours; the limits are "
                f"{MAX_WAITING} and {MAX_WAITING_EACH}",
                help="wait for one to end, or cancel one with `mesh job cancel ID`",
                retry_after=_RETRY_AFTER,
            )

    def list_all(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the jobs that the caller may see, youngest first; root sees all."""
        jobs = [job for job in self._table.list_all().values() if self._sees(caller, job)]
        return [job_to_json(job) for job in sorted(jobs, key=lambda job: (-job.created_ms, job.job_id))]

    async def describe(self, caller: Caller, job_id: str) -> dict[str, Any]:
        """Return a job. Raises BatchError NoSuchJob."""
        await self._catch_up(job_id)
        return job_to_json(self._find(caller, job_id))

    async def wait(self, caller: Caller, job_id: str, seconds: float) -> dict[str, Any]:
        """Return a job as `describe` does, when it has ended or after that many seconds (at most 30)."""
        await self._catch_up(job_id)
        job = self._find(caller, job_id)
        with suppress(TimeoutError):
            async with (
                timeout(min(seconds, MAX_WAIT)),
                aclosing(self._control.watch(TOPIC)) as changes,
            ):
                while not job.ended:
                    await anext(changes)
                    job = self._find(caller, job_id)
        return job_to_json(job)

    async def cancel(self, caller: Caller, job_id: str, *, pause: bool = False) -> dict[str, Any]:
        """Request that a job ends; a job that has ended stays as it is, but a paused one can be cancelled.

        With `pause`, the job can be started again later. Raises BatchError NoSuchJob.
        """
        await self._catch_up(job_id)
        self._find(caller, job_id)

        def decide(present: Job | None) -> Job | None:
            if present is not None and present.state == "paused" and not pause:
                return msgspec.structs.replace(present, state="cancelled", pause=False)
            if present is None or present.ended:
                return None
            return msgspec.structs.replace(present, cancel=True, pause=pause)

        job = await self._table.update_job(job_id, decide)
        return job_to_json(job if job is not None else self._find(caller, job_id))

    async def _catch_up(self, job_id: str) -> None:
        """Wait until this process knows what any worker or node has recorded of a job; while the control
        store does not answer, what is known is told."""
        with suppress(ControlError):
            await self._table.get_latest(job_id)

    def _find(self, caller: Caller, job_id: str) -> Job:
        job = self._table.get(job_id)
        if job is None or not self._sees(caller, job):
            known = [item.job_id for item in self._table.list_all().values() if self._sees(caller, item)]
            hint = suggestion(job_id, known) if known else ""
            raise BatchError("NoSuchJob", f"there is no job {job_id[:80]!r}{hint}", help="see `mesh job ls`")
        return job

    def _sees(self, caller: Caller, job: Job) -> bool:
        """Return whether the caller may see and cancel a job."""
        identity = caller.identity
        if identity.root:
            return True
        if identity.user_id != job.principal.user_id:
            return False
        return (
            not identity.bounds or is_same_credential(identity, job.principal) or self._may_all(caller, job)
        )

    def _may_all(self, caller: Caller, job: Job) -> bool:
        """Return whether the caller may list and read every source of a job, and write every output."""
        spec = parse_job(job.spec)
        try:
            self._require(caller, _listing(spec))
            self._access.require_prefix(caller, "s3:GetObject", spec.source.bucket, spec.source.prefix)
            if spec.kind not in {"prefetch", "warm"}:
                self._access.require_prefix(caller, "s3:PutObject", spec.target.bucket, spec.target.prefix)
        except (BatchError, S3Error):
            return False
        return True


def _listing(spec: JobSpec) -> RequiredAction:
    listing = {"s3:prefix": spec.source.prefix, "s3:delimiter": "", "s3:max-keys": "1000"}
    return RequiredAction("s3:ListBucket", spec.source.bucket, facts=listing)


def _check_feedback(view: dict[str, Any], spec: JobSpec) -> None:
    """Raises PlanError if the outputs would become part of the view's own source."""
    inside = view["source"] == spec.target.bucket and spec.target.prefix.startswith(view.get("prefix", ""))
    if inside and not view.get("match"):
        raise PlanError("target", f"{spec.target} is inside the view's own source; choose another folder")


def job_to_json(job: Job) -> dict[str, Any]:
    """Return a job as plain JSON values. `eta_s` is None while it is unknown."""
    progress = job.progress
    left = progress.bytes_total - progress.bytes
    eta = left / progress.rate if job.state == "running" and progress.rate > 0 else None
    return {
        "id": job.job_id,
        "kind": job.kind,
        "state": ("pausing" if job.pause else "cancelling") if job.cancel and not job.ended else job.state,
        "run": job.run,
        "owner": job.principal.user_id,
        "node": job.node,
        "spec": json.loads(job.spec),
        "created_ms": job.created_ms,
        "started_ms": job.started_ms,
        "ended_ms": job.ended_ms,
        "progress": {name: getattr(progress, name) for name in progress.__struct_fields__},
        "eta_s": None if eta is None else round(eta, 1),
        "failed": job.failed,
        "failures": [{"name": item.name, "error": item.error} for item in job.failures],
        "error": job.error,
        **({} if job.report is None else {"report": job.report}),
    }
