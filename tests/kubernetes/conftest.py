"""One control plane for all tests of this folder, a namespace for each test that asks for one."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from lightkube import Client, KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace

from tests.kubernetes.control_plane import control_plane
from tests.support.scheduling import TOGETHER, group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_control_plane = ExitStack()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Stop the control plane after the last test that may use it: its dozen idle programs take an eighth of a
    processor from the tests that follow."""
    if nextitem is None or group(nextitem.nodeid) not in TOGETHER:
        _control_plane.close()


@pytest.fixture(scope="session")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of an API server in which everything may be done; our kinds are known to it."""
    with _control_plane:
        yield _control_plane.enter_context(control_plane(tmp_path_factory.mktemp("kubernetes")))


@pytest.fixture(scope="session")
def kube(kubeconfig: Path) -> Iterator[Client]:
    """A client of it."""
    client = Client(config=KubeConfig.from_file(kubeconfig).get(), namespace="default")
    yield client
    client.close()


@pytest.fixture
def namespace(kube: Client) -> Iterator[str]:
    """A new namespace, gone at the end."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    kube.create(Namespace(metadata=ObjectMeta(name=name)))
    yield name
    kube.delete(Namespace, name)
