"""Preconditions of a MeshCluster: its Secrets exist, and no other mesh uses its directories.

Law: checked before anything is made or replaced. Secrets are read for their keys only. Only a mesh that
has not started is refused, and only where its daemons would find another mesh's directories and have no
other machine; every other conflict is a warning.
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
    """The message names the field, the Secret and what is to be in it."""


async def check_secrets(kube: Kube, cluster: Cluster) -> None:
    """Raises MissingSecretError, ApiError."""
    for field, name, keys in _named_secrets(cluster.spec):
        wanted = " and ".join(keys)
        found = await kube.get("Secret", name, cluster.namespace)
        if found is None:
            raise MissingSecretError(
                f"{field} names the Secret {name}, which is not there; make it in the namespace "
                f"{cluster.namespace}, with {wanted}"
            )
        if missing := [key for key in keys if key not in (found.get("data") or {})]:
            raise MissingSecretError(
                f"{field} names the Secret {name}, which has no {' and no '.join(missing)}; it is to have "
                f"{wanted}"
            )


def _named_secrets(spec: MeshClusterSpec) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Field, Secret, keys."""
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
    """The message names the pool, the other mesh, and what to write instead."""


@dataclass(frozen=True, slots=True)
class OtherMesh:
    """Another MeshCluster."""

    name: str
    namespace: str
    spec: MeshClusterSpec


async def check_disks(kube: Kube, settings: OperatorSettings, cluster: Cluster, document: Manifest) -> str:
    """What older meshes have in common with it, in a sentence; empty where nothing. Raises DisksTakenError,
    ApiError."""
    if not any(tier.host_path for pool in cluster.spec.node_pools for tier in pool.tiers):
        return ""
    others = [
        other
        for namespace in settings.namespaces or (None,)
        for each in await kube.list_all("MeshCluster", namespace)
        if not each["metadata"].get(
            "deletionTimestamp"
        )  # it goes; till then its daemons hold their directories
        and _age(each) < _age(document)
        and (other := _read(each))
    ]
    found = [said for other in others for said in shared_directories(cluster, other)]
    taken = [said for certain, said in found if certain]
    if taken and not (document.get("status") or {}).get("pools"):
        raise DisksTakenError("; ".join(taken))
    return "; ".join(said for _, said in found)[:900]


def _age(document: Manifest) -> tuple[str, str, str]:
    """By which of two the older is known, also of those that were made in one second."""
    metadata = document["metadata"]
    return str(metadata.get("creationTimestamp") or ""), metadata["namespace"], metadata["name"]


def _read(document: Manifest) -> OtherMesh | None:
    try:
        spec = parse(MeshClusterSpec, document["spec"])
    except ResourceError:  # its own passes say so
        return None
    return OtherMesh(document["metadata"]["name"], document["metadata"]["namespace"], spec)


def shared_directories(cluster: Cluster, other: OtherMesh) -> Iterator[tuple[bool, str]]:
    """Of each pair of pools: whether it is certain that they are in each other's way, and how."""
    for ours, theirs in product(cluster.spec.node_pools, other.spec.node_pools):
        same = f"{cluster.name}-{ours.name}" == f"{other.name}-{theirs.name}"
        whose = f"pool {theirs.name} of MeshCluster {other.name} in namespace {other.namespace}"
        if same and cluster.namespace == other.namespace:
            yield True, f"pool {ours.name} would have the very pods of {whose}: give the pool another name"
            continue
        paths = _paths(ours, theirs)
        meets, all_of_ours = _machines(ours.node_selector, theirs.node_selector, cluster.places)
        if not paths or not meets:
            continue
        where = f"hostPath {' and '.join(paths)} of pool {ours.name} is on machines of {whose}"
        if same:
            what_to_do = "give it another hostPath, another nodeSelector, or the pool another name"
            yield all_of_ours, f"{where}, whose daemons have its names and so its directories: {what_to_do}"
        else:
            yield (
                False,
                f"{where}: both count the same free room as theirs; give it another directory or machines",
            )


def _paths(ours: NodePool, theirs: NodePool) -> list[str]:
    """Of ours, those that are one of theirs, or lie in one, or have one in them."""
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
    """Whether there are machines of both, and whether all of ours are. By labels alone where nodes may not be
    read: then selectors that do not exclude each other may meet."""
    if places is None:
        meets = all(theirs.get(key, value) == value for key, value in ours.items())
        return meets, theirs.items() <= ours.items()
    own = [place for place in places if ours.items() <= place.labels.items()]
    both = [place for place in own if theirs.items() <= place.labels.items()]
    return bool(both), len(both) == len(own)
