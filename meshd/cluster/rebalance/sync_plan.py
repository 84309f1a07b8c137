"""Sync plan: which slots a node compares with which peers, and which items it is missing; pure.

Law: no I/O. A node compares each slot it is to own with every node in the slot's read set and with no
other, for those nodes are complete. If all owners of a slot were given up, it takes what those of them
have that joined again, and waits for no other. A tombstone known to either side counts for both; of null
versions the highest stamp wins; of a version's tags and ACL the last change wins. Invariant: a node that
applies everything `missing_items` returns, in any order, is missing nothing more. Equal contents have equal
digests.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec
import numpy as np

from meshd.store.replica.inventory import HeldName
from meshwire.cluster import compute_placement, routes
from meshwire.cluster.cluster_map import MAX_COPIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from meshd.store.replica.inventory import HeldUpload, HeldVersion
    from meshwire.cluster import ClusterMap


ItemKind = Literal["version", "amendment", "upload", "part"]
_UPLOAD_ID: Final = 32
INTERNAL_BUCKET: Final = b"-mesh-"
"""The bucket of a node's own results, indexes and documents. No other node owns it, so it is in no scope."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """An item to fetch. `what`: the id of a version or an upload; `number`: the part number; `size`: its
    bytes."""

    name: bytes
    kind: ItemKind
    what: str
    stamp: int
    size: int = 0
    number: int = 0


class RemovalItem(msgspec.Struct, frozen=True, array_like=True):
    """A removal to enter: of a version, of null versions ("") or of an upload."""

    name: bytes
    what: str
    stamp: int

    @property
    def is_upload(self) -> bool:
        """True for the end of an upload."""
        return len(self.what) == _UPLOAD_ID


class MissingItems(msgspec.Struct, frozen=True):
    """What one side is missing of a name."""

    ended: tuple[RemovalItem, ...] = ()
    items: tuple[Item, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ended or self.items)


class _BothSides:
    """What both sides together know of a name's removals and its newest null version."""

    def __init__(self, mine: HeldName, theirs: HeldName) -> None:
        self.tombstones = dict(mine.tombstones)
        for what, stamp in theirs.tombstones:
            self.tombstones[what] = max(stamp, self.tombstones.get(what, 0))
        nulls = [held.stamp for side in (mine, theirs) for held in side.versions if not held.version]
        self.null = max(nulls, default=0)

    def is_superseded(self, version: HeldVersion) -> bool:
        """Returns True if a version was removed or overwritten."""
        tombstone = self.tombstones.get(version.version, 0)
        if version.version:
            return tombstone > 0
        return tombstone > version.stamp or version.stamp < self.null


def missing_items(mine: HeldName | None, theirs: HeldName) -> MissingItems:
    """Returns what this node (`mine`) is missing of what the peer holds of a name."""
    mine = mine or HeldName(theirs.name)
    sides, known = _BothSides(mine, theirs), dict(mine.tombstones)
    ended = tuple(
        RemovalItem(theirs.name, what, stamp)
        for what, stamp in theirs.tombstones
        if (what not in known if what else known.get(what, 0) < stamp)
    )
    return MissingItems(ended, (*_versions(mine, theirs, sides), *_uploads(mine, theirs, sides)))


def _versions(mine: HeldName, theirs: HeldName, sides: _BothSides) -> Iterator[Item]:
    have = {(held.version, held.stamp): held for held in mine.versions}
    for held in theirs.versions:
        own = have.get((held.version, held.stamp))
        if held.broken or sides.is_superseded(held):
            continue
        if own is None or own.broken:
            yield Item(theirs.name, "version", held.version, held.stamp, held.size)
        elif own.amended < held.amended:
            yield Item(theirs.name, "amendment", held.version, held.stamp)


