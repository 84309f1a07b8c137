"""The daemon under test: alone, or one of a mesh.

With MESH_TEST_NODES=3 in the environment it is one of so many nodes, of which it owns little: what it is
asked it mostly has others answer. MESH_TEST_COPIES says how many copies there are of an object (default 1).
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.daemon_cluster import DaemonCluster
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NODES = "MESH_TEST_NODES"


@contextmanager
def one_node(args: Sequence[str] = (), *, workers: int = 1) -> Iterator[Daemon]:
    """A running daemon, with these flags; at the end all must have run through, and stop as they should."""
    number = int(os.environ.get(NODES, "1"))
    if number > 1:
        yield from _one_of(number, args, workers)
        return
    with Daemon.start(args=args, workers=workers) as running:
        yield running
        _end(running)


def _one_of(number: int, args: Sequence[str], workers: int) -> Iterator[Daemon]:
    own = {f"n{place + 1}": ("--weight", "20") for place in range(1, number)}
    flags = ("--copies", os.environ.get("MESH_TEST_COPIES", "1"), *args)
    with DaemonCluster.start(number, args=flags, own=own, workers=workers) as mesh:
        yield mesh["n1"]
        for node in mesh.nodes.values():
            assert node.running, node.output()
        for node in mesh.nodes.values():
            _end(node)


def _end(node: Daemon) -> None:
    assert node.running, node.output()
    assert node.stop() == 0
    assert "Traceback" not in node.output()
