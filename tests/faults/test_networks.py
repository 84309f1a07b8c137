"""Cuts between namespaces are cuts, and heal."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.networks import Networks, available
from tests.support.daemons import Daemon
from tests.support.fork_server import forked_from

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not available(), reason="network namespaces take root and iproute2")
SERVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 7001))
print("ready", flush=True)
while True:
    server.accept()[0].close()
"""
ASK = "import socket, sys; socket.create_connection((sys.argv[1], 7001), timeout=float(sys.argv[2])).close()"


@pytest.fixture
def served() -> Iterator[Networks]:
    with Networks(2) as net:
        command = [*net.prefix(1), sys.executable, "-c", SERVE, net.address(1)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield net
            server.kill()


def reaches(net: Networks, prefix: list[str], seconds: float = 20) -> bool:
    command = [*prefix, sys.executable, "-c", ASK, net.address(1), str(seconds)]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


def test_hosts_reach_each_other_until_they_are_parted(served: Networks) -> None:
    assert reaches(served, served.prefix(0))
    served.part(0, 1)
    assert not reaches(served, served.prefix(0), 0.5)
    assert reaches(served, [])
    served.unite(0, 1)
    assert reaches(served, served.prefix(0))


def test_a_path_that_two_faults_cut_is_open_when_both_have_ended(served: Networks) -> None:
    served.part(0, 1)
    served.cut(0, served.address(1))
    served.unite(0, 1)
    assert not reaches(served, served.prefix(0), 0.5)
    served.restore(0, served.address(1))
    assert reaches(served, served.prefix(0))


def test_networks_of_one_machine_have_names_and_addresses_of_their_own(served: Networks) -> None:
    with Networks(2) as other:
        assert {other.outside, other.address(0)}.isdisjoint({served.outside, served.address(0)})
        assert other.namespace(0) != served.namespace(0)
        other.cut(1, other.outside)
        assert reaches(served, served.prefix(0))


def test_a_host_is_cut_off_from_the_machine(served: Networks) -> None:
    served.cut(1, served.outside)
    assert not reaches(served, [], 0.5)
    assert reaches(served, served.prefix(0))


@pytest.mark.parametrize("forked", [True, False])
def test_a_node_and_its_children_run_on_their_host(served: Networks, forked: bool) -> None:
    daemon = Daemon(None, (), {}, 1)
    daemon.host, daemon.namespace = served.address(0), served.namespace(0)
    with ExitStack() as ends:
        if not forked:
            ends.enter_context(forked_from(None))
        ends.enter_context(daemon).up()
        host = Path(served.namespace(0)).stat().st_ino
        pids = [daemon.pid, *daemon.children().values()]
        assert {Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in pids} == {host}
