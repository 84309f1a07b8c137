"""Objects of a single node over one store, as services read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.cluster.cluster_view import ClusterView, single_node_map
from meshd.peer_reads.remote_objects import RemoteObjects
from meshd.rpc.peer_client import PeerClient
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from meshd.store.api import ObjectStore


def single_node_objects(store: ObjectStore) -> RemoteObjects:
    """Build the objects of a single node over one store."""
    clock = ManualClock()
    mesh = ClusterView(
        "local",
        MemoryControl(clock),
        lambda _: 1,
        standalone_map=single_node_map("local", "http://localhost"),
    )
    return RemoteObjects(store, mesh, PeerClient("local", lambda _: b"", clock))
