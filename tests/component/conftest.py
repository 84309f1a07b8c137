"""Fixtures of the S3 tests: a bucket of one's own, a socket to speak by hand."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from tests.component.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.testing.daemons import Daemon


@pytest.fixture(scope="module")
def s3(daemon: Daemon) -> Any:
    """A boto3 client for root."""
    return daemon.client()


@pytest.fixture
def bucket(s3: Any) -> str:
    """A fresh bucket."""
    name = f"b-{uuid.uuid4().hex[:12]}"
    s3.create_bucket(Bucket=name)
    return name


@pytest.fixture
def wire(daemon: Daemon) -> Iterator[Wire]:
    wire = Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)
    yield wire
    wire.close()
