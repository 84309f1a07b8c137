"""How a map changes: one node, one step, the next version.

Law: pure; what makes no sense for the node's present state is a TransitionError that says what would. Two
sides that change the same version make two maps with one number, and the control store takes only one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshwire.cluster.maps import DEFAULT_SLOTS, ClusterMap, checked_nodes
from meshwire.documents import suggestion

if TYPE_CHECKING:
    from meshwire.cluster.maps import Node, State


class TransitionError(ValueError):
    """The change does not fit the map."""


_FROM: Final[dict[State, tuple[State, ...]]] = {
    "up": ("joining", "draining", "away", "down"),
    "draining": ("up", "joining", "away"),
    "away": ("up", "joining", "draining"),
    "down": ("up", "joining", "draining", "away"),
}


def founded(node: Node, slots: int = DEFAULT_SLOTS) -> ClusterMap:
    """The first map: one node, which has everything there is."""
    return ClusterMap(1, (replace(node, state="up"),), slots)


def joined(cluster: ClusterMap, node: Node) -> ClusterMap:
    """With `node`: new, it joins (its share is carried to it); known, it is back with what it says of itself
    now. A node that was `down` joins anew: what it has may be old.
    """
    known = cluster.node(node.node_id)
    state: State = "joining" if node.stores else "up"
    if known is not None and known.state != "down" and known.stores == node.stores:
        state = "up" if known.state == "away" else known.state
    others = [other for other in cluster.nodes if other.node_id != node.node_id]
    if not any(other.stores and other.state != "down" for other in others):
        state = "up"
    return _next(cluster, [*others, replace(node, state=state)])


def settled(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """A node that joined has all of its share; one that drained may stay after all."""
    return _turned(cluster, node_id, "up")


def drained(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """A node begins to give its share away. Raises TransitionError for the last one that stores."""
    staying = [n for n in cluster.nodes if n.stores and n.state in ("joining", "up") and n.node_id != node_id]
    if not staying:
        raise TransitionError(f"{node_id} is the last node that stores; nobody could take its share")
    return _turned(cluster, node_id, "draining")


def missed(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """A node does not answer; its share waits for it."""
    return _turned(cluster, node_id, "away")


def lost(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """A node is given up; its share is made again from the other copies."""
    return _turned(cluster, node_id, "down")


def left(cluster: ClusterMap, node_id: str) -> ClusterMap:
    """Without a node that is down, or has given away its share."""
    node = _known(cluster, node_id)
    if node.stores and node.state not in ("draining", "down"):
        raise TransitionError(f"{node_id} is {node.state} and has data; drain it first")
    return _next(cluster, [other for other in cluster.nodes if other.node_id != node_id])


def reweighed(cluster: ClusterMap, node_id: str, weight: int) -> ClusterMap:
    """With another share for a node."""
    node = _known(cluster, node_id)
    if node.stores and weight < 1:
        raise TransitionError(f"a weight of {weight} leaves {node_id} nothing; drain it instead")
    others = [other for other in cluster.nodes if other.node_id != node_id]
    return _next(cluster, [*others, replace(node, weight=weight)])


def _turned(cluster: ClusterMap, node_id: str, state: State) -> ClusterMap:
    node = _known(cluster, node_id)
    if node.state == state:
        return cluster
    if node.state not in _FROM[state]:
        raise TransitionError(f"{node_id} is {node.state}; it cannot become {state}")
    others = [other for other in cluster.nodes if other.node_id != node_id]
    return _next(cluster, [*others, replace(node, state=state)])


def _known(cluster: ClusterMap, node_id: str) -> Node:
    node = cluster.node(node_id)
    if node is None:
        known = [node.node_id for node in cluster.nodes]
        raise TransitionError(f"there is no node {node_id[:80]!r}{suggestion(node_id, known)}")
    return node


def _next(cluster: ClusterMap, nodes: list[Node]) -> ClusterMap:
    ordered = checked_nodes(nodes)
    return (
        cluster if ordered == cluster.nodes else replace(cluster, version=cluster.version + 1, nodes=ordered)
    )
