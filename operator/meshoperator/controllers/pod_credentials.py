"""Credentials of training pods: one owned Secret per pod, with temporary keys for its datasets alone.

Law: a pod gets what its own namespace may read, whatever its annotations say; a Secret not owned by the
pod is never touched. Keys are renewed at half their life while the pod lives, and the Secret is deleted
with the pod.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from meshoperator import metrics
from meshoperator.cluster_model import Cluster
from meshoperator.daemon_client import DaemonError, UnreachableError
from meshoperator.planners.dataset_model import dataset_info, shared_with
from meshoperator.planners.pod_admission import (
    KEY_NAMES,
    LABEL,
    MOUNT,
    SECRET,
    credentials_policy,
    requested_datasets,
)
from meshoperator.resources import GROUP, MeshClusterSpec, ResourceError, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from meshoperator.cluster_model import Manifest
    from meshoperator.daemon_client import DaemonClient
    from meshoperator.kube.client import Kube
    from meshoperator.planners.pod_admission import DatasetInfo
    from meshoperator.settings import OperatorSettings

_log = logging.getLogger(__name__)
LIFE: Final = 12 * 3600
"""Seconds for which keys are valid."""
EXPIRES: Final = f"{GROUP}/expires"
_PART: Final = {"app.kubernetes.io/part-of": "shardmesh", "app.kubernetes.io/component": "credentials"}
_CONFIG: Final = f"[default]\nregion = us-east-1\ncredential_process = cat {MOUNT}/credentials.json\n"
_OVER: Final = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class ReadableDataset:
    """A MeshDataset that a namespace may read: its mesh, and what a pod needs to know."""

    namespace: str
    cluster: str
    known: DatasetInfo


class DatasetCatalog:
    """Looks up the datasets that pods of a namespace may read."""

    def __init__(self, kube: Kube, settings: OperatorSettings) -> None:
        self._kube, self._settings = kube, settings

    async def readable_datasets(self, namespace: str, names: Iterable[str]) -> dict[str, ReadableDataset]:
        """Return the datasets by name; the namespace's own take precedence over shared ones. Raises
        ApiError."""
        missing, found = set(names), dict[str, ReadableDataset]()
        clusters: dict[tuple[str, str], Cluster | None] = {}
        for each in await self._kube.list_all("MeshDataset", namespace):
            await self._take(each, missing, found, clusters)
        if missing and not self._settings.namespaces:
            for each in await self._kube.list_all("MeshDataset"):
                if shared_with(each, namespace):
                    await self._take(each, missing, found, clusters)
        return found

    async def _take(
        self,
        document: Manifest,
        missing: set[str],
        found: dict[str, ReadableDataset],
        clusters: dict[tuple[str, str], Cluster | None],
    ) -> None:
        metadata = document["metadata"]
        if metadata["name"] not in missing or metadata.get("deletionTimestamp"):
            return
        place = metadata["namespace"], document["spec"]["clusterRef"]
        if place not in clusters:
            clusters[place] = await self._cluster(*place)
        cluster = clusters[place]
        if cluster is None:
            return
        try:
            found[metadata["name"]] = ReadableDataset(*place, dataset_info(document, cluster))
        except ResourceError as error:
            _log.warning("MeshDataset %s/%s: %s", metadata["namespace"], metadata["name"], error)
            return
        missing.discard(metadata["name"])

    async def _cluster(self, namespace: str, name: str) -> Cluster | None:
        document = await self._kube.get("MeshCluster", name, namespace)
        if document is None:
            return None
        spec = parse(MeshClusterSpec, document["spec"])
        return Cluster(name, namespace, document["metadata"]["uid"], spec)


class PodCredentials:
    """Makes and renews the Secrets; one per operator. `now` returns seconds since 1970."""

    def __init__(
        self, kube: Kube, daemons: DaemonClient, catalogue: DatasetCatalog, now: Callable[[], float]
    ) -> None:
        self._kube, self._daemons, self._catalogue, self._now = kube, daemons, catalogue, now

    def __repr__(self) -> str:
        return f"<PodCredentials {self._daemons!r}>"

    async def renew_all(self, namespace: str | None = None) -> int:
        """Renew the keys of all training pods; return for how many that failed. Raises ApiError."""
        failed = 0
        for pod in await self._kube.list_all("Pod", namespace, {LABEL: None}):
            try:
                await self.renew_pod(pod)
            except (DaemonError, UnreachableError, ResourceError) as error:
                failed += 1
                _log.warning("no keys for pod %s: %s", pod["metadata"]["name"], error)
        return failed

    async def renew_pod(self, pod: Manifest) -> bool:
        """Give a pod keys if it needs new ones; return whether it got some. Raises DaemonError,
        UnreachableError, ResourceError, ApiError."""
        metadata = pod["metadata"]
        secret = (metadata.get("annotations") or {}).get(SECRET)
        if not secret or metadata.get("deletionTimestamp"):
            return False
        if (pod.get("status") or {}).get("phase") in _OVER:
            return False
        present = await self._kube.get("Secret", secret, metadata["namespace"])
        if present is not None and not self._is_due(present, metadata["uid"]):
            return False
        found = await self._catalogue.readable_datasets(metadata["namespace"], requested_datasets(pod))
        datasets = [found[name] for name in requested_datasets(pod) if name in found]
        if not datasets or len({(each.namespace, each.cluster) for each in datasets}) > 1:
            return False
        first = datasets[0]
        _, access = await self._daemons.locate_mesh(first.namespace, first.cluster)
        asked = {
            "duration_seconds": LIFE,
            "policy": credentials_policy([each.known for each in datasets]),
            "name": metadata["name"][:64],
        }
        keys = await self._daemons.request_json(access, "POST", "/-/sts", asked)
        await self._kube.apply(_secret(pod, secret, keys, access.authority))
        metrics.keys.inc()
        return True

    def _is_due(self, secret: Manifest, uid: str) -> bool:
        """Return whether a Secret belongs to the pod and its keys are past half their life."""
        metadata = secret["metadata"]
        if uid not in {each.get("uid") for each in metadata.get("ownerReferences") or ()}:
            return False  # owned by someone else
        expires = (metadata.get("annotations") or {}).get(EXPIRES, "1970-01-01T00:00:00Z")
        ends = datetime.strptime(expires, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        return ends.timestamp() - self._now() < LIFE / 2


def _secret(pod: Manifest, name: str, keys: dict[str, Any], authority: str) -> Manifest:
    metadata = pod["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
    values = (keys["AccessKeyId"], keys["SecretAccessKey"], keys["SessionToken"])
    data = dict(zip(KEY_NAMES, values, strict=True))
    data |= {"credentials.json": json.dumps(keys), "config": _CONFIG}
    if authority:
        data["ca.crt"] = authority
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": metadata["namespace"],
            "labels": _PART,
            "annotations": {EXPIRES: keys["Expiration"]},
            "ownerReferences": [owner],
        },
        "type": "Opaque",
        "stringData": data,
    }
