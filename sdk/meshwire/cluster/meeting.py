"""Where work meets that any node could do: rendezvous hashing of an address over the nodes that do it.

Law: a pure function of the map and the address; while the same nodes are up, equal addresses meet at the same
node, and when one goes only its own addresses go elsewhere.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwire.cluster.maps import ClusterMap, Node

_SERVING = ("up", "draining", "joining", "returning")


def assemblers(cluster: ClusterMap) -> tuple[Node, ...]:
    """The nodes that make batches: those of the role `compute`, where none of them is there those that
    store, else all."""
    there = [node for node in cluster.nodes if node.state in _SERVING]
    compute = tuple(node for node in there if "compute" in node.roles)
    return compute or tuple(node for node in there if node.stores) or tuple(there)


def meeting(nodes: tuple[Node, ...], address: str) -> tuple[Node, ...]:
    """The nodes in the order in which they are to be asked for what is at an address."""
    return tuple(sorted(nodes, key=lambda node: _rank(node.node_id, address), reverse=True))


def frame_name(plan: str, epoch: int, step: int, rank: int, world: int, batch: int, origin: int) -> str:
    """The address of a frame as a text to meet at."""
    return f"{plan}/{epoch}/{step}/{rank}-of-{world}/{batch}+{origin}"


def _rank(node_id: str, address: str) -> bytes:
    return hashlib.blake2b(f"{node_id}\0{address}".encode(), digest_size=8, person=b"mesh-meet").digest()
