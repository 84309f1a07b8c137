"""The cluster map: which nodes there are, where they stand, what they may hold, in which state.

Law: a map is immutable and has one spelling; a change is another map with the next version
(`meshwire.cluster.transitions`). Whatever is wrong with a document is a PlanError with the path of the bad
field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from meshwire.documents import (
    MAX_INTEGER,
    PlanError,
    canonical_json,
    checked_choice,
    checked_integer,
    checked_object,
    checked_text,
    read_json,
    required,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

State = Literal["joining", "up", "draining", "away", "down"]
"""`joining`: gets its share of the data, and is not relied on for what it has not got yet. `draining`: gives
its share away. `away`: does not answer, and is expected back: its share stays its own, others stand in.
`down`: out of the placement; its share is made again elsewhere."""
Role = Literal["store", "cache", "compute"]
STATES: Final[tuple[State, ...]] = ("joining", "up", "draining", "away", "down")
ROLES: Final[tuple[Role, ...]] = ("store", "cache", "compute")
DEFAULT_SLOTS: Final = 1 << 14
MAX_NODES: Final = 4096
MAX_WEIGHT: Final = 1 << 20
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PLACE = re.compile(r"[A-Za-z0-9._/-]{0,63}")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9._:\[\]-]{1,255}")


@dataclass(frozen=True, slots=True)
class Node:
    """A member. `endpoint`: where peers and the SDK reach it. `zone`: what fails together; `rack`: what is
    near each other. `weight`: its share of the data, in any unit that is the same for all (GiB, say)."""

    node_id: str
    endpoint: str
    zone: str = ""
    rack: str = ""
    weight: int = 1
    roles: tuple[Role, ...] = ROLES
    state: State = "up"

    @property
    def stores(self) -> bool:
        """Whether it may own data at all."""
        return "store" in self.roles and self.weight > 0


@dataclass(frozen=True)
class ClusterMap:
    """`nodes` in order of their ids. `slots`: into how many parts names are cut, a power of two, fixed for
    the cluster's life."""

    version: int
    nodes: tuple[Node, ...]
    slots: int = DEFAULT_SLOTS

    def node(self, node_id: str) -> Node | None:
        """The member of an id, or None."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def to_json(self) -> bytes:
        """The canonical document; `parse_map` gives the map back."""
        nodes = [
            {
                "id": node.node_id,
                "endpoint": node.endpoint,
                "zone": node.zone,
                "rack": node.rack,
                "weight": node.weight,
                "roles": list(node.roles),
                "state": node.state,
            }
            for node in self.nodes
        ]
        return canonical_json({"version": self.version, "slots": self.slots, "nodes": nodes})

    def __repr__(self) -> str:
        return f"ClusterMap(version={self.version}, nodes={len(self.nodes)})"


def parse_map(source: bytes | str | Mapping[str, Any]) -> ClusterMap:
    """The map of its document. Raises PlanError."""
    value = read_json(source) if isinstance(source, (bytes, str)) else dict(source)
    document = checked_object(value, "", ("version", "slots", "nodes"))
    version = checked_integer(required(document, "version", ""), "version", 0, MAX_INTEGER)
    slots = checked_integer(document.get("slots", DEFAULT_SLOTS), "slots", 1, 1 << 20)
    if slots & (slots - 1):
        raise PlanError("slots", f"{slots} is no power of two")
    nodes = required(document, "nodes", "")
    if not isinstance(nodes, list) or len(nodes) > MAX_NODES:
        raise PlanError("nodes", f"expected a list of at most {MAX_NODES} nodes")
    return ClusterMap(
        version, checked_nodes([_parse_node(n, f"nodes[{i}]") for i, n in enumerate(nodes)]), slots
    )


def _parse_node(value: Any, path: str) -> Node:
    known = ("id", "endpoint", "zone", "rack", "weight", "roles", "state")
    document = checked_object(value, path, known)
    roles = document.get("roles", list(ROLES))
    if not isinstance(roles, list) or not roles:
        raise PlanError(f"{path}.roles", f"expected a list of {', '.join(ROLES)}")
    found = {cast("Role", checked_choice(role, f"{path}.roles", ROLES)) for role in roles}
    return Node(
        _matching(_NODE_ID, required(document, "id", path), f"{path}.id"),
        _matching(_ENDPOINT, required(document, "endpoint", path), f"{path}.endpoint"),
        _matching(_PLACE, document.get("zone", ""), f"{path}.zone"),
        _matching(_PLACE, document.get("rack", ""), f"{path}.rack"),
        checked_integer(document.get("weight", 1), f"{path}.weight", 0, MAX_WEIGHT),
        tuple(role for role in ROLES if role in found),
        cast("State", checked_choice(document.get("state", "up"), f"{path}.state", STATES)),
    )


def _matching(pattern: re.Pattern[str], value: Any, path: str) -> str:
    text = checked_text(value, path, at_most=300)
    if pattern.fullmatch(text) is None:
        raise PlanError(path, f"{shown(text)} does not have the form {pattern.pattern}")
    return text


def checked_nodes(nodes: list[Node]) -> tuple[Node, ...]:
    """The nodes in order of their ids. Raises PlanError when one stands twice."""
    ordered = tuple(sorted(nodes, key=lambda node: node.node_id))
    for one, other in pairwise(ordered):
        if one.node_id == other.node_id:
            raise PlanError("nodes", f"the node {one.node_id!r} stands twice")
    return ordered
