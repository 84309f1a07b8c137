"""Model of a MeshCluster: its spec, its possible Kubernetes nodes, and names and labels of its objects.

Law: pure. Every name and label by which an object of a MeshCluster is found is defined here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from meshoperator.resources import GROUP, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshoperator.resources import MeshClusterSpec
    from meshoperator.resources.cluster import NodePool

Manifest = dict[str, Any]
CLUSTER_LABEL, POOL_LABEL = f"{GROUP}/cluster", f"{GROUP}/pool"
TEMPLATE_ANNOTATION: Final = f"{GROUP}/template"
SCRAPE_LABEL: Final = f"{GROUP}/scrape"
"""Label of the one Service by which Prometheus finds the daemons."""
STORE_LABEL, TOPIC_LABEL = f"{GROUP}/store", f"{GROUP}/topic"
"""Labels of objects of the daemons' control store: its MeshCluster, and the first part of the key."""
DISKS: Final = f"disks.{GROUP}/"
"""Labels of Kubernetes nodes on which daemons have directories."""


@dataclass(frozen=True, slots=True)
class HostNode:
    """The relevant fields of a Kubernetes node."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    schedulable: bool = True
    gpus: int = 0
    ready: bool = True


def cluster_mark(namespace: str, name: str) -> str:
    """Return the suffix of a MeshCluster's labels on Kubernetes nodes."""
    return hashlib.sha256(f"{namespace}/{name}".encode()).hexdigest()[:8]


def origins_secret(cluster: str) -> str:
    """Return the name of a MeshCluster's Secret with the keys of its datasets' sources."""
    return f"{cluster}-origins"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A MeshCluster. `places`: known Kubernetes nodes; None if nodes may not be read (namespaced scope).
    `operator_namespace`: where the operator's pod is; empty: it runs in none. `operator_labels`: of that
    pod. `ipv6`: whether that is the first family of the Kubernetes cluster."""

    name: str
    namespace: str
    uid: str
    spec: MeshClusterSpec
    places: tuple[HostNode, ...] | None = None
    account: str = "default"
    operator_namespace: str = ""
    operator_labels: tuple[tuple[str, str], ...] = ()
    ipv6: bool = False

    def replicas(self, pool: NodePool) -> int | None:
        """Return how many daemons a pool should have; None if that depends on nodes that may not be read."""
        if not pool.per_matching_node:
            return pool.replicas or 0
        if self.places is None:
            return None
        matching = pool.node_selector.items()
        return sum(1 for place in self.places if matching <= place.labels.items())

    def labels(self, pool: str = "") -> dict[str, str]:
        """Return the labels by which its objects are found."""
        found = {
            "app.kubernetes.io/name": "meshd",
            "app.kubernetes.io/part-of": "shardmesh",
            CLUSTER_LABEL: self.name,
        }
        return found | ({POOL_LABEL: pool} if pool else {})

    @property
    def mark(self) -> str:
        """Its suffix in labels, unique in the Kubernetes cluster."""
        return cluster_mark(self.namespace, self.name)

    def disks_label(self, pool: str) -> str:
        """Return the label of Kubernetes nodes on which daemons of a pool have their directories."""
        return f"{DISKS}{self.name}-{pool}.{self.mark}"

    @property
    def root_secret(self) -> str:
        """The name of the Secret with root's keys."""
        reference = self.spec.auth.root_secret_ref
        return reference.name if reference else f"{self.name}-root"

    @property
    def origins_secret(self) -> str:
        """The name of the Secret with the keys of its datasets' sources; daemons see changes without a
        restart."""
        return origins_secret(self.name)

    @property
    def endpoint(self) -> str:
        """The URL for S3 clients."""
        scheme = "https" if self.spec.s3.tls else "http"
        return f"{scheme}://{self.name}-s3.{self.namespace}.svc:{self.spec.s3.port}"


def owned(cluster: Cluster, api: str, kind: str, name: str, labels: dict[str, str], **rest: Any) -> Manifest:
    """Return a manifest that is deleted with its MeshCluster."""
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "MeshCluster",
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    metadata = {"name": name, "namespace": cluster.namespace, "labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **rest}
