"""Job runner of the coordinator process: takes jobs from the job table and runs a few at a time to the end.

Law: the job table is authoritative, also for which node runs a job. The runner starts every queued or
running job of its node that is not in progress, and takes over jobs of lost nodes as new runs. It
retries when other nodes do not answer. A job's end is recorded when nothing of its run is written any more.
While the control store cannot be used, running jobs go on, and what they have to record waits.
Invariant: a failing job ends only itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.control.control_api import ControlError
from meshd.control.jobs import TOPIC
from meshd.core.api_errors import BatchError
from meshd.jobs.authorization import run_while_authorized, snapshot_authorization
from meshd.jobs.job_kind import JobRun, ProgressCounter
from meshd.rpc.peer_client import PeerUnreachableError
from meshd.store.errors import CorruptExtentError, DiskFailedError, NotReplicatedError, StoreError
from meshd.telemetry import metrics
from meshd.util import failpoints
from meshd.util.async_tasks import BackgroundTasks
from meshd.util.tenant_limits import tenant_scope
from meshd.util.timeouts import timeout
from meshwire.cluster.routes import rendezvous_order
from meshwire.errors import S3Error
from meshwire.jobs.job_spec import parse_job
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import BucketTable
    from meshd.control.control_api import ControlStore
    from meshd.control.identities import IdentityTable
    from meshd.control.jobs import Job, JobTable, State
    from meshd.jobs.job_kind import JobKind
    from meshd.jobs.scratch import PlanStore
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.jobs")
AT_A_TIME: Final = 2
KEPT: Final = 500
"""Ended jobs that stay in the table; the records of older ones are deleted."""
_SAVE_EVERY: Final = 1.0
_SMOOTHING: Final = 0.3
_LOOK_EVERY: Final = 2.0
_TRIES: Final = 12
"""Attempts without a byte written in between. The last ones wait longest: up to `_LONGEST` seconds."""
_LONGEST: Final = 8.0
_PASSING: Final = frozenset({"Busy", "SlowDown", "ServiceUnavailable"})
_STOP_SECONDS: Final = 2.0
"""Seconds that a node which stops waits for commits in progress: its jobs are not told to have ended."""
_SERVING: Final = ("up", "draining", "joining", "returning")


class JobRunner:
    """Runs the jobs of a node. One instance per node, in the coordinator. `sync_outputs`: makes what is
    stored now durable, where writes are acknowledged before they are."""

    def __init__(
        self,
        table: JobTable,
        control: ControlStore,
        identities: IdentityTable,
        buckets: BucketTable,
        kinds: Mapping[str, JobKind],
        plan_store: PlanStore,
        clock: Clock,
        mesh: ClusterView,
        sync_outputs: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._mesh, self._sync_outputs = mesh, sync_outputs
        self._table, self._control = table, control
        self._identities, self._buckets = identities, buckets
        self._kinds, self._plan_store, self._clock = kinds, plan_store, clock
        self._tasks = BackgroundTasks("jobs")
        self._running: dict[str, asyncio.Task[None]] = {}
        self._freed, self._looking = asyncio.Event(), asyncio.Lock()
        self._ending: set[str] = set()  # runs that were cancelled
        self._stopping = self._is_behind = False  # behind: the control store could not be used

    def __repr__(self) -> str:
        return f"<JobRunner of {sorted(self._running)}>"

    async def run(self) -> None:
        """Run jobs until cancelled; jobs in progress are left for the next start."""
        try:
            await self._clear_ended()
            self._tasks.spawn(self._reconcile_periodically(), "look")
            async with aclosing(self._control.watch(TOPIC)) as changes:
                async for _ in changes:
                    await self._reconcile()
        finally:
            self._stopping = True
            with suppress(TimeoutError):
                async with timeout(_STOP_SECONDS):
                    await self._tasks.aclose()

    async def _clear_ended(self) -> None:
        """Delete the scratch objects of jobs that ended as the node stopped."""
        for job_id in self._plan_store.job_ids():
            job = self._table.get(job_id)
            if job is None or job.ended or not self._is_mine(job):
                await self._plan_store.delete_job_scratch(job_id)

    async def _reconcile_periodically(self) -> None:
        """Reconcile when no job record changes: after a run has ended, and when nodes have gone away."""
        while True:
            with suppress(TimeoutError):
                async with timeout(_LOOK_EVERY):
                    await self._freed.wait()
            freed = self._freed.is_set()
            self._freed.clear()
            if freed or self._is_behind or not self._mesh.single_node:
                await self._reconcile()

    def _is_mine(self, job: Job) -> bool:
        return self._mesh.single_node or job.node == self._mesh.node_id

    def _is_orphan(self, job: Job) -> bool:
        """Return whether the node of a job no longer runs it, and this node takes it over."""
        cluster = self._mesh.current_map()
        node = cluster.node(job.node)
        if node is not None and node.state in _SERVING:
            return False
        fit = tuple(
            each for each in cluster.nodes if each.state == "up" and (each.stores or "compute" in each.roles)
        )
        heirs = rendezvous_order(fit, job.job_id)
        return bool(heirs) and heirs[0].node_id == self._mesh.node_id

    async def _take_over(self, job: Job) -> None:
        def decide(now: Job | None) -> Job | None:
            if now is None or now.ended or now.node != job.node:
                return None
            run = now.run + (now.state == "running")
            return msgspec.structs.replace(now, node=self._mesh.node_id, run=run, state="queued")

        await self._table.update_job(job.job_id, decide)

    async def _reconcile(self) -> None:
        """Start and stop runs as the job table says; what the control store prevents is done later."""
        async with self._looking:
            try:
                await self._reconcile_locked()
            except ControlError as error:
                if not self._is_behind:
                    _log.warning("jobs wait: the control store cannot be used", extra={"why": str(error)})
                self._is_behind = True
            else:
                self._is_behind = False

    async def _reconcile_locked(self) -> None:
        jobs = self._table.list_all()
        alive = sorted((job for job in jobs.values() if not job.ended), key=_queue_order)
        for each in alive:
            job = self._table.get(each.job_id)  # it may have changed while another job was ended
            if job is None or job.ended:
                continue
            task = self._running.get(job.job_id)
            if not self._is_mine(job):
                if task is not None:
                    self._cancel_run(job.job_id, task)
                elif self._is_orphan(job):
                    await self._take_over(job)
            elif job.cancel and task is not None:
                self._cancel_run(job.job_id, task)
            elif job.cancel:
                await self._end(job.job_id, _stopped_state(job), wait=False)
            elif task is None and len(self._running) < AT_A_TIME:
                self._begin(job)
        metrics.jobs_waiting.set(sum(map(self._is_mine, alive)) - len(self._running))
        metrics.jobs_running.set(len(self._running))
        ended = sorted((job for job in jobs.values() if job.ended), key=lambda job: -job.ended_ms)
        for job in ended[KEPT:]:
            await self._table.delete_job(job.job_id)

    def _begin(self, job: Job) -> None:
        task = self._running[job.job_id] = self._tasks.spawn(self._run(job), job.job_id)
        # Not at the end of `_run`: a task that is cancelled before its first step never gets there.
        task.add_done_callback(lambda _: self._let_go(job.job_id))

    def _cancel_run(self, job_id: str, task: asyncio.Task[None]) -> None:
        """Cancel a run, once: a second cancellation would end its wait for commits in progress."""
        if job_id not in self._ending:
            self._ending.add(job_id)
            task.cancel()

    def _let_go(self, job_id: str) -> None:
        self._running.pop(job_id, None)
        self._ending.discard(job_id)
        self._freed.set()

    async def _run(self, job: Job) -> None:
        tally = ProgressCounter()
        try:
            saver = self._tasks.spawn(self._save_often(job.job_id, tally), f"{job.job_id}:progress")
            try:
                await self._persist(job, tally)
            finally:
                saver.cancel()
        except asyncio.CancelledError:
            present = self._table.get(job.job_id)
            if self._stopping or present is None or not present.cancel or not self._is_mine(present):
                raise  # the node stops and resumes the job at its next start; or another node has the job
            await self._end(job.job_id, _stopped_state(present), tally)
        except Exception as error:
            if self._stopping:
                return  # it was broken off in the middle; the next start runs it again
            await self._end(job.job_id, "failed", tally, _explain(error, job.job_id))
        else:
            if self._sync_outputs is not None:  # before the record, which is durable at once
                await self._sync_outputs()
            await self._end(job.job_id, "done", tally)

    async def _persist(self, job: Job, tally: ProgressCounter) -> None:
        """Do the work; while other nodes do not answer, restart it, which skips existing outputs."""
        tries = 0
        while True:
            moved = tally.moved
            try:
                await self._work(job, tally)
            except Exception as error:
                tries = 0 if tally.moved > moved else tries + 1
                if self._mesh.single_node or tries > _TRIES or not _is_transient(error):
                    raise
                _log.info(
                    "job is waiting", extra={"job": job.job_id, "why": _waited_for(_first(error))[:300]}
                )
                await asyncio.sleep(random.uniform(0.5, 1) * min(_LONGEST, 0.25 * 2**tries))
                tally.reset()
            else:
                return

    async def _work(self, job: Job, tally: ProgressCounter) -> None:
        began = msgspec.structs.replace(
            job,
            state="running",
            started_ms=job.started_ms or self._clock.now_ms(),
            node=self._mesh.node_id,
        )
        await self._record(job.job_id, lambda now: _merge_requests(now, began))
        failpoints.hit("jobs.begun")
        spec = parse_job(job.spec)
        look = partial(snapshot_authorization, job.principal, spec, self._identities, self._buckets)
        rate = partial(self._rate, job.job_id)
        while True:
            began_on = look()
            running = JobRun(job.job_id, job.run, spec, began_on.caller, tally, rate)
            with tenant_scope(began_on.caller.identity.account):
                if await run_while_authorized(self._kinds[job.kind].run_job(running), look, began_on):
                    break
            await self._plan_store.delete_job_scratch(job.job_id)  # plan again, with the present rights
            tally.reset()
        failpoints.hit("jobs.worked")

    def _rate(self, job_id: str) -> float:
        job = self._table.get(job_id)
        return 0.0 if job is None else float(parse_job(job.spec).rate)

    async def _save_often(self, job_id: str, tally: ProgressCounter) -> None:
        at, moved, rate = self._clock.monotonic(), 0, 0.0
        while True:
            await asyncio.sleep(_SAVE_EVERY)
            now = self._clock.monotonic()
            lately = (tally.moved - moved) / max(now - at, 1e-3)
            rate = lately if rate == 0 else rate + _SMOOTHING * (lately - rate)
            at, moved = now, tally.moved
            save = partial(self._with_progress, tally=tally, rate=rate)
            with suppress(ControlError):
                await self._table.update_job(job_id, save)

    def _with_progress(self, job: Job | None, tally: ProgressCounter, rate: float) -> Job | None:
        return _with_progress(job, tally, rate) if job is not None and self._is_mine(job) else None

    async def _record(self, job_id: str, decide: Callable[[Job | None], Job | None]) -> None:
        """Update a job's record as soon as the control store can be used."""
        told = False
        while True:
            try:
                await self._table.update_job(job_id, decide)
            except ControlError as error:
                if not told:
                    why = {"job": job_id, "why": str(error)}
                    _log.warning("a job waits: the control store cannot be used", extra=why)
                told = True
                await asyncio.sleep(_LOOK_EVERY)
            else:
                return

    async def _end(
        self,
        job_id: str,
        state: State,
        tally: ProgressCounter | None = None,
        error: str = "",
        *,
        wait: bool = True,
    ) -> None:
        """Record the end of a job. `wait`: until the control store can be used; else raises ControlError."""
        now = self._clock.now_ms()

        def decide(job: Job | None) -> Job | None:
            if job is None or job.ended or not self._is_mine(job):
                return None
            saved = job if tally is None else _with_progress(job, tally, 0.0)
            return msgspec.structs.replace(saved, state=state, ended_ms=now, error=error[:1000])

        await (self._record if wait else self._table.update_job)(job_id, decide)
        metrics.jobs_ended.labels(state).inc()
        failpoints.hit("jobs.ended")
        await self._plan_store.delete_job_scratch(job_id)


