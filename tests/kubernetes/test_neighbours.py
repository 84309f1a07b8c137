"""Two MeshClusters on the same directories, on a real API server: the younger one is refused before anything
is made of it where that is certain, else it is said; the older one notices nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import StatefulSet
from lightkube.resources.core_v1 import Event, Namespace

from tests.kubernetes.test_daemons_stuck import MESH, host, staged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightkube import Client

    from tests.kubernetes.test_daemons_stuck import Scene

__all__ = ["host"]  # the fixture


@pytest.fixture
def other(kube: Client, namespace: str) -> Iterator[str]:
    """Another namespace."""
    name = f"{namespace}-b"
    kube.create(Namespace(metadata=ObjectMeta(name=name)))
    yield name
    kube.delete(Namespace, name)


def condition(scene: Scene, kind: str) -> dict[str, Any]:
    return dict(next(each for each in scene.status()["conditions"] if each["type"] == kind))


def sets(scene: Scene) -> list[str]:
    found: Any = scene.kube.list(StatefulSet, namespace=scene.namespace)
    return [each.metadata.name for each in found]


def test_the_younger_of_two_that_would_have_one_directory_is_refused_until_the_older_is_gone(
    kubeconfig: Path, kube: Client, namespace: str, other: str, host: dict[str, Any]
) -> None:
    with staged(kubeconfig, kube, namespace, host) as older, staged(kubeconfig, kube, other, host) as younger:
        assert condition(older, "DisksApart")["status"] == "True"
        told = condition(younger, "Progressing")
        assert (told["status"], told["reason"]) == ("False", "DisksTaken")
        assert f"pool s of MeshCluster mesh in namespace {namespace}" in told["message"]
        assert "change hostPath" in told["message"]
        assert younger.status()["trouble"] == "DisksTaken"
        assert (sets(older), sets(younger)) == (["mesh-s"], [])
        assert condition(older, "DisksApart")["status"] == "True"
        kube.delete(MESH, "mesh", namespace=namespace)
        assert condition(younger, "DisksApart")["status"] == "True"
        assert sets(younger) == ["mesh-s"]
        assert younger.status().get("trouble") != "DisksTaken"


def test_one_that_only_shares_a_disk_is_told_once_and_goes_on(
    kubeconfig: Path, kube: Client, namespace: str, other: str, host: dict[str, Any]
) -> None:
    tiers = [{"name": "d", "class": "nvme", "hostPath": "/stuck/deep"}]
    beside = host | {"name": "t", "tiers": tiers}
    with staged(kubeconfig, kube, namespace, host), staged(kubeconfig, kube, other, beside) as younger:
        told = condition(younger, "DisksApart")
        assert (told["status"], told["reason"]) == ("False", "Shared")
        assert (
            "hostPath /stuck/deep of pool t is on the same machines as pool s of MeshCluster mesh"
            in told["message"]
        )
        younger.run()
        assert sets(younger) == ["mesh-t"]
        found: Any = kube.list(Event, namespace=other, fields={"reason": "DisksShared"})
        assert [each.message for each in found] == [told["message"]]