def _uploads(mine: HeldName, theirs: HeldName, sides: _BothSides) -> Iterator[Item]:
    have: dict[str, HeldUpload] = {held.upload_id: held for held in mine.uploads}
    for held in theirs.uploads:
        if held.upload_id in sides.tombstones:
            continue
        own = have.get(held.upload_id)
        if own is None:
            yield Item(theirs.name, "upload", held.upload_id, 0)
        parts = {part.number: part.stamp for part in own.parts} if own is not None else {}
        for part in held.parts:
            if parts.get(part.number, 0) < part.stamp:
                yield Item(theirs.name, "part", held.upload_id, part.stamp, part.size, part.number)


def surplus_items(mine: HeldName, theirs: Sequence[HeldName]) -> HeldName:
    """Returns the versions and uploads of mine that none of the others has."""
    versions = {(held.version, held.stamp) for side in theirs for held in side.versions}
    uploads = {held.upload_id for side in theirs for held in side.uploads}
    return HeldName(
        mine.name,
        tuple(held for held in mine.versions if (held.version, held.stamp) not in versions),
        tuple(held for held in mine.uploads if held.upload_id not in uploads),
    )


# scopes and digests -----------------------------------------------------------------------------------------


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """A set of names, given by slots. `bits`: for each replica count, the slots (packed, most significant bit
    first) whose names are included."""

    slots: int
    bits: dict[int, bytes]

    def __bool__(self) -> bool:
        return any(any(bits) for bits in self.bits.values())

    def masks(self) -> dict[int, npt.NDArray[np.bool_]]:
        """Returns bool[slots] by replica count."""
        return {
            copies: np.unpackbits(np.frombuffer(bits, np.uint8), count=self.slots).astype(np.bool_)
            for copies, bits in self.bits.items()
        }

    def restrict_to(self, slots: npt.NDArray[np.bool_]) -> Scope:
        """Returns the scope restricted to these slots."""
        return scope_of({copies: mask & slots for copies, mask in self.masks().items()}, self.slots)

    def slot_count(self) -> int:
        """Returns the number of slots, counted once per replica count."""
        return sum(int(mask.sum()) for mask in self.masks().values())


def scope_of(masks: dict[int, npt.NDArray[np.bool_]], slots: int) -> Scope:
    """Builds a scope from slot masks."""
    return Scope(slots, {copies: np.packbits(mask).tobytes() for copies, mask in masks.items() if mask.any()})


class ScopeFilter:
    """A predicate: is a name (in index form) in a scope? `copies_of` returns the replica count of a
    bucket."""

    def __init__(self, scope: Scope, copies_of: Callable[[str], int]) -> None:
        self._slots, self._copies_of = scope.slots, copies_of
        self._masks = {copies: mask.tobytes() for copies, mask in scope.masks().items()}
        self._buckets: dict[bytes, bytes | None] = {INTERNAL_BUCKET: None}

    def __call__(self, name: bytes) -> bool:
        bucket = name[: name.index(b"\0")]
        try:
            mask = self._buckets[bucket]
        except KeyError:
            mask = self._buckets[bucket] = self._masks.get(self._copies_of(bucket.decode()))
        return mask is not None and mask[slot_of_stored_name(name, self._slots)] == 1


def slot_of_stored_name(name: bytes, slots: int) -> int:
    """Returns the slot of a name in index form, like `meshwire.cluster.slot_of`."""
    digest = hashlib.blake2b(name, digest_size=8, person=b"mesh-name").digest()
    return int.from_bytes(digest, "big") & (slots - 1)


