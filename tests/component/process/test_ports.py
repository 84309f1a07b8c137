"""Ports of servers that come back: nobody gets them while their servers are down, or not yet up."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from meshd.process import local_etcd
from meshd.process.local_etcd import EtcdCluster, reserve_port
from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    import pytest


def lowest_given_away() -> int:
    """Of the ports that the system gives whoever asks for any."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_a_port_that_somebody_has_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    first = reserve_port()
    mine = {os.getpid(): itertools.count(first - local_etcd.FIRST_PORT)}
    monkeypatch.setattr(local_etcd, "_port_sequences", mine)
    with socket.create_server(("127.0.0.1", first)):
        assert reserve_port() != first


def test_servers_lie_outside_what_the_system_gives_away(tmp_path: Path) -> None:
    with Daemon.start() as daemon:
        assert 0 < (urlsplit(daemon.endpoint).port or 0) < lowest_given_away()
    mesh = DaemonCluster(0)
    members = (*mesh.etcd.members, *EtcdCluster(tmp_path, 3).members)
    assert {member.port < lowest_given_away() for member in members} == {True}
    mesh.close()
