"""A control plane, kubelet and namespace of one test, for what concerns all on an API server: definitions."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from lightkube import Client, KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace

from tests.kubernetes.control_plane import CRDS, control_plane
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.scenes import POOL, Scene

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

NAMESPACE = "apart"


@contextmanager
def apart(
    place: Path, machines: int, crds: Path = CRDS, checkouts: Mapping[str, Path] | None = None
) -> Iterator[tuple[Scene, Path]]:
    """With its kubeconfig; `checkouts` as the kubelet has them. Skips the test where a cluster is named that
    others use."""
    if os.environ.get("MESH_TEST_KUBECONFIG"):
        pytest.skip("definitions of a cluster that others use are not to be changed")
    with control_plane(place, crds) as kubeconfig:
        kube = Client(config=KubeConfig.from_file(kubeconfig).get(), namespace=NAMESPACE)
        kube.create(Namespace(metadata=ObjectMeta(name=NAMESPACE)))
        with Kubelet(kubeconfig, place / "kubelet", NAMESPACE, checkouts) as kubelet:
            for number in range(machines):
                zone = {"topology.kubernetes.io/zone": "abc"[number % 3]}
                kubelet.add_node(f"k{number}", {**POOL["nodeSelector"], **zone})
            yield Scene(kube, NAMESPACE, kubelet), kubeconfig
        kube.close()
