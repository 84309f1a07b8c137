"""The loop of a MeshDataset: its bucket with its origin, its warmth, and what is said of both.

Law: training data is only read: nothing is written to a source. A bucket that stands for something else is
neither changed nor removed. What lies where is asked of the daemons, each of itself.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import quote

from meshoperator.admission import label
from meshoperator.daemons import DaemonError, UnreachableError
from meshoperator.dataloops import LATER, SOON, DataLoop
from meshoperator.datasources import changes, mark, origin, place
from meshoperator.datastatuses import Figures, dataset_status, prefetches
from meshoperator.housing import House, residence
from meshoperator.meshes import origins_secret
from meshoperator.placing import Holding
from meshoperator.resources import GROUP, MeshDatasetSpec, ResourceError, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.daemons import Access, Daemons
    from meshoperator.dataloops import Says
    from meshoperator.kube import Kube
    from meshoperator.meshes import Cluster, Manifest
    from meshoperator.placing import Board

REVISION: Final = f"{GROUP}/revision-read"
READING: Final = f"{GROUP}/revision-reading"
"""Annotations: the revision of the source that was read; the one that is being read, and in which run."""
_AGAIN: Final = 600.0  # seconds from a failed load of a pinned dataset to the next
_RUNS: Final = ("queued", "running", "cancelling")
_Looked = tuple[dict[str, Any] | None, float | None]


class DatasetLoop(DataLoop):
    """See the module."""

    kind: ClassVar[str] = "MeshDataset"

    def __init__(
        self, kube: Kube, daemons: Daemons, recorder: Says, now: Callable[[], float], board: Board
    ) -> None:
        super().__init__(kube, daemons, recorder, now)
        self._board = board

    async def look(self, document: Manifest) -> _Looked:
        try:
            return await self._pass(document)
        except UnreachableError as error:
            return self._failed(document, None, "NoMesh", str(error), "Pending"), SOON
        except (ResourceError, DaemonError) as error:
            reason = error.code if isinstance(error, DaemonError) else "SpecRefused"
            before = (document.get("status") or {}).get("conditions") or ()
            if not any(each.get("message") == str(error)[:1024] for each in before):
                await self._recorder.say(document, "SourceRefused", str(error))
            return self._failed(document, False, reason, str(error), "Failed"), LATER

    async def clean(self, document: Manifest) -> None:
        """With `onDelete: Evict` its cached copies go, and the bucket that stands for the source."""
        metadata, spec = document["metadata"], parse(MeshDatasetSpec, document["spec"])
        self._board.forget(metadata["namespace"], metadata["name"])
        if spec.source.uri.startswith("mesh://"):
            return
        if spec.source.secret_ref is not None:  # first: keys stay nowhere, whatever is there of the mesh
            name, gone = origins_secret(spec.cluster_ref), {"data": {metadata["name"]: None}}
            await self._kube.patch("Secret", name, metadata["namespace"], gone)
        _, access = await self._daemons.of(metadata["namespace"], spec.cluster_ref)
        bucket, _ = place(spec, metadata["name"])
        present = await self._present(access, bucket)
        if present is not None and present["origin"]["url"] == spec.source.uri:
            for job in prefetches(await self._jobs(access), bucket):
                if job["state"] in _RUNS:
                    await self._daemons.ask(access, "DELETE", f"/-/jobs/{job['id']}")
            if spec.retention.on_delete == "Evict":
                for each in await self._daemons.nodes(access):
                    await self._daemons.ask(each, "DELETE", residence(bucket, ""))
                await self._daemons.ask(access, "DELETE", f"/{quote(bucket, safe='')}")

    # --- one pass -----------------------------------------------------------------------------------------

    async def _pass(self, document: Manifest) -> _Looked:
        metadata, spec = document["metadata"], parse(MeshDatasetSpec, document["spec"])
        namespace, name = metadata["namespace"], metadata["name"]
        cluster, access = await self._daemons.of(namespace, spec.cluster_ref)
        bucket, prefix = place(spec, name)
        nodes = await self._daemons.nodes(access)
        if spec.source.uri.startswith("mesh://"):
            await self._require_bucket(access, bucket)
            holdings = await self._holdings(nodes, bucket, prefix)
            self._board.tell(namespace, name, holdings)
            figures, homing = Figures.of(spec, holdings, None), None
        else:
            anew, homes = await self._ensure(document, spec, cluster, access, bucket)
            jobs = prefetches(await self._jobs(access), bucket)
            placed = homes or not self._board.plans or self._board.why(namespace, name)
            if placed:  # what is loaded before would have to move
                jobs = await self._warm(document, spec, access, jobs, anew=anew)
            holdings = await self._holdings(nodes, bucket, prefix)
            figures = Figures.of(spec, holdings, jobs[0] if jobs else None, homes)
            if self._is_idle(spec, figures, holdings):
                holdings = await self._let_go(document, nodes, bucket, holdings)
                figures = Figures.of(spec, holdings, jobs[0] if jobs else None, homes)
            house = House(self._daemons, self._board, self._recorder, self._now)
            homing = await house.keep(document, access, nodes, homes, holdings, figures, jobs)
            homing = homing if self._board.plans or homing.homes else None
        status = dataset_status(
            spec, figures, self._board.placed(namespace, name), self._board.why(namespace, name), homing
        )
        status["conditions"] = self.conditions(document, status["conditions"])
        status |= {
            "observedGeneration": metadata.get("generation"),
            "bucket": bucket,
            "nodeLabel": label("host", mark(namespace, name)),
        }
        if not (document.get("status") or {}).get("bucket"):
            await self._recorder.say(document, "DatasetReady", f"s3://{bucket}/{prefix} can be read")
        waits = homing is not None and (
            homing.moving or homing.release or not homing.homes or self._board.looked != self._board.version
        )
        return status, SOON if figures.loading or waits else LATER

    async def _require_bucket(self, access: Access, bucket: str) -> None:
        try:
            await self._daemons.ask(access, "HEAD", f"/{quote(bucket, safe='')}")
        except DaemonError as error:
            if error.status != 404:
                raise
            raise ResourceError(f"source.uri: the mesh has no bucket {bucket!r}") from error

    async def _present(self, access: Access, bucket: str) -> dict[str, Any] | None:
        """The bucket with an origin; None: there is none. Raises DaemonError where it is an ordinary one."""
        try:
            found: dict[str, Any] = await self._daemons.ask(
                access, "GET", f"/-/buckets/{quote(bucket, safe='')}"
            )
        except DaemonError as error:
            if error.code != "NoSuchBucket":
                raise
            return None
        return found

    async def _ensure(
        self, document: Manifest, spec: MeshDatasetSpec, cluster: Cluster, access: Access, bucket: str
    ) -> tuple[bool, tuple[str, ...]]:
        """The bucket, as the spec has it: whether the source is to be read anew; its homes."""
        metadata = document["metadata"]
        credentials = ""
        if spec.source.secret_ref is not None:
            credentials = metadata["name"]
            await self._hand_over(document, spec.source.secret_ref.name, cluster)
        present = await self._present(access, bucket)
        read = (metadata.get("annotations") or {}).get(REVISION)
        revision = spec.source.revision or ""
        anew = present is not None and read is not None and read != revision
        wanted = origin(spec, credentials, anew=anew)
        target = f"/-/buckets/{quote(bucket, safe='')}"
        if present is None:
            await self._daemons.ask(access, "PUT", target, wanted)
            await self._recorder.say(document, "BucketMade", f"s3://{bucket} stands for {spec.source.uri}")
        elif present["origin"]["url"] != spec.source.uri:
            raise ResourceError(f"bucket: s3://{bucket} stands for {present['origin']['url']} already")
        else:
            change = changes(present["origin"], wanted)
            if change:
                await self._daemons.ask(access, "PATCH", target, change)
        if read is None:
            await self._note(document, {REVISION: revision})
        return anew, tuple(present["origin"].get("homes") or ()) if present is not None else ()

    async def _note(self, document: Manifest, annotations: dict[str, str | None]) -> None:
        metadata = document["metadata"]
        change = {"metadata": {"annotations": annotations}}
        await self._kube.patch(self.kind, metadata["name"], metadata["namespace"], change)

    async def _hand_over(self, document: Manifest, secret: str, cluster: Cluster) -> None:
        """The source's keys, into the Secret that the daemons have mounted: one entry a dataset."""
        metadata = document["metadata"]
        found = await self._kube.get("Secret", secret, metadata["namespace"])
        if found is None:
            raise ResourceError(f"source.secretRef: there is no Secret {secret!r}")
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

    async def _jobs(self, access: Access) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._daemons.ask(access, "GET", "/-/jobs"))["jobs"]
        return found

    async def _warm(
        self,
        document: Manifest,
        spec: MeshDatasetSpec,
        access: Access,
        jobs: list[dict[str, Any]],
        *,
        anew: bool,
    ) -> list[dict[str, Any]]:
        """What is pinned is loaded; of another revision, all is compared with the source. Everything else
        warms by being read, and by MeshLoads."""
        last = jobs[0] if jobs else None
        if last is not None and last["state"] in _RUNS:
            return jobs
        revision = spec.source.revision or ""
        reading, _, run = (document["metadata"].get("annotations") or {}).get(READING, "").rpartition("@")
        begun = anew and bool(run) and reading == revision
        if begun and last is not None and last["run"] >= int(run) and last["state"] == "done":
            await self._note(document, {REVISION: revision, READING: None})
            return jobs
        since = self._now() - last["ended_ms"] / 1000 if last is not None else float("inf")
        if (
            (anew and not begun)
            or (spec.placement.pin and since > _again(spec, last))
            or (begun and since > _AGAIN)
        ):
            bucket, _ = place(spec, document["metadata"]["name"])
            wanted = {"kind": "prefetch", "source": f"s3://{bucket}/"}
            job = await self._daemons.ask(access, "POST", "/-/jobs", wanted)
            if anew:
                await self._note(document, {READING: f"{revision}@{job['run']}"})
            return [job, *jobs]
        return jobs

    async def _holdings(self, nodes: list[Access], bucket: str, prefix: str) -> list[Holding]:
        found = []
        for each in nodes:
            told = await self._daemons.ask(each, "GET", residence(bucket, prefix))
            there = told["objects"], told["bytes"], told["capacity"], told["used"]
            lately = told.get("hits", 0), told.get("misses", 0), told.get("idle_s", 0.0)
            found.append(Holding(told["node"], *there, *lately))
        return found

    def _is_idle(self, spec: MeshDatasetSpec, figures: Figures, holdings: list[Holding]) -> bool:
        """Whether what is cached goes, because nobody has read it for so long."""
        after = spec.retention.idle_seconds
        if after is None or figures.loading or not any(each.bytes for each in holdings):
            return False
        return all(each.idle >= after for each in holdings)

    async def _let_go(
        self, document: Manifest, nodes: list[Access], bucket: str, holdings: list[Holding]
    ) -> list[Holding]:
        freed = sum(each.bytes for each in holdings)
        for each in nodes:
            await self._daemons.ask(each, "DELETE", residence(bucket, ""))
        idle = round(min(each.idle for each in holdings))
        await self._recorder.say(document, "Idle", f"nobody read it for {idle} s: {freed} bytes are let go")
        return [replace(each, objects=0, bytes=0) for each in holdings]

    def _failed(
        self, document: Manifest, whether: bool | None, reason: str, message: str, phase: str
    ) -> dict[str, Any]:
        found: list[tuple[str, bool | None, str, str]] = [
            ("SourceReachable", whether, reason, message),
            ("Healthy", False, reason, message),
        ]
        before = (document.get("status") or {}).get("conditions") or ()
        told = self.conditions(document, found)
        kept = [each for each in before if each["type"] in ("Placed", "Warm")]
        return {
            "observedGeneration": document["metadata"].get("generation"),
            "phase": phase,
            "conditions": [*told, *kept],
        }


def _again(spec: MeshDatasetSpec, last: Manifest | None) -> float:
    """Seconds from one load of a pinned dataset to the next."""
    if last is None:
        return 0.0
    if last["state"] != "done":
        return _AGAIN
    return max(spec.refresh.interval_seconds, _AGAIN) if spec.refresh.policy == "Interval" else float("inf")
