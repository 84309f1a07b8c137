"""Objects of a node without others, as services read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.cluster.mesh import Mesh, lone_map
from meshd.control.memory import MemoryControl
from meshd.kit.clock import ManualClock
from meshd.net.peers import Peers
from meshd.service.remote.objects import RemoteObjects

if TYPE_CHECKING:
    from meshd.store.interface import ObjectStore


def local_objects(store: ObjectStore) -> RemoteObjects:
    """Build the objects of a single node over one store."""
    clock = ManualClock()
    mesh = Mesh("local", MemoryControl(clock), lambda _: 1, lone=lone_map("local", "http://localhost"))
    return RemoteObjects(store, mesh, Peers("local", lambda _: b"", clock))
