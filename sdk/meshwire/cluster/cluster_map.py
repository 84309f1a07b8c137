"""The cluster map: its nodes with their zones, roles and states, and the number of copies of each bucket.

Law: a map is immutable and has one encoding; a change is a new map with the next version
(`cluster.transitions`). A fault in a document raises PlanError with the path of the bad field.
"""

from __future__ import annotations

import re
import zlib
from base64 import b85decode, b85encode
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    canonical_json,
    checked_boolean,
    checked_choice,
    checked_integer,
    checked_object,
    checked_text,
    read_json,
    required_field,
    shown_value,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

State = Literal["joining", "up", "draining", "away", "returning", "down"]
"""`joining`: receives its share of the data and is not read for data it does not have yet.
`draining`: hands its share to other nodes.
`away`: does not answer but is expected back; it keeps its share, and other nodes stand in.
`returning`: answers again and gets every write, but may lack writes from the time it was away.
`down`: removed from the placement; its share is rebuilt on other nodes."""
Role = Literal["store", "cache", "compute"]
STATES: Final[tuple[State, ...]] = ("joining", "up", "draining", "away", "returning", "down")
REACHABLE_STATES: Final[tuple[State, ...]] = ("joining", "up", "draining", "returning")
"""States of nodes that answer requests."""
ROLES: Final[tuple[Role, ...]] = ("store", "cache", "compute")
DEFAULT_SLOTS: Final = 1 << 14
MAX_SLOTS: Final = 1 << 20
DEFAULT_COPIES: Final = 2
MAX_COPIES: Final = 8
MAX_NODES: Final = 10_000
"""etcd takes values of 1.5 MiB."""
MAX_MAP_BYTES: Final = 4 << 20
_PART: Final = 1 << 15
_PLAIN_NODES: Final = 4096  # the most that releases read which read no deflated map
MAX_COUNTS: Final = 4096
MAX_WEIGHT: Final = 1 << 20
_GIVEN: Final = 16
_FIELDS: Final = ("version", "slots", "copies", "base", "goal", "nodes", "counts", "base_slots")
_VERSIONS: Final = ("since", "turned", "complete")
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_BUCKET = re.compile(r"[a-z0-9.-]{3,63}")
_PLACE = re.compile(r"[A-Za-z0-9._/-]{0,63}")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9._:\[\]-]{1,255}")


@dataclass(frozen=True, slots=True)
class Node:
    """A member of the cluster. `endpoint`: where peers and the SDK reach it. `zone`: failure domain;
    `rack`: proximity domain. `weight`: its share of the data, in any unit common to all nodes (such as
    GiB).

    Map versions: `since`, when the node last went away after being complete; for a node that is neither
    away nor returning, when it last came back (0: it was never away); `turned`, when it entered its present
    state; `complete`, the newest map version under which it had all its data. `leaving`: the node is to be
    emptied, whatever its state: it was draining when it went away.
    """

    node_id: str
    endpoint: str
    zone: str = ""
    rack: str = ""
    weight: int = 1
    roles: tuple[Role, ...] = ROLES
    state: State = "up"
    since: int = 0
    turned: int = 0
    complete: int = 0
    leaving: bool = False

    @property
    def stores(self) -> bool:
        """Whether the node can own data."""
        return "store" in self.roles and self.weight > 0


class Share(NamedTuple):
    """The part of a node that placement depends on."""

    node_id: str
    zone: str
    weight: int


class BucketCopies(NamedTuple):
    """The number of copies of a bucket created at `born` (ms since the epoch), once an administrator has
    changed that number. Reads use `relied` copies and writes go to `given` copies; while nodes sync,
    `given` exceeds `relied` or `wanted`, the target number."""

    bucket: str
    born: int
    relied: int
    given: int
    wanted: int

    @property
    def is_rebalancing(self) -> bool:
        """Whether copies are still to be made or removed."""
        return not self.relied == self.given == self.wanted

    @property
    def copies(self) -> int:
        """The number of copies as `routes` takes it."""
        return self.relied if self.relied == self.given else self.relied + _GIVEN * self.given


def read_and_write_copies(copies: int) -> tuple[int, int]:
    """Split a number of copies, as `BucketCopies.copies` and `routes` encode it, into (copies to read,
    copies to write)."""
    given, relied = divmod(copies, _GIVEN)
    return relied, given or relied


