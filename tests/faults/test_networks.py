"""Cuts between namespaces are cuts, and heal."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.faults.networks import Networks, available

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
    served.heal()
    assert reaches(served, served.prefix(0))


def test_a_host_is_cut_off_from_the_machine(served: Networks) -> None:
    served.cut(1, served.outside)
    assert not reaches(served, [], 0.5)
    assert reaches(served, served.prefix(0))
