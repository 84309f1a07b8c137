"""Machines of daemons: on which Kubernetes node a new pod of a daemon has to run, and records to forget.

Law: reads what daemons recorded and what the map says; `planners.disk_affinity` decides. A record is
emptied only when its Kubernetes node no longer exists.
"""

from __future__ import annotations

import json
import logging
import secrets
from typing import TYPE_CHECKING, Any, Final

from meshoperator.cluster_model import CLUSTER_LABEL
from meshoperator.controllers.observed_state import load_documents, load_machines, load_map
from meshoperator.planners.disk_affinity import (
    MACHINES_TOPIC,
    lost_machines,
    needs_directory,
    on_hosts_disks,
    recorded_machine,
)
from meshoperator.resources import GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshoperator.kube.client import Kube
    from meshoperator.planners.cluster_state import ClusterState
    from meshoperator.settings import OperatorSettings

_log = logging.getLogger(__name__)
NONCE: Final = f"{GROUP}/write"
"""Annotation that distinguishes two writes of one value to the control store."""


class DaemonMachines:
    """Looks up where daemons have their directories."""

    def __init__(self, kube: Kube, settings: OperatorSettings) -> None:
        self._kube, self._settings = kube, settings

    def __repr__(self) -> str:
        return f"<DaemonMachines of {self._kube!r}>"

    async def machine_of(self, pod: Mapping[str, Any], namespace: str) -> str:
        """Return the Kubernetes node that a new pod of a daemon has to run on; empty if it may run on any.
        Raises ApiError."""
        metadata = pod.get("metadata") or {}
        name, cluster = metadata.get("name") or "", (metadata.get("labels") or {}).get(CLUSTER_LABEL) or ""
        if not name or not cluster or not on_hosts_disks(pod):
            return ""
        machine = (await load_machines(self._kube, namespace, cluster)).get(name, "")
        if not machine or not await self._fits(machine, pod):
            return ""
        found = await load_map(self._kube, namespace, cluster)
        return machine if found and needs_directory(found[1], name) else ""

    async def _fits(self, machine: str, pod: Mapping[str, Any]) -> bool:
        """Return whether a Kubernetes node exists and has the labels that the pod asks for."""
        if not self._settings.reads_nodes:
            return True  # if not, the mesh gives the daemon up after a while, and its pod is created again
        selector = (pod.get("spec") or {}).get("nodeSelector") or {}
        chosen = {"fieldSelector": f"metadata.name={machine}"}
        pages = [page async for page in self._kube.pages_of_metadata("Node", None, chosen, 1)]
        found = [each["metadata"].get("labels") or {} for page in pages for each in page]
        return any(selector.items() <= labels.items() for labels in found)


async def forget_lost_machines(kube: Kube, namespace: str, sight: ClusterState) -> None:
    """Empty the records of Kubernetes nodes that no longer exist."""
    lost = lost_machines(sight)
    if not lost:
        return
    for name, entry in (await load_documents(kube, namespace, sight.cluster, MACHINES_TOPIC)).items():
        if lost.get(name) == recorded_machine(entry["data"]["value"]):
            entry["data"] = {"value": json.dumps({"machine": ""})}
            entry["metadata"]["annotations"][NONCE] = secrets.token_hex(16)
            if await kube.replace(entry):
                _log.info("%s: Kubernetes node %s is gone, and its directory with it", name, lost[name])
