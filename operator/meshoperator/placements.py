"""The pass that plans where datasets go, and labels Kubernetes nodes by where they lie.

Law: decides by `planning` and `placing`; writes labels only where they change. Without rights to nodes there
is no plan and no label.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from meshoperator.children import Place
from meshoperator.datasources import mark
from meshoperator.placing import GPU, holders, inventory_of, label_change, labels_wanted
from meshoperator.planning import plan
from meshoperator.resources import MeshDatasetSpec, ResourceError, parse
from meshoperator.resources.cluster import Topology

if TYPE_CHECKING:
    from meshoperator.children import Manifest
    from meshoperator.kube import Kube
    from meshoperator.placing import Board
    from meshoperator.settings import OperatorSettings

_log = logging.getLogger(__name__)


class PlacementLoop:
    """One an operator."""

    def __init__(self, kube: Kube, settings: OperatorSettings, board: Board) -> None:
        self._kube, self._settings, self._board = kube, settings, board

    def __repr__(self) -> str:
        return f"<PlacementLoop {len(self._board.planned)} datasets>"

    async def run(self) -> int:
        """Plan once, each mesh by itself; how many Kubernetes nodes were labelled. Raises ApiError."""
        if not self._settings.reads_nodes:
            return 0
        places = {each["metadata"]["name"]: _place(each) for each in await self._kube.list_all("Node")}
        datasets = await self._datasets()
        nodes = await self._kube.list_all("MeshNode")
        pods = await self._kube.list_all("Pod")
        meshes = {(namespace, spec.cluster_ref) for (namespace, _), spec in datasets.items()}
        self._board.keep(datasets)
        for mesh in sorted(meshes):
            own = {key: spec for key, spec in datasets.items() if (key[0], spec.cluster_ref) == mesh}
            daemons = [each for each in nodes if _mesh_of(each) == mesh]
            # GPUs are everybody's; labels of places are as the planner's defaults have them
            inventory, names = inventory_of(own, self._board, daemons, places, pods, Topology())
            self._board.plan(plan(inventory, self._settings), names)
        return await self._label(datasets, nodes, places)

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
        places: dict[str, Place],
    ) -> int:
        """Datasets that were not looked at yet keep the labels they have."""
        unknown = {mark(*key) for key in datasets if key not in self._board.holdings}
        hosts = {
            (each["metadata"]["namespace"], each["spec"]["nodeId"]): (each.get("status") or {}).get(
                "node", ""
            )
            for each in mesh_nodes
        }
        marks = {}
        for namespace, name in datasets.keys() & self._board.holdings.keys():
            on = {hosts.get((namespace, node), "") for node in holders(self._board.holdings[namespace, name])}
            marks[mark(namespace, name)] = on - {""}
        wanted, changed = labels_wanted(marks, places, Topology()), 0
        for name, place in places.items():
            change = label_change(place, wanted[name], unknown)
            if change:
                await self._kube.patch("Node", name, None, change)
                changed += 1
        return changed


def _mesh_of(node: Manifest) -> tuple[str, str]:
    return node["metadata"]["namespace"], node["spec"]["clusterRef"]


def _place(document: Manifest) -> Place:
    metadata, status = document["metadata"], document.get("status") or {}
    return Place(
        metadata["name"],
        metadata.get("labels") or {},
        not (document.get("spec") or {}).get("unschedulable"),
        gpus=int((status.get("allocatable") or {}).get(GPU, 0)),
    )
