"""Controller of MeshLoads: starts, follows and cancels jobs of the daemons.

Law: `load_planner` decides; progress comes from the daemons' job interface, never from logs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from meshoperator.controllers.base_controller import LATER, SOON, BaseController
from meshoperator.daemon_client import DaemonError, UnreachableError
from meshoperator.planners.dataset_model import PLANNING, dataset_location
from meshoperator.planners.load_planner import (
    ENDED,
    LoadStep,
    format_time,
    is_warm_up_due,
    job_documents,
    jobs_with_changed_rate,
    outcome,
    parse_history,
    plan_load,
    sum_jobs,
    warm_document,
)
from meshoperator.resources import MeshDatasetSpec, MeshLoadSpec, ResourceError, parse

if TYPE_CHECKING:
    from meshoperator.cluster_model import Manifest
    from meshoperator.daemon_client import MeshAccess
    from meshoperator.planners.load_planner import Phase, RunHistory

_SyncResult = tuple[dict[str, Any] | None, float | None]


class LoadController(BaseController):
    """Reconciles MeshLoads."""

    kind: ClassVar[str] = "MeshLoad"

    async def sync(self, document: Manifest) -> _SyncResult:
        before = parse_history(document.get("status") or {})
        try:
            return await self._run_pass(document, before)
        except (ResourceError, DaemonError) as error:
            reason = error.code if isinstance(error, DaemonError) else "SpecRefused"
            if isinstance(error, DaemonError) and error.status in (429, 503):
                return self._status_fields(
                    document, LoadStep("none", "Waiting", "Busy", str(error), before.next_run)
                ), SOON
            if before.phase != "Failed":
                await self._recorder.record_event(document, "LoadFailed", str(error))
            failed = LoadStep("none", "Failed", reason, str(error), before.next_run)
            return self._status_fields(document, failed) | {"finishedAt": format_time(self._now())}, LATER
        except UnreachableError as error:
            phase: Phase = "Running" if before.phase == "Running" else "Waiting"
            return self._status_fields(
                document, LoadStep("none", phase, "NoMesh", str(error), before.next_run)
            ), SOON

    async def finalize(self, document: Manifest) -> None:
        """Cancel its jobs; cached data stays."""
        before = parse_history(document.get("status") or {})
        dataset = await self._dataset(document)
        if before.phase == "Running" and before.jobs and dataset is not None:
            _, access = await self._daemons.locate_mesh(
                document["metadata"]["namespace"], dataset.spec.cluster_ref
            )
            await self._cancel(access, before)

    # --- one pass -----------------------------------------------------------------------------------------

    async def _run_pass(self, document: Manifest, before: RunHistory) -> _SyncResult:
        metadata, spec = document["metadata"], parse(MeshLoadSpec, document["spec"])
        dataset = await self._dataset(document)
        waiting = await self._waiting(metadata["namespace"], spec, dataset)
        step = plan_load(spec, before, self._now(), waiting)
        if step.action == "delete":
            await self._recorder.record_event(
                document, "Expired", "deleted: ttlSecondsAfterFinished has passed"
            )
            await self._kube.delete("MeshLoad", metadata["name"], metadata["namespace"])
            return None, SOON
        if step.action == "none" or dataset is None:
            return self._status_fields(document, step), self._rest(spec, before, step)
        _, access = await self._daemons.locate_mesh(metadata["namespace"], dataset.spec.cluster_ref)
        if step.action == "cancel":
            await self._cancel(access, before)
            await self._recorder.record_event(
                document, "Suspended", "its jobs were cancelled; loaded data is kept"
            )
            return self._status_fields(document, step), LATER
        if step.action == "follow":
            where = dataset_location(dataset.spec, spec.dataset_ref)
            return await self._follow(document, spec, where, access, before, step)
        return await self._start(document, spec, dataset, access, step)

    async def _start(
        self, document: Manifest, spec: MeshLoadSpec, dataset: _Dataset, access: MeshAccess, step: LoadStep
    ) -> _SyncResult:
        bucket, prefix = dataset_location(dataset.spec, spec.dataset_ref)
        if spec.action == "Evict":
            return await self._evict(document, spec, access, (bucket, prefix), step), SOON
        documents = job_documents(spec, bucket, prefix)
        if dataset.spec.source.uri.startswith("mesh://"):
            warm = warm_document(spec, bucket, prefix)
            if warm is None:
                here = LoadStep(
                    "none", "Succeeded", "AlreadyHere", "the dataset is stored in the mesh", step.next_run
                )
                return self._status_fields(document, here) | self._times_now(), SOON
            documents = [warm]
        jobs = [await self._daemons.request_json(access, "POST", "/-/jobs", job) for job in documents]
        await self._recorder.record_event(
            document, "Loading", f"started {len(jobs)} job{'s' * (len(jobs) != 1)} for s3://{bucket}/"
        )
        began = {"jobId": _names(jobs), "startedAt": format_time(self._now())}
        return self._progress(document, jobs, step) | began, 1.0

    async def _dataset(self, document: Manifest) -> _Dataset | None:
        spec, metadata = document["spec"], document["metadata"]
        found = await self._kube.get("MeshDataset", spec["datasetRef"], metadata["namespace"])
        if found is None:
            return None
        status = found.get("status") or {}
        planning = any(each["reason"] == PLANNING for each in status.get("conditions") or ())
        return _Dataset(parse(MeshDatasetSpec, found["spec"]), bool(status.get("bucket")), planning=planning)

    async def _waiting(self, namespace: str, spec: MeshLoadSpec, dataset: _Dataset | None) -> str:
        """Return what the load waits for before it starts; empty if nothing."""
        if dataset is None:
            return f"MeshDataset {spec.dataset_ref!r} does not exist"
        if not dataset.there:
            return f"MeshDataset {spec.dataset_ref!r} has no bucket yet"
        if dataset.planning:
            return f"MeshDataset {spec.dataset_ref!r} has no planned homes yet"
        for name in spec.run_after:
            other = await self._kube.get("MeshLoad", name, namespace)
            phase = ((other or {}).get("status") or {}).get("phase")
            if phase != "Succeeded":
                return f"runAfter: {name!r} is {phase or 'missing'}"
        return ""

    async def _follow(
        self,
        document: Manifest,
        spec: MeshLoadSpec,
        where: tuple[str, str],
        access: MeshAccess,
        before: RunHistory,
        step: LoadStep,
    ) -> _SyncResult:
        warm = warm_document(spec, *where)
        wanted = [*job_documents(spec, *where), *([warm] if warm else [])]
        jobs = [await self._daemons.request_json(access, "GET", _path(name)) for name in before.jobs]
        for each in jobs_with_changed_rate(
            wanted, jobs
        ):  # the bandwidth changed: posting the same job sets its rate
            await self._daemons.request_json(access, "POST", "/-/jobs", each)
        names = ",".join(before.jobs)
        if warm is not None and is_warm_up_due(spec, jobs):
            jobs.append(await self._daemons.request_json(access, "POST", "/-/jobs", warm))
            names += f",{_names(jobs[-1:])}"
            await self._recorder.record_event(
                document, "Decoding", f"started a job that decodes the samples of plan {warm['plan'][:12]}"
            )
        status = self._progress(document, jobs, step) | {"jobId": names}
        if status["phase"] in ENDED:
            await self._recorder.record_event(
                document, f"Load{status['phase']}", status["conditions"][0]["message"]
            )
        return status, 2.0

    async def _cancel(self, access: MeshAccess, before: RunHistory) -> None:
        for name in before.jobs:
            try:
                await self._daemons.request_json(access, "DELETE", _path(name))
            except DaemonError as error:
                if error.status != 404:
                    raise

    async def _evict(
        self,
        document: Manifest,
        spec: MeshLoadSpec,
        access: MeshAccess,
        where: tuple[str, str],
        step: LoadStep,
    ) -> dict[str, Any]:
        if spec.manifest:
            raise ResourceError("manifest: Evict needs `paths`, not a manifest")
        bucket, prefix = where
        objects = freed = 0
        for path in spec.paths or ("",):
            target = (
                f"/-/residence/{quote(bucket, safe='')}?prefix={quote(prefix + path.lstrip('/'), safe='')}"
            )
            for each in await self._daemons.access_daemons(access):
                gone = await self._daemons.request_json(each, "DELETE", target)
                objects, freed = objects + gone["objects"], freed + gone["bytes"]
        message = f"evicted {objects} objects, {freed} bytes"
        await self._recorder.record_event(document, "Evicted", message)
        done = LoadStep("none", "Succeeded", "Evicted", message, step.next_run)
        figures = {"objectsDone": objects, "objectsTotal": objects, "bytesDone": freed, "bytesTotal": freed}
        return self._status_fields(document, done) | figures | self._times_now()

    # --- telling ------------------------------------------------------------------------------------------

    def _rest(self, spec: MeshLoadSpec, before: RunHistory, step: LoadStep) -> float:
        """Return the seconds until something is due."""
        now, rest = self._now(), LATER
        if step.next_run:
            rest = min(rest, step.next_run - now)
        if before.phase in ENDED and spec.ttl_seconds_after_finished is not None:
            rest = min(rest, before.finished + spec.ttl_seconds_after_finished - now)
        return max(0.5, SOON if step.phase == "Waiting" and not step.next_run else rest)

    def _times_now(self) -> dict[str, Any]:
        return {"startedAt": format_time(self._now()), "finishedAt": format_time(self._now())}

    def _progress(self, document: Manifest, jobs: list[dict[str, Any]], step: LoadStep) -> dict[str, Any]:
        total = sum_jobs(jobs)
        phase, reason, message = outcome(total)
        status = self._status_fields(document, LoadStep("none", phase, reason, message, step.next_run))
        status |= {
            "objectsDone": total.objects[0],
            "objectsTotal": total.objects[1] if total.listed else None,
            "bytesDone": total.bytes[0],
            "bytesTotal": total.bytes[1] if total.listed else None,
            "samplesDone": None if total.samples is None else total.samples[0],
            "samplesTotal": None if total.samples is None else total.samples[1],
            "failed": list(total.failures),
            "finishedAt": format_time(self._now()) if phase in ENDED else None,
        }
        return status

    def _status_fields(self, document: Manifest, step: LoadStep) -> dict[str, Any]:
        whether = True if step.phase == "Succeeded" else False if step.phase == "Failed" else None
        found = [("Complete", whether, step.reason, step.message or step.phase)]
        status = {
            "observedGeneration": document["metadata"].get("generation"),
            "phase": step.phase,
            "conditions": self.conditions(document, found),
        }
        return status | ({"nextRunAt": format_time(step.next_run)} if step.next_run else {})


class _Dataset:
    """`there`: whether its bucket exists. `planning`: whether its homes are still being chosen."""

    def __init__(self, spec: MeshDatasetSpec, there: bool, *, planning: bool) -> None:
        self.spec, self.there, self.planning = spec, there, planning


def _names(jobs: list[dict[str, Any]]) -> str:
    """Return the jobs of a run as a status has them."""
    return ",".join(f"{job['id']}/{job['run']}" for job in jobs)


def _path(name: str) -> str:
    """Return the path of a job named `ID/RUN` in a status."""
    return f"/-/jobs/{quote(name.partition('/')[0], safe='')}"
