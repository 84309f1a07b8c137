"""Usage in the statuses of MeshNodes and MeshClusters: bytes held, and how full the disks are.

Law: a value that is not reported keeps its last value; nothing waits for a silent daemon. Only changes of at
least one percent are written.
"""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import httpx2
from lightkube import ApiError

from meshoperator.daemon_client import DaemonError, UnreachableError
from meshoperator.resources import MeshClusterSpec, ResourceError, parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshoperator.cluster_model import Manifest
    from meshoperator.daemon_client import DaemonClient, MeshAccess
    from meshoperator.kube.client import Kube
    from meshoperator.resources.cluster import NodePool
    from meshoperator.resources.cluster_disks import Tier

_log = logging.getLogger(__name__)
_CHANGE: Final = 0.01
_FAILURES: Final = (ApiError, httpx2.HTTPError, DaemonError, UnreachableError, ResourceError)


class UsageUpdater:
    """Updates the statuses; one per operator."""

    def __init__(self, kube: Kube, daemons: DaemonClient) -> None:
        self._kube, self._daemons = kube, daemons

    def __repr__(self) -> str:
        return f"<UsageUpdater {self._daemons!r}>"

    async def update_statuses(self, namespaces: Sequence[str] = ()) -> int:
        """Update every mesh once; return how many statuses were written. Raises ApiError."""
        changed = 0
        for namespace in namespaces or (None,):
            for document in await self._kube.list_all("MeshCluster", namespace):
                if document["metadata"].get("deletionTimestamp"):
                    continue
                try:
                    changed += await self._cluster(document)
                except _FAILURES as error:
                    _log.info("no usage of MeshCluster %s: %s", document["metadata"]["name"], error)
        return changed

    async def _cluster(self, document: Manifest) -> int:
        metadata, spec = document["metadata"], parse(MeshClusterSpec, document["spec"])
        name, namespace = metadata["name"], metadata["namespace"]
        _, access = await self._daemons.locate_mesh(namespace, name)
        usage = await self._read_usage(access)
        pools = {pool.name: pool for pool in spec.node_pools}
        changed, every = 0, list[dict[str, Any]]()
        for node in await self._kube.list_all("MeshNode", namespace):
            found, pool = usage.get(node["spec"]["nodeId"]), pools.get(node["spec"]["pool"])
            if node["spec"]["clusterRef"] != name or pool is None:
                continue
            before = node.get("status") or {}
            status = before if found is None else node_usage(found, pool)
            every += status.get("tiers") or ()
            if found is not None and is_changed(before, status):
                await self._kube.set_status("MeshNode", node["metadata"]["name"], namespace, status)
                changed += 1
        whole = {"tiers": total_usage(every)}
        if is_changed(document.get("status") or {}, whole):
            await self._kube.set_status("MeshCluster", name, namespace, whole)
            changed += 1
        return changed

    async def _read_usage(self, access: MeshAccess) -> dict[str, dict[str, Any]]:
        found = {}
        for each in await self._daemons.access_daemons(access):
            try:
                usage = await self._daemons.request_json(each, "GET", "/-/residence/")
            except (DaemonError, UnreachableError) as error:
                _log.info("no usage of a daemon: %s", error)
                continue
            found[str(usage["node"])] = usage
        return found


def node_usage(usage: Mapping[str, Any], pool: NodePool) -> dict[str, Any]:
    """Return the usage for a MeshNode status."""
    return {
        "objects": usage["objects"],
        "bytes": usage["bytes"],
        "cachedBytes": usage["cached_bytes"],
        "tiers": [
            {
                "name": tier.name,
                "class": tier.class_,
                "capacity": disk["total"],
                "used": disk["total"] - disk["free"],
            }
            for tier, disk in _tier_disks(pool, usage["disks"])
        ],
    }


def _tier_disks(
    pool: NodePool, disks: Sequence[Mapping[str, Any]]
) -> Iterable[tuple[Tier, Mapping[str, Any]]]:
    """Return the tiers of a daemon's disks, which it lists in the order of the pool's tiers. While one is out
    of service, or a pool with other tiers is rolled out, there are not as many: then their paths tell."""
    tiers = pool.data_tiers
    if len(disks) == len(tiers):
        return zip(tiers, disks, strict=True)
    by_name = {PurePosixPath(disk["path"]).parent.name: disk for disk in disks}
    return [(tier, by_name[tier.name]) for tier in tiers if tier.name in by_name]


def total_usage(tiers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sum usage by tier name over all daemons."""
    capacity, used = Counter[str](), Counter[str]()
    for tier in tiers:
        capacity[tier["name"]] += tier.get("capacity", 0)
        used[tier["name"]] += tier.get("used", 0)
    return [{"name": name, "capacity": capacity[name], "used": used[name]} for name in sorted(capacity)]


def is_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether usage needs writing: a different tier, or a value that changed by a percent."""
    return any(_is_changed(before.get(name), value) for name, value in after.items())


def _is_changed(old: Any, new: Any) -> bool:
    if old is None:
        return bool(new != [])
    if isinstance(new, int) and isinstance(old, int):
        return bool(abs(new - old) > _CHANGE * max(old, new))
    if isinstance(new, dict) and isinstance(old, dict):
        return old.keys() != new.keys() or any(_is_changed(old[name], new[name]) for name in new)
    if isinstance(new, list) and isinstance(old, list):
        return len(old) != len(new) or any(map(_is_changed, old, new))
    changed: bool = old != new
    return changed
