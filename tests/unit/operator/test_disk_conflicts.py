"""Two meshes on the same directories: what is refused, what is only said."""

from __future__ import annotations

from typing import Any

import pytest

from meshoperator.cluster_model import Cluster, HostNode
from meshoperator.controllers.preconditions import OtherMesh, shared_directories
from meshoperator.resources import MeshClusterSpec, parse

NODES = tuple(HostNode(name, {"disk": name[0], "kind": "b"}, True) for name in ("a1", "a2", "c1"))


def spec(pool: str = "s", path: str = "/mnt/a", **selector: str) -> MeshClusterSpec:
    tiers = [{"name": "d", "class": "nvme", "hostPath": path}]
    pools = [{"name": pool, "replicas": 1, "tiers": tiers, "nodeSelector": selector}]
    return parse(MeshClusterSpec, {"image": "i:1", "nodePools": pools})


def found(
    ours: MeshClusterSpec,
    theirs: MeshClusterSpec,
    places: Any = NODES,
    *,
    names: tuple[str, str] = ("mesh", "mesh"),
) -> list[tuple[bool, str]]:
    cluster = Cluster(names[0], "new", "u", ours, places)
    return list(shared_directories(cluster, OtherMesh(names[1], "old", theirs)))


@pytest.mark.parametrize("places", [NODES, None])
def test_the_same_names_on_the_same_machines_are_certain(places: Any) -> None:
    ((certain, said),) = found(spec(disk="a"), spec(disk="a"), places)
    assert certain
    assert (
        "hostPath /mnt/a of pool s is on the same machines as pool s of MeshCluster mesh in namespace old"
        in said
    )
    assert "change hostPath or nodeSelector, or rename the pool" in said
    ((certain, _),) = found(spec(disk="a", kind="b"), spec(disk="a"), places)  # a part of theirs
    assert certain


@pytest.mark.parametrize("places", [NODES, None])
def test_with_a_machine_of_its_own_it_is_only_said(places: Any) -> None:
    ((certain, _),) = found(spec(kind="b"), spec(disk="a"), places)
    assert not certain


@pytest.mark.parametrize("places", [NODES, None])
def test_other_machines_are_nothing(places: Any) -> None:
    assert found(spec(disk="a"), spec(disk="c"), places) == []


def test_other_labels_of_the_same_machines_are_seen_where_nodes_may_be_read() -> None:
    ((certain, _),) = found(spec(disk="a"), spec(kind="b"))
    assert certain
    ((certain, _),) = found(spec(disk="a"), spec(kind="b"), None)
    assert not certain  # nobody knows


@pytest.mark.parametrize("path", ["/mnt/a", "/mnt/a/deep", "/mnt"])
def test_other_names_share_a_disk(path: str) -> None:
    ((certain, said),) = found(spec(path="/mnt/a"), spec(pool="t", path=path))
    assert not certain
    assert "both count the same free space" in said


def test_other_paths_are_nothing() -> None:
    assert found(spec(path="/mnt/a"), spec(path="/mnt/ab")) == []


def test_pods_of_one_name_in_one_namespace_are_certain_whatever_their_disks() -> None:
    cluster = Cluster("a-b", "old", "u", spec(pool="c", path="/mnt/x"), NODES)
    ((certain, said),) = shared_directories(cluster, OtherMesh("a", "old", spec(pool="b-c")))
    assert certain
    assert "would have the same pod names as pool b-c of MeshCluster a" in said
