"""A daemon with photographs, and the module of ops pushed to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshsdk.admin import op_catalog
from tests.support.daemons import Daemon
from tests.support.userops_module import COUNT, SOURCE, connect, jpeg

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as running:
        s3 = running.client()
        s3.create_bucket(Bucket="photos")
        for number in range(COUNT):
            s3.put_object(Bucket="photos", Key=f"train/{number:04}.jpg", Body=jpeg(number))
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with connect(daemon) as made:
        yield made


@pytest.fixture
def pushed(client: Client) -> Iterator[op_catalog.Pushed]:
    yield op_catalog.push_module(client.transport, "mine", SOURCE)
    for module in op_catalog.list_modules(client.transport):
        op_catalog.remove_module(client.transport, module.module)


@pytest.fixture
def signed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands sign as root."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
