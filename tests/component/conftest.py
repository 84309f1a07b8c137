"""A socket to speak S3 by hand; the daemon, a client and a bucket come from the conftest above."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.component.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.testing.daemons import Daemon


@pytest.fixture
def wire(daemon: Daemon) -> Iterator[Wire]:
    """Signs with the root keys of `daemon`; its sockets are closed with the test."""
    wire = Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)
    yield wire
    wire.close()
