"""Alerts that failures between nodes bring about: certificates, clocks, a control store out of reach. As
test_alerts_fire.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshd.util.clock import CLOCK_SHIFT_ENV, write_clock_shift
from tests.monitoring.alert_watch import netloc, watched
from tests.support.daemon_cluster import DaemonCluster
from tests.support.relay import Relay
from tests.support.required import require_etcd, required_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.monitoring.alert_watch import Watch

require_etcd()
pytestmark = [required_program("prometheus", "apt install prometheus"), pytest.mark.timeout(300)]
AHEAD = 420.0
OF_MESHES = {"CertificateRefused", "ClocksDiffer", "ClockDrifts", "MapsDiffer"}


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clock") / "n3"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, clock: Path) -> Iterator[tuple[DaemonCluster, Relay]]:
    """Nodes with https; n3 has a clock of its own, n4 reaches the control store by a relay."""
    write_clock_shift(clock, 0.0)
    with DaemonCluster.start(2, tmp_path_factory.mktemp("mesh"), tls=True, lease=10.0) as found:
        found.add("n3", env={CLOCK_SHIFT_ENV: str(clock)})
        with Relay(found.etcd.members[0].port) as relay:
            found.add("n4", "--control", f"etcd://{relay}")
            for name in ("n3", "n4"):
                found.await_state(name, "up")
            found["n1"].client().create_bucket(Bucket="mesh")
            yield found, relay


@pytest.fixture(scope="module")
def watch(mesh: tuple[DaemonCluster, Relay], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    with watched(tmp_path_factory.mktemp("prometheus"), list(mesh[0].nodes.values())) as found:
        yield found


def test_all_is_silent_before(watch: Watch, mesh: tuple[DaemonCluster, Relay]) -> None:
    for daemon in mesh[0].nodes.values():
        assert not watch.firing(netloc(daemon)) & OF_MESHES
    assert "MapsDiffer" not in watch.firing()


def test_a_clock_that_is_minutes_ahead(watch: Watch, mesh: tuple[DaemonCluster, Relay], clock: Path) -> None:
    found, _ = mesh
    key, client = found.key_with_primary("n3", "mesh"), found["n1"].client()
    write_clock_shift(clock, AHEAD)
    try:
        watch.expect("ClockDrifts", node=found["n3"])
        with pytest.raises(Exception, match=r"[Ss]low|clock|retr"):  # n1 gives it to n3, which refuses
            client.put_object(Bucket="mesh", Key=key, Body=b"1")
        watch.expect("ClocksDiffer", node=found["n1"])
    finally:
        write_clock_shift(clock, 0.0)


def test_a_certificate_of_another_name(watch: Watch, mesh: tuple[DaemonCluster, Relay]) -> None:
    found, _ = mesh
    assert found.authority is not None
    found.authority.issue("n2", ["elsewhere.example"])
    watch.expect("CertificateRefused", node=found["n1"])
    found.authority.issue("n2")


def test_a_node_that_does_not_hear_of_a_newer_map(watch: Watch, mesh: tuple[DaemonCluster, Relay]) -> None:
    """Its connections to the control store are cut, while the map changes."""
    found, relay = mesh
    relay.cut()
    found.kill("n3")
    watch.expect("MapsDiffer")
    watch.expect("ControlStoreLost", node=found["n4"])
    relay.heal()