def _queue_order(job: Job) -> tuple[bool, int, str]:
    """Sort key: running jobs resume first; then first come, first served."""
    return job.state != "running", job.created_ms, job.job_id


def _merge_requests(present: Job | None, wanted: Job) -> Job | None:
    """Return `wanted`, keeping a cancellation or a new rate that was requested in the meantime."""
    if present is None:
        return None
    return msgspec.structs.replace(wanted, cancel=present.cancel, pause=present.pause, spec=present.spec)


def _stopped_state(job: Job) -> State:
    """Return the state of a job that was asked to end."""
    return "paused" if job.pause else "cancelled"


def _with_progress(job: Job | None, tally: ProgressCounter, rate: float) -> Job:
    assert job is not None
    return msgspec.structs.replace(
        job,
        progress=tally.progress(rate),
        failed=tally.failed,
        failures=tuple(tally.failures),
        report=None if tally.report is None else msgspec.to_builtins(tally.report),
    )


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_transient(error: Exception) -> bool:
    """Return whether an error in a cluster may pass by itself.

    It may if a node is away, the map changes or there is too much load; also with damage or a failing disk of
    this node, because it was reported and the next attempt reads from other owners.
    """
    error = _first(error)
    if isinstance(error, BatchError | S3Error):
        return error.code in _PASSING
    return isinstance(error, CorruptExtentError | DiskFailedError | NotReplicatedError | PeerUnreachableError)


def _waited_for(error: Exception) -> str:
    """Return why a job is waiting; for damage, with the name of the object."""
    name = error.name if isinstance(error, CorruptExtentError) else ""
    return f"{name}: {error}" if name else str(error)


def _explain(error: Exception, job_id: str) -> str:
    """Return why a job failed, for the user who started it; the log has details for operators only."""
    error = _first(error)
    if isinstance(error, BatchError):
        message = "; ".join(filter(None, (error.message, error.help)))
    elif isinstance(error, S3Error):
        message = f"{error.code}: {error.message}"
    elif isinstance(error, CorruptExtentError) and error.name:
        message = (
            f"{error.name} is damaged on the disk: upload the same bytes again, then start the job again"
        )
    elif isinstance(error, StoreError):
        message = f"the store reports: {error}"
    elif isinstance(error, PlanError):
        message = str(error)
    else:
        _log.error("job failed unexpectedly", extra={"job": job_id}, exc_info=error)
        return "unexpected error; the node's log has the details"
    _log.warning("job failed", extra={"job": job_id, "why": message[:500]})
    return message
