"""Volumes as the spec has them now: larger ones, and those to come of another StorageClass.

The templates of claims in a StatefulSet never change. One whose claims are to be others is deleted without
its pods, and made anew; the new one takes the pods up again.

Law: no pod is ended here, no volume becomes smaller or goes. What a claim is refused is said, and holds
nothing else up.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from lightkube import ApiError

from meshoperator.meshes import CLUSTER_LABEL, POOL_LABEL
from meshoperator.resources import ResourceError
from meshoperator.sizes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshoperator.kube import Kube
    from meshoperator.meshes import Cluster, Manifest
    from meshoperator.recording import Recorder
    from meshoperator.resources.cluster import VolumeClaim

_REFUSALS: Final = (403, 422)
_LOOKS, _PAUSE = 25, 0.2
_OTHER_POOL: Final = (
    "Or add a pool as you want it, and take this one out of the spec when that one is ready: it is drained"
)
Claims = dict[str, tuple[str, str | None]]  # tier → size, StorageClass


class Volumes:
    """Of MeshClusters."""

    def __init__(self, kube: Kube, recorder: Recorder) -> None:
        self._kube, self._recorder = kube, recorder

    def __repr__(self) -> str:
        return f"<Volumes of {self._kube!r}>"

    async def run(
        self, cluster: Cluster, sets: Iterable[Manifest], document: Manifest
    ) -> tuple[tuple[str, ...], frozenset[str]]:
        """What is not done yet, in sentences, and pools whose StatefulSet is not to be applied now. Raises
        ResourceError for what cannot be."""
        held = set()
        for each in sets:
            name, pool = each["metadata"]["name"], each["metadata"]["labels"].get(POOL_LABEL, "")
            said = changes(cluster, each)
            if said and not each["metadata"].get("deletionTimestamp"):
                await self._recorder.say(document, "Expanding", f"pool {pool}: {'; '.join(said)}")
                await self._kube.delete("StatefulSet", name, cluster.namespace, orphans=True)
            if (said or each["metadata"].get("deletionTimestamp")) and not await self._gone(cluster, name):
                held.add(pool)
        waiting = [f"the StatefulSet of pool {pool} is made anew; its pods stay" for pool in sorted(held)]
        return (*waiting, *await self._expand(cluster, document)), frozenset(held)

    async def _gone(self, cluster: Cluster, name: str) -> bool:
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
            name, wanted = each["metadata"]["name"], _wanted(cluster, each)
            if wanted is None or each["metadata"].get("deletionTimestamp"):
                continue
            if bytes_of(wanted.size) > (_bytes(each["spec"]["resources"]["requests"]["storage"]) or 0):
                change = {"spec": {"resources": {"requests": {"storage": wanted.size}}}}
                try:
                    await self._kube.patch("PersistentVolumeClaim", name, cluster.namespace, change)
                except ApiError as error:
                    if error.status.code not in _REFUSALS:
                        raise
                    said = f"{name} cannot grow to {wanted.size}: {error.status.message}"
                    if said[:200] not in before:
                        await self._recorder.say(document, "Refused", said)
                    found.append(said)
                    continue
            if growing := _growing(each, wanted.size):
                found.append(growing)
        return found


def changes(cluster: Cluster, found: Manifest) -> list[str]:
    """What of the claims of a StatefulSet is to be otherwise. Raises ResourceError for what cannot be."""
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
            f"pool {pool.name}: its daemons have volumes for {_names(there)}, and cannot have them for "
            f"{_names(wanted)}: pods do not take up further volumes. {_OTHER_POOL}"
        )
    for name, claim in wanted.items():
        size, kind = there[name]
        if bytes_of(claim.size) < bytes_of(size):
            raise ResourceError(
                f"pool {pool.name}, tier {name}: its volumes have {size}, and do not become smaller "
                f"({claim.size}). Set the size back. {_OTHER_POOL}"
            )
        if bytes_of(claim.size) > bytes_of(size):
            said.append(f"tier {name}: {size} → {claim.size}")
        if claim.storage_class != kind:
            said.append(
                f"tier {name}: new volumes are of {claim.storage_class or 'the default class'}; those that "
                "are there stay"
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


def _wanted(cluster: Cluster, claim: Manifest) -> VolumeClaim | None:
    """What the spec says of a claim; None for one that it has no word for."""
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
    """None for one written as nobody here does."""
    try:
        return bytes_of(quantity)
    except ValueError:
        return None


def _growing(claim: Manifest, size: str) -> str:
    """Whether a bound volume is not as large as it should be yet, and what the storage says of it."""
    status = claim.get("status") or {}
    capacity = (status.get("capacity") or {}).get("storage")
    there = _bytes(capacity or "")
    if there is None or there >= bytes_of(size):
        return ""
    said = [str(each.get("message") or each["type"]) for each in status.get("conditions") or ()]
    return f"{claim['metadata']['name']} grows from {capacity} to {size}" + "".join(
        f": {text}" for text in said[-1:]
    )


def _progressing(document: Mapping[str, Any]) -> str:
    found = (document.get("status") or {}).get("conditions") or ()
    return next((str(each["message"]) for each in found if each["type"] == "Progressing"), "")
