"""A socket to speak S3 by hand, and the `mesh` command; the daemon, a client and a bucket come from the
conftest above."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshsdk.cli import run
from tests.support.daemons import Daemon
from tests.support.origin_fixtures import write_credentials
from tests.support.origin_places import Faults, place
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.origin_places import Place


@pytest.fixture
def wire(daemon: Daemon) -> Iterator[Wire]:
    """Signs with the root keys of `daemon`; its sockets are closed with the test."""
    wire = Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)
    yield wire
    wire.close()


@pytest.fixture
def mesh(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a command line in this process; gives stdout, or stderr when it is to fail with `code`."""
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)

    def call(*arguments: object, code: int = 0) -> str:
        capfd.readouterr()
        found = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert found == code, out + err
        return out if code == 0 else err

    return call


@pytest.fixture(scope="session")
def _origin_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with place(tmp_path_factory.mktemp("origin")) as found:
        yield found


@pytest.fixture(scope="module")
def _origin(_origin_server: Place) -> Place:
    """Without what other modules put there: several have a folder `slow`, and count what is in it."""
    _origin_server.clear()
    return _origin_server


@pytest.fixture
def origin(_origin: Place, request: pytest.FixtureRequest) -> Place:
    """A real S3 server with a bucket, behind a proxy that does no harm yet; with nothing of a try before."""
    _origin.proxy.faults = Faults()
    if getattr(request.node, "execution_count", 1) > 1:
        _origin.clear()
    return _origin


@pytest.fixture(scope="module")
def backed(_origin: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon of two workers that knows the origin's credentials."""
    credentials = tmp_path_factory.mktemp("credentials")
    write_credentials(credentials, _origin)
    with Daemon.start(workers=2, args=["--origin-credentials", str(credentials)]) as daemon:
        yield daemon
        assert "Traceback" not in daemon.output()