class SlotDigests:
    """One digest per slot over everything held of its names. Removals up to `forgotten` are excluded, because
    one side may have forgotten them."""

    def __init__(self, slots: int, forgotten: int) -> None:
        self._forgotten = forgotten
        self._sums, self._sizes = array("Q", bytes(8 * slots)), array("Q", bytes(8 * slots))
        self._encode = msgspec.msgpack.Encoder().encode
        self.names = 0

    def add_names(self, names: Iterable[HeldName]) -> None:
        """Adds names, in any order, each once."""
        for held in names:
            tombstones = tuple(
                (what, 0 if what else stamp)  # the stamps of an id's removal may differ between replicas
                for what, stamp in held.tombstones
                if stamp > self._forgotten
            )
            if held.versions or held.uploads or tombstones:
                self.names += 1
                seen = self._encode((held.name, held.versions, held.uploads, tombstones))
                slot = slot_of_stored_name(held.name, len(self._sums))
                digest = hashlib.blake2b(seen, digest_size=8).digest()
                self._sums[slot] = (self._sums[slot] + int.from_bytes(digest, "big")) & 0xFFFF_FFFF_FFFF_FFFF
                self._sizes[slot] += held.size

    def sums(self) -> npt.NDArray[np.uint64]:
        """Returns the digests as uint64[slots]."""
        return np.frombuffer(self._sums, np.uint64)

    def sizes(self) -> npt.NDArray[np.uint64]:
        """Returns the bytes of versions and parts as uint64[slots]."""
        return np.frombuffer(self._sizes, np.uint64)


_Masks: TypeAlias = "dict[str, dict[int, npt.NDArray[np.bool_]]]"
"""bool[slots] by node id and replica count."""


class SyncPlan(msgspec.Struct, frozen=True):
    """Which slots to compare with whom. `peers`: by node id, the slots to compare with that node;
    `first_peers`: the same slots with one peer each, for the bulk; `blocked_slots`: how many slots have no
    available peer."""

    peers: Mapping[str, Scope]
    first_peers: Mapping[str, Scope]
    blocked_slots: int = 0


def plan_sync(cluster: ClusterMap, node_id: str, copies: Iterable[int]) -> SyncPlan:
    """Plans the comparisons of `node_id` under this map. `copies`: the replica counts of all buckets."""
    all_peers: _Masks = {}
    first: _Masks = {}
    blocked = 0

    for number in set(copies):
        table = routes(cluster, number)
        for route, slots in table.slots_by_route(node_id):
            if all(node.node_id != node_id for node in route.write_set):
                continue
            holders = route.read_set or table.given_up_owners(int(slots[0]))
            others = [node.node_id for node in holders or () if node.node_id != node_id]
            blocked += slots.size if holders is None else 0
            for place, other in enumerate(others):
                _mark(all_peers, other, number, slots, cluster.slots)
                _mark(first, other, number, slots[slots % len(others) == place], cluster.slots)
    return SyncPlan(_scopes(all_peers, cluster.slots), _scopes(first, cluster.slots), blocked)


def full_scope(cluster: ClusterMap, copies: Iterable[int]) -> Scope:
    """Returns the scope of all names."""
    return scope_of({number: np.ones(cluster.slots, np.bool_) for number in copies}, cluster.slots)


def unowned_scopes(cluster: ClusterMap, node_id: str, copies: Iterable[int]) -> Mapping[str, Scope]:
    """Returns the slots in which `node_id` has no share, now or soon, and whose owners are all up, by the
    primary's id. Empty while a rebalance is in progress."""
    if cluster.is_rebalancing:
        return {}
    found: _Masks = {}
    for number in set(copies):
        if number > MAX_COPIES:  # encodes a replica count that is just being changed
            continue
        present = compute_placement(cluster, number, "present")
        for owners, slots in present.slots_by_owners():
            if owners and all(node.node_id != node_id and node.state == "up" for node in owners):
                _mark(found, owners[0].node_id, number, slots, cluster.slots)
    return _scopes(found, cluster.slots)


def _mark(masks: _Masks, node_id: str, copies: int, slots: npt.NDArray[np.intp], total: int) -> None:
    if not slots.size:
        return
    by_copies = masks.setdefault(node_id, {})
    if copies not in by_copies:
        by_copies[copies] = np.zeros(total, np.bool_)
    by_copies[copies][slots] = True


def _scopes(masks: Mapping[str, dict[int, npt.NDArray[np.bool_]]], slots: int) -> dict[str, Scope]:
    return {node_id: scope_of(each, slots) for node_id, each in masks.items()}
