"""Preconditions of a MeshCluster: its Secrets exist, and no other mesh uses its directories.

Law: checked before anything is created or replaced. Secrets are read for their key names only. Only a mesh
that has not started is refused, and only if its daemons would find another mesh's directories and no other
machine is left; every other conflict is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from meshoperator.resources import MeshClusterSpec, ResourceError, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshoperator.cluster_model import Cluster, HostNode, Manifest
    from meshoperator.kube.client import Kube
    from meshoperator.resources.cluster import NodePool
    from meshoperator.settings import OperatorSettings


class MissingSecretError(ResourceError):
    """A Secret or one of its keys is missing. The message names the field, the Secret and the keys it
    needs."""


async def check_secrets(kube: Kube, cluster: Cluster) -> None:
    """Check that all Secrets that the spec names exist. Raises MissingSecretError, ApiError."""
    for field, name, keys in _named_secrets(cluster.spec):
        wanted = " and ".join(keys)
        found = await kube.get("Secret", name, cluster.namespace)
        if found is None:
            raise MissingSecretError(
                f"{field}: Secret {name} does not exist; create it in the namespace "
                f"{cluster.namespace}, with {wanted}"
            )
        if missing := [key for key in keys if key not in (found.get("data") or {})]:
            raise MissingSecretError(
                f"{field}: Secret {name} has no {' and no '.join(missing)}; it needs {wanted}"
            )


def _named_secrets(spec: MeshClusterSpec) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (field, Secret, required keys)."""
    if spec.auth.root_secret_ref:
        yield (
            "auth.rootSecretRef",
            spec.auth.root_secret_ref.name,
            ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        )
    if spec.auth.users_secret_ref:
        yield "auth.usersSecretRef", spec.auth.users_secret_ref.name, (spec.auth.users_secret_ref.key,)
    if spec.s3.tls:
        yield "s3.tls.secretRef", spec.s3.tls.secret_ref.name, ("tls.crt", "tls.key")


class DisksTakenError(ResourceError):
    """Another mesh uses the directories. The message names the pool, the mesh, and what to change."""


@dataclass(frozen=True, slots=True)
class OtherMesh:
    """Another MeshCluster, as far as the check needs it."""

    name: str
    namespace: str
    spec: MeshClusterSpec


async def check_disks(kube: Kube, settings: OperatorSettings, cluster: Cluster, document: Manifest) -> str:
    """Return a sentence about directories shared with older meshes, or an empty one. Raises DisksTakenError,
    ApiError."""
    if not any(tier.host_path for pool in cluster.spec.node_pools for tier in pool.tiers):
        return ""
    others = [
        other
        for namespace in settings.namespaces or (None,)
        for each in await kube.list_all("MeshCluster", namespace)
        if not each["metadata"].get("deletionTimestamp")  # until it is gone its daemons use their directories
        and _age(each) < _age(document)
        and (other := _read(each))
    ]
    found = [said for other in others for said in shared_directories(cluster, other)]
    taken = [said for certain, said in found if certain]
    if taken and not (document.get("status") or {}).get("pools"):
        raise DisksTakenError("; ".join(taken))
    return "; ".join(said for _, said in found)[:900]


def _age(document: Manifest) -> tuple[str, str, str]:
    """Return a sort key by age that also orders objects created in the same second."""
    metadata = document["metadata"]
    return str(metadata.get("creationTimestamp") or ""), metadata["namespace"], metadata["name"]


def _read(document: Manifest) -> OtherMesh | None:
    try:
        spec = parse(MeshClusterSpec, document["spec"])
    except ResourceError:  # its own passes report that
        return None
    return OtherMesh(document["metadata"]["name"], document["metadata"]["namespace"], spec)


def shared_directories(cluster: Cluster, other: OtherMesh) -> Iterator[tuple[bool, str]]:
    """Yield, for each pair of pools in conflict, whether the conflict is certain, and a description."""
    for ours, theirs in product(cluster.spec.node_pools, other.spec.node_pools):
        same = f"{cluster.name}-{ours.name}" == f"{other.name}-{theirs.name}"
        whose = f"pool {theirs.name} of MeshCluster {other.name} in namespace {other.namespace}"
        if same and cluster.namespace == other.namespace:
            yield True, f"pool {ours.name} would have the same pod names as {whose}: rename the pool"
            continue
        paths = _paths(ours, theirs)
        meets, all_of_ours = _machines(ours.node_selector, theirs.node_selector, cluster.places)
        if not paths or not meets:
            continue
        where = f"hostPath {' and '.join(paths)} of pool {ours.name} is on the same machines as {whose}"
        if same:
            what_to_do = "change hostPath or nodeSelector, or rename the pool"
            yield (
                all_of_ours,
                f"{where}, and their daemons have the same names, so the same directories: {what_to_do}",
            )
        else:
            yield (
                False,
                f"{where}: both count the same free space; use another directory or other machines",
            )


def _paths(ours: NodePool, theirs: NodePool) -> list[str]:
    """Return our paths that equal, contain or are inside one of theirs."""
    there = [PurePosixPath(tier.host_path) for tier in theirs.tiers if tier.host_path]
    return [
        tier.host_path
        for tier in ours.tiers
        if tier.host_path
        and any(
            PurePosixPath(tier.host_path).is_relative_to(each) or each.is_relative_to(tier.host_path)
            for each in there
        )
    ]


def _machines(
    ours: Mapping[str, str], theirs: Mapping[str, str], places: tuple[HostNode, ...] | None
) -> tuple[bool, bool]:
    """Return whether any machine matches both selectors, and whether all of ours do. Without permission to
    read nodes it compares the selectors alone: those that do not exclude each other may overlap."""
    if places is None:
        meets = all(theirs.get(key, value) == value for key, value in ours.items())
        return meets, theirs.items() <= ours.items()
    own = [place for place in places if ours.items() <= place.labels.items()]
    both = [place for place in own if theirs.items() <= place.labels.items()]
    return bool(both), len(both) == len(own)