@dataclass(frozen=True)
class ClusterMap:
    """An immutable version of the cluster. `nodes` are ordered by id. `slots`: the number of parts into
    which names hash, a power of two; `transitions.split_slots` raises it. `copies`: the number of copies of
    buckets without a setting of their own, fixed for the life of the cluster.

    `base`: the shares by which the data is currently placed, while they differ from those that the node
    states imply; None when they do not. `base_slots`: likewise the number of slots, while a split is
    going on; until its end, each slot is where the one is of which it is a part. `goal`: the version that
    last changed the target shares and copy counts. `counts`: buckets whose number of copies was changed,
    in order of name.
    """

    version: int
    nodes: tuple[Node, ...]
    slots: int = DEFAULT_SLOTS
    copies: int = DEFAULT_COPIES
    base: tuple[Share, ...] | None = None
    goal: int = 0
    counts: tuple[BucketCopies, ...] = ()
    base_slots: int | None = None

    def copies_of_bucket(self, bucket: str) -> BucketCopies | None:
        """Return the copy counts of a bucket, or None if its number of copies was never changed."""
        return next((count for count in self.counts if count.bucket == bucket), None)

    def node(self, node_id: str) -> Node | None:
        """Return the member with this id, or None."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    @property
    def target_shares(self) -> tuple[Share, ...]:
        """The shares after all pending joins and drains."""
        staying = ("joining", "up", "away", "returning")
        return tuple(
            Share(node.node_id, node.zone, node.weight)
            for node in self.nodes
            if node.stores and node.state in staying and not node.leaving
        )

    @property
    def current_shares(self) -> tuple[Share, ...]:
        """The shares by which the data is currently placed."""
        return shares_by_state(self.nodes) if self.base is None else self.base

    @property
    def current_slots(self) -> int:
        """The number of slots by which the data is currently placed."""
        return self.slots if self.base_slots is None else self.base_slots

    @property
    def is_rebalancing(self) -> bool:
        """Whether data still has to move before the target shares become current."""
        return (
            self.base_slots is not None
            or self.current_shares != self.target_shares
            or any(count.is_rebalancing for count in self.counts)
        )

    def must_sync(self, node_id: str) -> bool:
        """Whether a node has to sync its data with the other owners (until `transitions.mark_complete`)."""
        node = self.node(node_id)
        if node is None or not node.stores or node.state in ("away", "down"):
            return False
        if node.state == "returning":
            return True
        if node.state == "joining":  # a complete node waits for the others and must not start over
            return node.complete < max(self.goal, node.turned)
        return self.is_rebalancing and not node.leaving and node.complete < self.goal

    def to_json(self, *, short: bool = False) -> bytes:
        """Encode the canonical document; `parse_map` restores the map. `short`: without what it puts in by
        itself, as the control store has it, whose engines limit the size of a value."""
        nodes = [_node_document(node, short=short) for node in self.nodes]
        base = None if self.base is None else [list(share) for share in self.base]
        counts = {"counts": [list(count) for count in self.counts]} if self.counts else {}
        split = {} if self.base_slots is None else {"base_slots": self.base_slots}
        return canonical_json(
            {
                "version": self.version,
                "slots": self.slots,
                "copies": self.copies,
                "base": base,
                "goal": self.goal,
                "nodes": nodes,
                **counts,
                **split,
            }
        )

    def to_stored(self) -> bytes:
        """Encode the map for the control store, which sends each version to all nodes: short, and deflated
        in a mesh that is too large for releases that read no deflated map."""
        document = self.to_json(short=True)
        if len(self.nodes) <= _PLAIN_NODES:
            return document
        text = b85encode(zlib.compress(document)).decode()
        parts = [text[start : start + _PART] for start in range(0, len(text), _PART)]
        return canonical_json({"deflated": parts})

    def __hash__(self) -> int:
        return hash((self.version, self.goal, len(self.nodes)))  # caches ask often; maps are large

    def __repr__(self) -> str:
        return f"ClusterMap(version={self.version}, nodes={len(self.nodes)})"


def _node_document(node: Node, *, short: bool) -> dict[str, object]:
    document: dict[str, object] = {
        "id": node.node_id,
        "endpoint": node.endpoint,
        "zone": node.zone,
        "rack": node.rack,
        "weight": node.weight,
        "roles": list(node.roles),
        "state": node.state,
        "since": node.since,
        "turned": node.turned,
        "complete": node.complete,
        "leaving": node.leaving,
    }
    if not short:
        return document
    return {name: value for name, value in document.items() if value != _BY_ITSELF.get(name)}


_BY_ITSELF: Final[dict[str, object]] = {
    "zone": "",
    "rack": "",
    "weight": 1,
    "roles": list(ROLES),
    "state": "up",
    "since": 0,
    "turned": 0,
    "complete": 0,
    "leaving": False,
}
"""What `parse_map` takes for fields of a node that are not there; all releases do."""


def shares_by_state(nodes: tuple[Node, ...]) -> tuple[Share, ...]:
    """Return the current shares implied by node states alone, without a rebalance in progress."""
    having = ("up", "draining", "away", "returning")
    return tuple(
        Share(node.node_id, node.zone, node.weight) for node in nodes if node.stores and node.state in having
    )


def parse_map(source: bytes | str | Mapping[str, Any]) -> ClusterMap:
    """Parse a map document. Raises PlanError."""
    value = read_json(source, at_most=MAX_MAP_BYTES) if isinstance(source, (bytes, str)) else dict(source)
    if isinstance(value, dict) and isinstance(value.get("deflated"), list):
        value = read_json(_decompress(value["deflated"]), at_most=MAX_MAP_BYTES)
    document = checked_object(value, "", _FIELDS)
    version = checked_integer(required_field(document, "version", ""), "version", 0, MAX_INTEGER)
    slots = _parse_slots(document.get("slots", DEFAULT_SLOTS), "slots", MAX_SLOTS)
    base_slots = document.get("base_slots")
    nodes = required_field(document, "nodes", "")
    if not isinstance(nodes, list) or len(nodes) > MAX_NODES:
        raise PlanError("nodes", f"expected a list of at most {MAX_NODES} nodes")
    return ClusterMap(
        version,
        checked_nodes([_parse_node(n, f"nodes[{i}]") for i, n in enumerate(nodes)]),
        slots,
        checked_integer(document.get("copies", DEFAULT_COPIES), "copies", 1, MAX_COPIES),
        _parse_base(document.get("base")),
        checked_integer(document.get("goal", 0), "goal", 0, version),
        _parse_counts(document.get("counts", [])),
        None if base_slots is None else _parse_slots(base_slots, "base_slots", slots // 2),
    )


def _decompress(parts: list[Any]) -> bytes:
    try:
        return zlib.decompressobj().decompress(b85decode("".join(parts)), MAX_MAP_BYTES + 1)
    except (TypeError, ValueError, zlib.error) as error:
        raise PlanError("deflated", f"damaged: {error}") from None


def _parse_slots(value: Any, path: str, most: int) -> int:
    slots = checked_integer(value, path, 1, most)
    if slots & (slots - 1):
        raise PlanError(path, f"{slots} is not a power of two")
    return slots


def _parse_counts(value: Any) -> tuple[BucketCopies, ...]:
    if not isinstance(value, list) or len(value) > MAX_COUNTS:
        raise PlanError("counts", f"expected a list of at most {MAX_COUNTS} buckets")
    found = []
    for number, count in enumerate(value):
        path = f"counts[{number}]"
        if not isinstance(count, list) or len(count) != 5:
            raise PlanError(path, "expected [bucket, born, relied, given, wanted]")
        numbers = [checked_integer(each, path, 1, MAX_COPIES) for each in count[2:]]
        born = checked_integer(count[1], path, 0, MAX_INTEGER)
        found.append(BucketCopies(_matching(_BUCKET, count[0], path), born, *numbers))
    if any(one.bucket >= other.bucket for one, other in pairwise(found)):
        raise PlanError("counts", "expected the buckets in order, each once")
    return tuple(found)


def _parse_base(value: Any) -> tuple[Share, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) > MAX_NODES:
        raise PlanError("base", f"expected null or a list of at most {MAX_NODES} shares")
    found = []
    for number, share in enumerate(value):
        path = f"base[{number}]"
        if not isinstance(share, list) or len(share) != 3:
            raise PlanError(path, "expected [id, zone, weight]")
        found.append(
            Share(
                _matching(_NODE_ID, share[0], path),
                _matching(_PLACE, share[1], path),
                checked_integer(share[2], path, 1, MAX_WEIGHT),
            )
        )
    if any(one.node_id >= other.node_id for one, other in pairwise(found)):
        raise PlanError("base", "expected the shares in order of their ids, each once")
    return tuple(found)


def _parse_node(value: Any, path: str) -> Node:
    known = ("id", "endpoint", "zone", "rack", "weight", "roles", "state", *_VERSIONS, "leaving")
    document = checked_object(value, path, known)
    roles = document.get("roles", list(ROLES))
    if not isinstance(roles, list) or not roles:
        raise PlanError(f"{path}.roles", f"expected a list of {', '.join(ROLES)}")
    found = {cast("Role", checked_choice(role, f"{path}.roles", ROLES)) for role in roles}
    versions = {
        name: checked_integer(document.get(name, 0), f"{path}.{name}", 0, MAX_INTEGER) for name in _VERSIONS
    }
    return Node(
        _matching(_NODE_ID, required_field(document, "id", path), f"{path}.id"),
        _matching(_ENDPOINT, required_field(document, "endpoint", path), f"{path}.endpoint"),
        _matching(_PLACE, document.get("zone", ""), f"{path}.zone"),
        _matching(_PLACE, document.get("rack", ""), f"{path}.rack"),
        checked_integer(document.get("weight", 1), f"{path}.weight", 0, MAX_WEIGHT),
        tuple(role for role in ROLES if role in found),
        cast("State", checked_choice(document.get("state", "up"), f"{path}.state", STATES)),
        since=versions["since"],
        turned=versions["turned"],
        complete=versions["complete"],
        leaving=checked_boolean(document.get("leaving", False), f"{path}.leaving"),
    )


def _matching(pattern: re.Pattern[str], value: Any, path: str) -> str:
    text = checked_text(value, path, at_most=300)
    if pattern.fullmatch(text) is None:
        raise PlanError(path, f"{shown_value(text)} does not have the form {pattern.pattern}")
    return text


def checked_nodes(nodes: list[Node]) -> tuple[Node, ...]:
    """Return the nodes in order of their ids. Raises PlanError if an id appears twice."""
    ordered = tuple(sorted(nodes, key=lambda node: node.node_id))
    for one, other in pairwise(ordered):
        if one.node_id == other.node_id:
            raise PlanError("nodes", f"the node id {one.node_id!r} appears twice")
    return ordered
