"""Teardown of a MeshCluster: stops its daemons in order, then deletes its objects.

Law: the finalizer waits for the daemons only, reports that, and gives up after a limit. `Retain` keeps
volumes, keys and the control store, so a MeshCluster of the same name finds everything again.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from meshoperator import metrics
from meshoperator.cluster_model import CLUSTER_LABEL, STORE_LABEL, origins_secret
from meshoperator.controllers import storage
from meshoperator.planners.status import conditions
from meshoperator.resources import GROUP
from meshwire.phrases import word_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshoperator.cluster_model import Manifest
    from meshoperator.kube.client import Kube
    from meshoperator.kube.event_recorder import EventRecorder
    from meshoperator.settings import OperatorSettings

FINALIZER: Final = f"{GROUP}/daemons"


class Teardown:
    """Adds the finalizer and carries out deletions."""

    def __init__(
        self, kube: Kube, settings: OperatorSettings, recorder: EventRecorder, now: Callable[[], str]
    ) -> None:
        self._kube, self._settings, self._recorder, self._now = kube, settings, recorder, now

    def __repr__(self) -> str:
        return f"<Teardown of {self._kube!r}>"

    async def add_finalizer(self, document: Manifest) -> None:
        """Add the finalizer, so that a deleted MeshCluster stays until its daemons have ended."""
        there = document["metadata"].get("finalizers") or []
        if FINALIZER not in there:
            await self._write(document, [*there, FINALIZER])

    async def reconcile_deletion(self, document: Manifest) -> float | None:
        """Run one pass; return the seconds until the next, or None when there is nothing left to wait for."""
        metadata, finalizers = document["metadata"], document["metadata"].get("finalizers") or []
        name, namespace, labels = (
            metadata["name"],
            metadata["namespace"],
            {CLUSTER_LABEL: metadata["name"]},
        )
        if FINALIZER not in finalizers:
            metrics.forget_cluster(namespace, name)
            return None
        for each in await self._kube.list_all("StatefulSet", namespace, labels):
            if not each["metadata"].get("deletionTimestamp"):
                await self._kube.delete("StatefulSet", each["metadata"]["name"], namespace)
        pods = [each["metadata"]["name"] for each in await self._kube.list_all("Pod", namespace, labels)]
        if pods and not self._overdue(metadata["deletionTimestamp"]):
            await self._tell(document, f"waiting for {', '.join(sorted(pods)[:10])} to end")
            return self._settings.eager_seconds
        if pods:
            await self._recorder.record_event(
                document,
                "DeletionForced",
                f"deleted although {word_list(sorted(pods))} did not stop within "
                f"{self._settings.deletion_seconds:.0f} s; if a pod is on a lost machine, run "
                f"kubectl -n {namespace} delete pod NAME --force",
            )
        if (document["spec"].get("deletionPolicy") or "Retain") == "Delete":
            await self._remove(document, namespace, labels)
        await self._write(document, [each for each in finalizers if each != FINALIZER])
        ended = "its daemons were not waited for any longer" if pods else "its daemons have stopped"
        await self._recorder.record_event(document, "Deleted", ended)
        metrics.forget_cluster(namespace, name)
        return None

    async def _remove(self, document: Manifest, namespace: str, labels: dict[str, str]) -> None:
        """Delete volumes, the control store, and keys that the operator created."""
        name = document["metadata"]["name"]
        for claim in await self._kube.list_all("PersistentVolumeClaim", namespace, labels):
            await self._kube.delete("PersistentVolumeClaim", claim["metadata"]["name"], namespace)
        if self._settings.reads_nodes:
            await storage.unlabel_nodes(self._kube, namespace, name)
        for kind in ("ConfigMap", "Secret", "Lease"):
            await self._kube.delete_all(kind, namespace, {STORE_LABEL: name})
        if not (document["spec"].get("auth") or {}).get("rootSecretRef"):
            await self._kube.delete("Secret", f"{name}-root", namespace)
        await self._kube.delete("Secret", origins_secret(name), namespace)

    async def _tell(self, document: Manifest, message: str) -> None:
        found: list[tuple[str, bool | None, str, str]] = [("Progressing", True, "Deleting", message)]
        by_type = {each["type"]: each for each in conditions(document, found, self._now())}
        before = (document.get("status") or {}).get("conditions") or ()
        kept = [each for each in before if each["type"] not in by_type]
        status: dict[str, Any] = {"phase": "Deleting", "conditions": [*kept, *by_type.values()]}
        await self._kube.set_status(
            "MeshCluster", document["metadata"]["name"], document["metadata"]["namespace"], status
        )

    def _overdue(self, since: str) -> bool:
        waited = datetime.fromisoformat(self._now()) - datetime.fromisoformat(since)
        return waited > timedelta(seconds=self._settings.deletion_seconds)

    async def _write(self, document: Manifest, finalizers: list[str]) -> None:
        """Replace the finalizers. Raises ApiError 409 if the object changed since it was read."""
        metadata = document["metadata"]
        change = {"metadata": {"finalizers": finalizers, "resourceVersion": metadata["resourceVersion"]}}
        await self._kube.patch("MeshCluster", metadata["name"], metadata["namespace"], change)
