"""One daemon for all tests of the native protocol, with a bucket of pictures."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.daemons import Daemon
from tests.support.native_fixtures import Mesh, fill

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with two transform processes and a second user."""
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    entry = {"user_id": "eve", "display_name": "Eve", "email": "eve@example.org"}
    users.write_text(yaml.safe_dump([{**entry, "access_key": "EVEKEY", "secret_key": "evesecret"}]))
    with Daemon.start(args=["--users", str(users), "--transform-workers", "2"], workers=2) as running:
        yield running
        assert "Traceback" not in running.output()


@pytest.fixture
def mesh(node: Daemon) -> Iterator[Mesh]:
    wire = Mesh(node.endpoint, node.access_key, node.secret_key)
    yield wire
    wire.close()


@pytest.fixture(scope="package")
def s3(node: Daemon) -> Any:
    return node.client()


@pytest.fixture(scope="package")
def pictures(s3: Any) -> str:
    """A bucket of 50 pictures in two classes. Read only."""
    name = f"pictures-{uuid.uuid4().hex[:8]}"
    s3.create_bucket(Bucket=name)
    fill(s3, name, 50)
    return name
