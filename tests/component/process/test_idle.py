"""A node that nobody asks anything seldom wakes up: what it waits for tells it, and its timers agree."""

from __future__ import annotations

from tests.support.daemons import Daemon
from tests.support.wakeups import restless


def test_a_standalone_node_rests() -> None:
    with Daemon.start(workers=2) as daemon:
        assert not restless(daemon, {"supervisor": 2, "worker-0": 7, "coordinator-0": 20, "transform-0": 1})
