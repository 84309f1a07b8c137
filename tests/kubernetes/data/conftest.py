"""A daemon for a module, and an operator over it whose passes are made by hand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from meshoperator.daemon_client import DaemonClient
from meshoperator.kube.client import Kube
from tests.kubernetes.data.operating import PHOTO, Operator, keys
from tests.kubernetes.looping import Loop, client
from tests.kubernetes.test_webhook import mesh
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lightkube import Client


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Of the module: its buckets are told apart by the tests' namespaces."""
    credentials = tmp_path_factory.mktemp("origins")
    with Daemon.start(args=["--origin-credentials", str(credentials)]) as found:
        yield found


@pytest.fixture
def operator(
    kubeconfig: Path, kube: Client, namespace: str, daemon: Daemon, tmp_path: Path
) -> Iterator[Operator]:
    """Over a MeshCluster of a namespace of its own, with files to stand for a source."""
    mesh(kube, namespace)
    keys(kube, namespace, daemon)
    source = tmp_path / "source"
    for part in ("train", "val"):
        (source / part).mkdir(parents=True)
        for number in range(4):
            (source / part / f"{number}.bin").write_bytes(bytes([number]) * PHOTO)
    with Loop() as loop:
        api = loop.run(client(kubeconfig))
        own = Kube(api)
        daemons = DaemonClient(own, time.time, lambda _: daemon.endpoint)
        try:
            yield Operator(kube, loop, daemon, namespace, own, daemons, source)
        finally:
            loop.run(daemons.aclose())
            loop.run(api.close())
