"""Controller of MeshDatasets: bucket, origin, prefetch and planned homes.

Law: training data is read-only: nothing is written to a source. A bucket of another owner is neither
changed nor removed. Each daemon reports what it holds. `placement_migration` decides every move, and every
step may be repeated; a refusal by a daemon is reported and stops only the move.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from meshoperator.cluster_model import origins_secret
from meshoperator.controllers.base_controller import LATER, SOON, BaseController
from meshoperator.controllers.key_delivery import NO_KEYS, require_keys
from meshoperator.daemon_client import DaemonError, UnreachableError
from meshoperator.planners.dataset_model import (
    DatasetUsage,
    dataset_location,
    dataset_mark,
    dataset_status,
    origin_changes,
    origin_document,
    prefetches,
)
from meshoperator.planners.placement_inputs import DatasetHomes, Holding
from meshoperator.planners.placement_migration import BucketState, describe_migration, plan_migration
from meshoperator.planners.pod_admission import label
from meshoperator.resources import GROUP, MeshDatasetSpec, ResourceError, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshoperator.cluster_model import Cluster, Manifest
    from meshoperator.controllers.base_controller import EventWriter
    from meshoperator.daemon_client import DaemonClient, MeshAccess
    from meshoperator.kube.client import Kube
    from meshoperator.planners.placement_inputs import PlacementBoard
    from meshoperator.planners.placement_migration import MigrationStep


_ACTIVE_STATES: Final = ("queued", "running", "cancelling", "pausing")
_RELOAD_SECONDS: Final = 600.0  # after a failed load for a move


class PlacementApplier:
    """Moves the copies of datasets to their planned homes."""

    def __init__(
        self, daemons: DaemonClient, board: PlacementBoard, recorder: EventWriter, now: Callable[[], float]
    ) -> None:
        self._daemons, self._board, self._recorder, self._now = daemons, board, recorder, now

    def __repr__(self) -> str:
        return f"<PlacementApplier of {len(self._board.kept)} datasets>"

    async def apply_placement(
        self,
        document: Manifest,
        access: MeshAccess,
        nodes: Sequence[MeshAccess],
        homes: tuple[str, ...],
        holdings: Sequence[Holding],
        figures: DatasetUsage,
        jobs: Sequence[Manifest],
    ) -> MigrationStep:
        """Take the next step of the move. Raises DaemonError, UnreachableError."""
        key = document["metadata"]["namespace"], document["metadata"]["name"]
        bucket = document["spec"].get("bucket") or key[1]
        last = jobs[0] if jobs else None
        told = (document.get("status") or {}).get("sourceBytes")  # outlives the job that found it
        there = figures.source[1] if figures.source is not None else told
        pinned = bool((document["spec"].get("placement") or {}).get("pin"))
        was_loaded = self._board.loaded.get(key) == homes and _has_succeeded(last)
        if pinned and was_loaded and last is not None and self._is_old(last):
            most = {each.node: each.bytes for each in holdings if each.node in homes}
            was_loaded = min(most.values(), default=0) * 2 >= (there or 0)  # else a home lost its disk
        seen = BucketState(
            homes,
            self._board.planned.get(key),
            {each.node: each.bytes for each in holdings},
            there,
            unplaced=bool(self._board.unplaced_reason(*key)),
            was_loaded=was_loaded,
            pinned=pinned,
        )
        now = plan_migration(seen)
        change = describe_migration(homes, now)
        if change:
            body = {"homes": list(now.homes)}
            await self._daemons.request_json(access, "PATCH", f"/-/buckets/{quote(bucket, safe='')}", body)
            await self._recorder.record_event(document, "Moving" if now.moving else "Placed", change)
        generation = document["metadata"].get("generation") or 0
        self._board.record_holdings(*key, holdings, DatasetHomes(now.homes, now.leaving, there, generation))
        if now.load and self._may_load(key, now, last):
            await self._load(document, access, bucket, now, key)
        if now.release and not change:  # every daemon knows the homes by then
            await self._release(document, nodes, holdings, bucket, now)
        return now

    def _may_load(self, key: tuple[str, str], now: MigrationStep, last: Manifest | None) -> bool:
        if last is not None and last["state"] in _ACTIVE_STATES:
            return False
        if self._board.loaded.get(key) != now.homes or last is None:
            return True
        return self._is_old(last)

    def _is_old(self, job: Manifest) -> bool:
        """Return whether a job ended long enough ago for another one."""
        return bool(self._now() - job["ended_ms"] / 1000 > _RELOAD_SECONDS)

    async def _load(
        self, document: Manifest, access: MeshAccess, bucket: str, now: MigrationStep, key: tuple[str, str]
    ) -> None:
        """Load a whole copy onto its new homes."""
        wanted = {"kind": "prefetch", "source": f"s3://{bucket}/"}
        try:
            await self._daemons.request_json(access, "POST", "/-/jobs", wanted)
        except DaemonError as error:
            if error.status != 501:
                raise
            return  # daemons without this job: reads fill the cache
        self._board.loaded[key] = now.homes
        await self._recorder.record_event(
            document, "Bringing", f"a complete copy is being loaded to {', '.join(now.behind)}"
        )

    async def _release(
        self,
        document: Manifest,
        nodes: Sequence[MeshAccess],
        holdings: Sequence[Holding],
        bucket: str,
        now: MigrationStep,
    ) -> None:
        freed = 0
        for each, held in zip(nodes, holdings, strict=True):
            if held.node in now.release:
                gone: dict[str, Any] = await self._daemons.request_json(
                    each, "DELETE", residency_path(bucket, "")
                )
                freed += gone["bytes"]
        await self._recorder.record_event(
            document,
            "Released",
            f"freed {freed} bytes on {', '.join(now.release)}, where no copy is kept any more",
        )


def _has_succeeded(job: Manifest | None) -> bool:
    return job is not None and bool(job["state"] == "done" and not job["failed"])


def residency_path(bucket: str, prefix: str) -> str:
    """Return the path under which a daemon reports what it holds of a bucket."""
    return f"/-/residence/{quote(bucket, safe='')}?prefix={quote(prefix, safe='')}"


REVISION: Final = f"{GROUP}/revision-read"
READING: Final = f"{GROUP}/revision-reading"
"""Annotations: the source revision that was read last; the revision being read, and by which run."""
_KEYS_ON_THEIR_WAY: Final = (
    "waiting for daemons to receive the keys of source.secretRef: the kubelets deliver a changed Secret "
    "within about two minutes. If it takes longer, look at the events of the daemons' pods"
)
_AGAIN: Final = 600.0  # after a failed load of a pinned dataset
_RUNS: Final = ("queued", "running", "cancelling")
_SyncResult = tuple[dict[str, Any] | None, float | None]


class DatasetController(BaseController):
    """Reconciles MeshDatasets."""

    kind: ClassVar[str] = "MeshDataset"

    def __init__(
        self,
        kube: Kube,
        daemons: DaemonClient,
        recorder: EventWriter,
        now: Callable[[], float],
        board: PlacementBoard,
    ) -> None:
        super().__init__(kube, daemons, recorder, now)
        self._board = board

    async def sync(self, document: Manifest) -> _SyncResult:
        try:
            return await self._run_pass(document)
        except UnreachableError as error:
            return self._failure_status(document, None, "NoMesh", str(error), "Pending"), SOON
        except (ResourceError, DaemonError) as error:
            if isinstance(error, DaemonError) and error.code == NO_KEYS:
                return self._failure_status(document, None, error.code, _KEYS_ON_THEIR_WAY, "Pending"), SOON
            reason = error.code if isinstance(error, DaemonError) else "SpecRefused"
            await self.record_new_error(document, "SourceRefused", str(error))
            return self._failure_status(document, False, reason, str(error), "Failed"), LATER

    async def finalize(self, document: Manifest) -> None:
        """With `onDelete: Evict`, delete the cached copies and the bucket that represents the source."""
        metadata, spec = document["metadata"], parse(MeshDatasetSpec, document["spec"])
        self._board.forget(metadata["namespace"], metadata["name"])
        if spec.source.uri.startswith("mesh://"):
            return
        if spec.source.secret_ref is not None:  # first: keys must not stay, even if the mesh is gone
            name, gone = origins_secret(spec.cluster_ref), {"data": {metadata["name"]: None}}
            await self._kube.patch("Secret", name, metadata["namespace"], gone)
        _, access = await self._daemons.locate_mesh(metadata["namespace"], spec.cluster_ref)
        bucket, _ = dataset_location(spec, metadata["name"])
        present = await self._present(access, bucket)
        if present is not None and present["origin"]["url"] == spec.source.uri:
            for job in prefetches(await self._jobs(access), bucket):
                if job["state"] in _RUNS:
                    await self._daemons.request_json(access, "DELETE", f"/-/jobs/{job['id']}")
            if spec.retention.on_delete == "Evict":
                for each in await self._daemons.access_daemons(access):
                    await self._daemons.request_json(each, "DELETE", residency_path(bucket, ""))
                await self._daemons.request_json(access, "DELETE", f"/{quote(bucket, safe='')}")

    # --- one pass -----------------------------------------------------------------------------------------

    async def _run_pass(self, document: Manifest) -> _SyncResult:
        metadata, spec = document["metadata"], parse(MeshDatasetSpec, document["spec"])
        namespace, name = metadata["namespace"], metadata["name"]
        cluster, access = await self._daemons.locate_mesh(namespace, spec.cluster_ref)
        bucket, prefix = dataset_location(spec, name)
        nodes = await self._daemons.access_daemons(access)
        if spec.source.uri.startswith("mesh://"):
            await self._require_bucket(access, bucket)
            holdings = await self._holdings(nodes, bucket, prefix)
            self._board.record_holdings(namespace, name, holdings)
            figures, migration = DatasetUsage.from_holdings(spec, holdings, None), None
        else:
            refresh, homes = await self._ensure(document, spec, cluster, access, bucket)
            if spec.source.secret_ref is not None and not (document.get("status") or {}).get("bucket"):
                made = await self._present(access, bucket)
                if made is not None:
                    await require_keys(self._daemons, nodes, bucket, made["origin"], metadata, self._now())
            jobs = prefetches(await self._jobs(access), bucket)
            placed = homes or not self._board.plans or self._board.unplaced_reason(namespace, name)
            if placed:  # a load before the plan would have to be moved
                jobs = await self._warm(document, spec, access, jobs, refresh=refresh)
            holdings = await self._holdings(nodes, bucket, prefix)
            figures = DatasetUsage.from_holdings(spec, holdings, jobs[0] if jobs else None, homes)
            if self._is_idle(spec, figures, holdings):
                holdings = await self._let_go(document, nodes, bucket, holdings)
                figures = DatasetUsage.from_holdings(spec, holdings, jobs[0] if jobs else None, homes)
            house = PlacementApplier(self._daemons, self._board, self._recorder, self._now)
            migration = await house.apply_placement(document, access, nodes, homes, holdings, figures, jobs)
            migration = migration if self._board.plans or migration.homes else None
        status = dataset_status(
            spec,
            figures,
            self._board.copy_locations(namespace, name),
            self._board.unplaced_reason(namespace, name),
            migration,
        )
        status["conditions"] = self.conditions(document, status["conditions"])
        status |= {
            "observedGeneration": metadata.get("generation"),
            "bucket": bucket,
            "nodeLabel": label("host", dataset_mark(namespace, name)),
        }
        if not (document.get("status") or {}).get("bucket"):
            await self._recorder.record_event(document, "DatasetReady", f"s3://{bucket}/{prefix} can be read")
        waits = migration is not None and (
            migration.moving
            or migration.release
            or not migration.homes
            or self._board.looked != self._board.version
        )
        return status, SOON if figures.loading or waits else LATER

    async def _require_bucket(self, access: MeshAccess, bucket: str) -> None:
        try:
            await self._daemons.request_json(access, "HEAD", f"/{quote(bucket, safe='')}")
        except DaemonError as error:
            if error.status != 404:
                raise
            raise ResourceError(f"source.uri: the mesh has no bucket {bucket!r}; create it first") from error

    async def _present(self, access: MeshAccess, bucket: str) -> dict[str, Any] | None:
        """Return the bucket and its origin, or None if there is no such bucket. Raises DaemonError for a
        bucket without an origin."""
        try:
            found: dict[str, Any] = await self._daemons.request_json(
                access, "GET", f"/-/buckets/{quote(bucket, safe='')}"
            )
        except DaemonError as error:
            if error.code != "NoSuchBucket":
                raise
            return None
        return found

    async def _ensure(
        self, document: Manifest, spec: MeshDatasetSpec, cluster: Cluster, access: MeshAccess, bucket: str
    ) -> tuple[bool, tuple[str, ...]]:
        """Make the bucket match the spec; return whether to read the source again, and the bucket's homes."""
        metadata = document["metadata"]
        credentials = ""
        if spec.source.secret_ref is not None:
            credentials = metadata["name"]
            await self._hand_over(document, spec.source.secret_ref.name, cluster)
        present = await self._present(access, bucket)
        read = (metadata.get("annotations") or {}).get(REVISION)
        revision = spec.source.revision or ""
        refresh = present is not None and read is not None and read != revision
        wanted = origin_document(spec, credentials, refresh=refresh)
        target = f"/-/buckets/{quote(bucket, safe='')}"
        if present is None:
            await self._daemons.request_json(access, "PUT", target, wanted)
            await self._recorder.record_event(
                document, "BucketMade", f"created s3://{bucket} for {spec.source.uri}"
            )
        elif present["origin"]["url"] != spec.source.uri:
            raise ResourceError(f"bucket: s3://{bucket} already has the origin {present['origin']['url']}")
        else:
            change = origin_changes(present["origin"], wanted)
            if change:
                await self._daemons.request_json(access, "PATCH", target, change)
        if read is None:
            await self._note(document, {REVISION: revision})
        return refresh, tuple(present["origin"].get("homes") or ()) if present is not None else ()

    async def _note(self, document: Manifest, annotations: dict[str, str | None]) -> None:
        metadata = document["metadata"]
        change = {"metadata": {"annotations": annotations}}
        await self._kube.patch(self.kind, metadata["name"], metadata["namespace"], change)

    async def _hand_over(self, document: Manifest, secret: str, cluster: Cluster) -> None:
        """Copy the source's keys into the Secret that daemons mount, one entry per dataset."""
        metadata = document["metadata"]
        found = await self._kube.get("Secret", secret, metadata["namespace"])
        if found is None:
            raise ResourceError(
                f"source.secretRef: Secret {secret!r} does not exist; create it in this namespace"
            )
        lines = [
            f"{key.lower()}={base64.b64decode(value).decode()}\n"
            for key, value in sorted((found.get("data") or {}).items())
        ]
        name, text = cluster.origins_secret, base64.b64encode("".join(lines).encode()).decode()
        there = await self._kube.get("Secret", name, metadata["namespace"])
        if there is None:
            made = {"name": name, "namespace": metadata["namespace"], "labels": cluster.labels()}
            await self._kube.create(
                {"apiVersion": "v1", "kind": "Secret", "metadata": made, "type": "Opaque"}
            )
        elif (there.get("data") or {}).get(metadata["name"]) == text:
            return
        await self._kube.patch("Secret", name, metadata["namespace"], {"data": {metadata["name"]: text}})

    async def _jobs(self, access: MeshAccess) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._daemons.request_json(access, "GET", "/-/jobs"))["jobs"]
        return found

    async def _warm(
        self,
        document: Manifest,
        spec: MeshDatasetSpec,
        access: MeshAccess,
        jobs: list[dict[str, Any]],
        *,
        refresh: bool,
    ) -> list[dict[str, Any]]:
        """Load a pinned dataset; after a change of revision, compare everything with the source. Other
        datasets are cached by reads and by MeshLoads."""
        last = jobs[0] if jobs else None
        if last is not None and last["state"] in _RUNS:
            return jobs
        revision = spec.source.revision or ""
        reading, _, run = (document["metadata"].get("annotations") or {}).get(READING, "").rpartition("@")
        begun = refresh and bool(run) and reading == revision
        if begun and last is not None and last["run"] >= int(run) and last["state"] == "done":
            await self._note(document, {REVISION: revision, READING: None})
            return jobs
        since = self._now() - last["ended_ms"] / 1000 if last is not None else float("inf")
        if (
            (refresh and not begun)
            or (spec.placement.pin and since > _again(spec, last))
            or (begun and since > _AGAIN)
        ):
            bucket, _ = dataset_location(spec, document["metadata"]["name"])
            wanted = {"kind": "prefetch", "source": f"s3://{bucket}/"}
            job = await self._daemons.request_json(access, "POST", "/-/jobs", wanted)
            if refresh:
                await self._note(document, {READING: f"{revision}@{job['run']}"})
            return [job, *jobs]
        return jobs

    async def _holdings(self, nodes: list[MeshAccess], bucket: str, prefix: str) -> list[Holding]:
        found = []
        for each in nodes:
            told = await self._daemons.request_json(each, "GET", residency_path(bucket, prefix))
            there = told["objects"], told["bytes"], told["capacity"], told["used"]
            lately = told.get("hits", 0), told.get("misses", 0), told.get("idle_s", 0.0)
            found.append(Holding(told["node"], *there, *lately))
        return found

    def _is_idle(self, spec: MeshDatasetSpec, figures: DatasetUsage, holdings: list[Holding]) -> bool:
        """Return whether cached data is evicted because it was not read for `idleSeconds`."""
        after = spec.retention.idle_seconds
        if after is None or figures.loading or not any(each.bytes for each in holdings):
            return False
        return all(each.idle >= after for each in holdings)

    async def _let_go(
        self, document: Manifest, nodes: list[MeshAccess], bucket: str, holdings: list[Holding]
    ) -> list[Holding]:
        freed = sum(each.bytes for each in holdings)
        for each in nodes:
            await self._daemons.request_json(each, "DELETE", residency_path(bucket, ""))
        idle = round(min(each.idle for each in holdings))
        await self._recorder.record_event(
            document, "Idle", f"evicted {freed} bytes that were not read for {idle} s"
        )
        return [replace(each, objects=0, bytes=0) for each in holdings]

    def _failure_status(
        self, document: Manifest, whether: bool | None, reason: str, message: str, phase: str
    ) -> dict[str, Any]:
        found: list[tuple[str, bool | None, str, str]] = [
            ("SourceReachable", whether, reason, message),
            ("Healthy", False, reason, message),
        ]
        before = (document.get("status") or {}).get("conditions") or ()
        current = self.conditions(document, found)
        kept = [each for each in before if each["type"] in ("Placed", "Warm")]
        return {
            "observedGeneration": document["metadata"].get("generation"),
            "phase": phase,
            "conditions": [*current, *kept],
        }


def _again(spec: MeshDatasetSpec, last: Manifest | None) -> float:
    """Return the seconds between two loads of a pinned dataset."""
    if last is None:
        return 0.0
    if last["state"] != "done":
        return _AGAIN
    return max(spec.refresh.interval_seconds, _AGAIN) if spec.refresh.policy == "Interval" else float("inf")
