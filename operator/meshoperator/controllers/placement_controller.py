"""Placement controller: plans the homes of datasets, and labels Kubernetes nodes by the data they hold.

Law: `placement_planner` and `placement_inputs` decide; labels are written only where they change.
Without permission to read nodes there is no plan and no label.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from meshoperator.cluster_model import HostNode
from meshoperator.planners.dataset_model import dataset_mark
from meshoperator.planners.placement_inputs import (
    GPU,
    MeshGround,
    holders,
    inventory_of,
    label_change,
    labels_wanted,
)
from meshoperator.planners.placement_planner import plan_placement
from meshoperator.resources import MeshClusterSpec, MeshDatasetSpec, ResourceError, parse
from meshoperator.resources.cluster import Topology

if TYPE_CHECKING:
    from meshoperator.cluster_model import Manifest
    from meshoperator.kube.client import Kube
    from meshoperator.planners.placement_inputs import PlacementBoard
    from meshoperator.settings import OperatorSettings

_log = logging.getLogger(__name__)


class PlacementController:
    """Plans all meshes; one per operator."""

    def __init__(self, kube: Kube, settings: OperatorSettings, board: PlacementBoard) -> None:
        self._kube, self._settings, self._board = kube, settings, board

    def __repr__(self) -> str:
        return f"<PlacementController of {len(self._board.planned)} datasets>"

    async def plan_and_label(self) -> int:
        """Plan each mesh once; return how many Kubernetes nodes were relabelled. Raises ApiError."""
        if not self._settings.reads_nodes:
            return 0
        places = {each["metadata"]["name"]: _host_node(each) for each in await self._kube.list_all("Node")}
        datasets = await self._datasets()
        nodes = await self._kube.list_all("MeshNode")
        pods = await self._kube.list_all("Pod")
        meshes = {(namespace, spec.cluster_ref) for (namespace, _), spec in datasets.items()}
        self._board.retain_datasets(datasets)
        self._board.plans, self._board.looked = True, self._board.version
        grounds: dict[tuple[str, str], MeshGround] = {}
        for mesh in sorted(meshes):
            own = {
                key: spec
                for key, spec in datasets.items()
                if (key[0], spec.cluster_ref) == mesh and not spec.source.uri.startswith("mesh://")
            }
            daemons = [each for each in nodes if _mesh_of(each) == mesh]
            ground = await self._ground(*mesh)
            if ground is None:
                continue
            grounds[mesh] = ground
            seen = {key: spec for key, spec in own.items() if key in self._board.kept}
            if seen:  # meshes share the GPUs
                inventory, names = inventory_of(seen, self._board, daemons, places, pods, ground)
                self._board.record_plan(plan_placement(inventory, self._settings), names)
        return await self._label(datasets, nodes, places, grounds)

    async def _ground(self, namespace: str, name: str) -> MeshGround | None:
        document = await self._kube.get("MeshCluster", name, namespace)
        if document is None:
            return None
        try:
            return MeshGround.from_spec(parse(MeshClusterSpec, document["spec"]))
        except ResourceError as error:
            _log.warning("MeshCluster %s: %s", name, error)
            return None

    async def _datasets(self) -> dict[tuple[str, str], MeshDatasetSpec]:
        found = {}
        for each in await self._kube.list_all("MeshDataset"):
            metadata = each["metadata"]
            if metadata.get("deletionTimestamp"):
                continue
            try:
                spec = parse(MeshDatasetSpec, each["spec"])
            except ResourceError as error:
                _log.warning("MeshDataset %s: %s", metadata["name"], error)
                continue
            found[metadata["namespace"], metadata["name"]] = spec
        return found

    async def _label(
        self,
        datasets: dict[tuple[str, str], MeshDatasetSpec],
        mesh_nodes: list[Manifest],
        places: dict[str, HostNode],
        grounds: dict[tuple[str, str], MeshGround],
    ) -> int:
        """Write changed labels. Datasets that were not reconciled yet keep their labels."""
        unknown = {dataset_mark(*key) for key in datasets if key not in self._board.holdings}
        hosts = {
            (each["metadata"]["namespace"], each["spec"]["nodeId"]): (each.get("status") or {}).get(
                "node", ""
            )
            for each in mesh_nodes
        }
        wanted: dict[str, set[str]] = {name: set() for name in places}
        for namespace, name in datasets.keys() & self._board.holdings.keys():
            on = {hosts.get((namespace, node), "") for node in holders(self._board.holdings[namespace, name])}
            ground = grounds.get((namespace, datasets[namespace, name].cluster_ref))
            topology = ground.topology if ground else Topology()
            found = labels_wanted({dataset_mark(namespace, name): on - {""}}, places, topology)
            for place, labels in found.items():
                wanted[place] |= labels
        changed = 0
        for name, place_of in places.items():
            change = label_change(place_of, wanted[name], unknown)
            if change:
                await self._kube.patch("Node", name, None, change)
                changed += 1
        return changed


def _mesh_of(node: Manifest) -> tuple[str, str]:
    return node["metadata"]["namespace"], node["spec"]["clusterRef"]


def _host_node(document: Manifest) -> HostNode:
    metadata, status = document["metadata"], document.get("status") or {}
    return HostNode(
        metadata["name"],
        metadata.get("labels") or {},
        not (document.get("spec") or {}).get("unschedulable"),
        gpus=int((status.get("allocatable") or {}).get(GPU, 0)),
    )
