"""Storage of a pool: volume growth, StorageClass changes, and node labels that tie daemons to disks.

Law: ends no pod, and shrinks or deletes no volume. Claim templates of a StatefulSet are immutable, so it is
deleted without its pods and created again. A node keeps its label while a daemon of the pool runs there,
while one that ran there last is expected back, and while the map is unknown.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from lightkube import ApiError

from meshoperator.cluster_model import CLUSTER_LABEL, DISKS, POOL_LABEL, cluster_mark
from meshoperator.planners.disk_affinity import needs_directory
from meshoperator.resources import ResourceError
from meshoperator.resources.spec_types import parse_quantity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshoperator.cluster_model import Cluster, Manifest
    from meshoperator.kube.client import Kube
    from meshoperator.kube.event_recorder import EventRecorder
    from meshoperator.planners.cluster_state import ClusterState, Pod
    from meshoperator.resources.cluster_disks import VolumeClaim


LabelChanges = dict[str, dict[str, str | None]]


async def label_nodes(kube: Kube, cluster: Cluster, sight: ClusterState, nodes: Iterable[Manifest]) -> None:
    """Label the Kubernetes nodes that hold disks; do nothing without permission to read nodes. `nodes`:
    MeshNodes."""
    wanted = disk_labels(cluster, sight, nodes)
    there = {place.name: dict(place.labels) for place in cluster.places or ()}
    for name, labels in label_changes(cluster.mark, there, wanted).items():
        await kube.patch("Node", name, None, {"metadata": {"labels": labels}})


async def unlabel_nodes(kube: Kube, namespace: str, cluster: str) -> None:
    """Remove the labels of a mesh whose data is deleted."""
    every = await kube.list_all("Node")
    there = {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in every}
    for name, labels in label_changes(cluster_mark(namespace, cluster), there, {}).items():
        await kube.patch("Node", name, None, {"metadata": {"labels": labels}})


def disk_labels(cluster: Cluster, sight: ClusterState, nodes: Iterable[Manifest]) -> dict[str, set[str]]:
    """Return, by label, the Kubernetes nodes that should have it."""
    at = {each["spec"]["nodeId"]: (each.get("status") or {}).get("node") or "" for each in nodes}
    at |= {pod.name: pod.node for pod in sight.pods if pod.node}
    waiting = {pod.name for pod in sight.pods if not pod.ready}  # where such a pod is says nothing
    at |= {
        name: machine
        for name, machine in sight.machines.items()
        if machine and (name in waiting or name not in at) and needs_directory(sight.map, name)
    }
    expected = None if sight.map is None else {n.node_id for n in sight.map.nodes if n.state != "down"}
    running = {pod.name for pod in sight.pods if pod.node}
    found = {}
    for pool in cluster.spec.node_pools:
        if any(tier.host_path for tier in pool.tiers):
            head = f"{cluster.name}-{pool.name}"
            found[cluster.disks_label(pool.name)] = {
                place
                for name, place in at.items()
                if name.rpartition("-")[0] == head
                and (expected is None or name in running or name in expected)
            } - {""}
    return found


def label_changes(mark: str, there: dict[str, dict[str, str]], wanted: dict[str, set[str]]) -> LabelChanges:
    """Return, by Kubernetes node, labels to add and (None) to remove; labels of other meshes stay."""
    found: LabelChanges = {}
    for name, labels in there.items():
        own = {key for key in labels if key.startswith(DISKS) and key.endswith(f".{mark}")}
        come = {key for key, places in wanted.items() if name in places}
        change: dict[str, str | None] = dict.fromkeys(come - own, "true") | dict.fromkeys(own - come)
        if change:
            found[name] = change
    return found


_REFUSALS: Final = (403, 422)
_LOOKS, _PAUSE = 25, 0.2
_OTHER_POOL: Final = (
    "Or add a new pool, and remove this one from the spec once the new one is ready: it is drained"
)
Claims = dict[str, tuple[str, str | None]]  # tier → size, StorageClass


class VolumeClaims:
    """Grows the volumes of MeshClusters, and changes their StorageClass for new ones."""

    def __init__(self, kube: Kube, recorder: EventRecorder) -> None:
        self._kube, self._recorder = kube, recorder

    def __repr__(self) -> str:
        return f"<VolumeClaims of {self._kube!r}>"

    async def reconcile_claims(
        self, cluster: Cluster, sets: Iterable[Manifest], document: Manifest
    ) -> tuple[tuple[str, ...], frozenset[str]]:
        """Return what is still pending, in sentences, and the pools whose StatefulSet must not be applied
        now. Raises ResourceError for a change that is impossible."""
        held = set()
        for each in sets:
            name, pool = each["metadata"]["name"], each["metadata"]["labels"].get(POOL_LABEL, "")
            said = claim_changes(cluster, each)
            if said and not each["metadata"].get("deletionTimestamp"):
                await self._recorder.record_event(document, "Expanding", f"pool {pool}: {'; '.join(said)}")
                await self._kube.delete("StatefulSet", name, cluster.namespace, orphans=True)
            if (said or each["metadata"].get("deletionTimestamp")) and not await self._is_gone(cluster, name):
                held.add(pool)
        waiting = [
            f"the StatefulSet of pool {pool} is being recreated; its pods stay" for pool in sorted(held)
        ]
        return (*waiting, *await self._expand(cluster, document)), frozenset(held)

    async def pods_without_claims(self, cluster: Cluster, pods: Iterable[Pod]) -> list[str]:
        """Return the pods that will never be scheduled because a claim of theirs is gone.

        A StatefulSet creates claims with a pod. It may create the pod while the claim of the pod before still
        exists and is ending, as after `Decommissioned`; what it does not do is create a claim for a pod that
        is there.
        """
        claims = {
            pool.name: [tier.name for tier in pool.tiers if tier.volume_claim]
            for pool in cluster.spec.node_pools
        }
        asked = [pod for pod in pods if not pod.scheduled and not pod.leaving and claims.get(pod.pool)]
        if not asked:
            return []
        found = await self._kube.list_all(
            "PersistentVolumeClaim", cluster.namespace, {CLUSTER_LABEL: cluster.name}
        )
        there = {each["metadata"]["name"] for each in found}
        return [
            pod.name for pod in asked if any(f"{tier}-{pod.name}" not in there for tier in claims[pod.pool])
        ]

    async def _is_gone(self, cluster: Cluster, name: str) -> bool:
        for _ in range(_LOOKS):
            found = await self._kube.list_all("StatefulSet", cluster.namespace, {CLUSTER_LABEL: cluster.name})
            if all(each["metadata"]["name"] != name for each in found):
                return True
            await asyncio.sleep(_PAUSE)
        return False

    async def _expand(self, cluster: Cluster, document: Manifest) -> list[str]:
        if not any(tier.volume_claim for pool in cluster.spec.node_pools for tier in pool.tiers):
            return []
        found = []
        before = _progressing(document)
        for each in await self._kube.list_all(
            "PersistentVolumeClaim", cluster.namespace, {CLUSTER_LABEL: cluster.name}
        ):
            name, wanted = each["metadata"]["name"], _wanted_claim(cluster, each)
            if wanted is None or each["metadata"].get("deletionTimestamp"):
                continue
            if parse_quantity(wanted.size) > (_bytes(each["spec"]["resources"]["requests"]["storage"]) or 0):
                change = {"spec": {"resources": {"requests": {"storage": wanted.size}}}}
                try:
                    await self._kube.patch("PersistentVolumeClaim", name, cluster.namespace, change)
                except ApiError as error:
                    if error.status.code not in _REFUSALS:
                        raise
                    said = f"{name} cannot grow to {wanted.size}: {error.status.message}"
                    if said[:200] not in before:
                        await self._recorder.record_event(document, "Refused", said)
                    found.append(said)
                    continue
            if growing := _growing(each, wanted.size):
                found.append(growing)
        return found


def claim_changes(cluster: Cluster, found: Manifest) -> list[str]:
    """Return the changes to the claims of a StatefulSet. Raises ResourceError for an impossible change."""
    pool = next(
        (
            each
            for each in cluster.spec.node_pools
            if each.name == found["metadata"]["labels"].get(POOL_LABEL)
        ),
        None,
    )
    if pool is None:
        return []
    wanted = {tier.name: tier.volume_claim for tier in pool.tiers if tier.volume_claim}
    there, said = _claims(found), list[str]()
    if wanted.keys() != there.keys():
        raise ResourceError(
            f"pool {pool.name}: its daemons have volumes for {_names(there)} and cannot change to "
            f"{_names(wanted)}: a running pod gets no further volumes. {_OTHER_POOL}"
        )
    for name, claim in wanted.items():
        size, kind = there[name]
        if parse_quantity(claim.size) < parse_quantity(size):
            raise ResourceError(
                f"pool {pool.name}, tier {name}: volumes of {size} cannot shrink to {claim.size}. "
                f"Restore the size. {_OTHER_POOL}"
            )
        if parse_quantity(claim.size) > parse_quantity(size):
            said.append(f"tier {name}: {size} → {claim.size}")
        if claim.storage_class != kind:
            said.append(
                f"tier {name}: new volumes use {claim.storage_class or 'the default class'}; existing "
                "volumes stay"
            )
    return said


def _names(claims: Mapping[str, object]) -> str:
    return ", ".join(f"tier {name}" for name in sorted(claims)) or "no tier"


def _claims(found: Manifest) -> Claims:
    return {
        each["metadata"]["name"]: (
            each["spec"]["resources"]["requests"]["storage"],
            each["spec"].get("storageClassName"),
        )
        for each in found["spec"].get("volumeClaimTemplates") or ()
    }


def _wanted_claim(cluster: Cluster, claim: Manifest) -> VolumeClaim | None:
    """Return what the spec says about a claim, or None if it does not name the claim."""
    name, labels = claim["metadata"]["name"], claim["metadata"]["labels"]
    for pool in cluster.spec.node_pools:
        for tier in pool.tiers:
            head, _, ordinal = name.rpartition("-")
            if (
                pool.name == labels.get(POOL_LABEL)
                and head == f"{tier.name}-{cluster.name}-{pool.name}"
                and ordinal.isdecimal()
            ):
                return tier.volume_claim
    return None


def _bytes(quantity: str) -> int | None:
    """Parse a quantity; return None for a form that this project does not write."""
    try:
        return parse_quantity(quantity)
    except ValueError:
        return None


def _growing(claim: Manifest, size: str) -> str:
    """Describe a bound volume that is still growing, with the storage's conditions; empty if it is not."""
    status = claim.get("status") or {}
    capacity = (status.get("capacity") or {}).get("storage")
    there = _bytes(capacity or "")
    if there is None or there >= parse_quantity(size):
        return ""
    said = [str(each.get("message") or each["type"]) for each in status.get("conditions") or ()]
    return f"{claim['metadata']['name']} grows from {capacity} to {size}" + "".join(
        f": {text}" for text in said[-1:]
    )


def _progressing(document: Mapping[str, Any]) -> str:
    found = (document.get("status") or {}).get("conditions") or ()
    return next((str(each["message"]) for each in found if each["type"] == "Progressing"), "")
