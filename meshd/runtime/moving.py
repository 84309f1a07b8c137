"""Movement of data between nodes, put together: the doors of a worker, the mover of the steward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.assembly.catalog import SHARED
from meshd.cluster.moving import Mover, Sources
from meshd.cluster.offers import Offers
from meshd.cluster.pulling import RemoteHolder
from meshd.control.clustermaps import ClusterMaps
from meshd.kit import pulse
from meshd.kit.pulse import Courtesy
from meshd.runtime.data import node_catalog
from meshd.web.guests import handed_over
from meshd.web.movements import MovementDoors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.runtime.node import Node
    from meshd.web.server import NativeRoute

_GRACE: Final = 2.0  # seconds for what a process began to answer by an earlier map


def offers(node: Node, rest: Callable[[int], Awaitable[None]] | None = None) -> Offers:
    """What this node gives to others that compare; `rest` between two pieces of work."""
    return Offers(node.store, node.mesh.copies, rest=rest or Courtesy(node.clock).rest)


def copies_asked(node: Node) -> set[int]:
    """Of all buckets, as `routes` takes them."""
    return {node.mesh.copies(bucket.name) for bucket in node.buckets.list_all()}


def movement_routes(node: Node) -> list[NativeRoute]:
    """The doors for others that compare themselves with this node."""
    doors = movement_doors(node, offers(node))
    return doors if node.mover is None else handed_over(doors, node.mover)


def movement_doors(node: Node, given: Offers) -> list[NativeRoute]:
    """The same, answered in this process."""
    return MovementDoors(given, node.mesh, node.clock).routes()


def mover(node: Node) -> Mover:
    """The one of this node, to be run in its steward."""
    sources = Sources(
        partial(RemoteHolder, node.peers),
        lambda: copies_asked(node),
        Courtesy(node.clock).rest,
        lambda: pulse.gone_by(node.clock.monotonic(), _GRACE),
        (SHARED, node_catalog(node).ensure),
    )
    maps = ClusterMaps(node.control)
    return Mover(
        node.store,
        offers(node),
        node.mesh,
        maps,
        node.control,
        sources,
        node.clock,
        repair_every=node.settings.cluster.repair_interval,
        door=node.mover,
    )
