"""Custom resources of `shardmesh.io/v1alpha1` as typed values.

Law: these classes are the single source of the CRDs, the reference page and the operator's types. Pure: no
clock, no I/O. `parse` turns a document from the API into them; its errors name the field.
"""

from meshoperator.resources.cluster import MeshCluster, MeshClusterSpec, MeshClusterStatus
from meshoperator.resources.dataset import MeshDataset, MeshDatasetSpec, MeshDatasetStatus
from meshoperator.resources.load import MeshLoad, MeshLoadSpec, MeshLoadStatus
from meshoperator.resources.node import MeshNode, MeshNodeSpec, MeshNodeStatus
from meshoperator.resources.spec_types import GROUP, VERSION, Kind, ResourceError, parse, plain
from meshoperator.resources.view import MeshView, MeshViewSpec, MeshViewStatus

KINDS: tuple[Kind, ...] = (MeshCluster, MeshNode, MeshDataset, MeshLoad, MeshView)

__all__ = [
    "GROUP",
    "KINDS",
    "VERSION",
    "Kind",
    "MeshCluster",
    "MeshClusterSpec",
    "MeshClusterStatus",
    "MeshDataset",
    "MeshDatasetSpec",
    "MeshDatasetStatus",
    "MeshLoad",
    "MeshLoadSpec",
    "MeshLoadStatus",
    "MeshNode",
    "MeshNodeSpec",
    "MeshNodeStatus",
    "MeshView",
    "MeshViewSpec",
    "MeshViewStatus",
    "ResourceError",
    "parse",
    "plain",
]
