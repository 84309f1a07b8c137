"""Quarantine: the table of versions with damaged bytes, until they are repaired or removed.

Law: a version in quarantine keeps its place, its metadata and its extents, but its bytes are never
served: its record is marked `broken`. The table says what is damaged. Data files hold no trace of the
quarantine; a rebuilt index finds the damage again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.engine.mutations import Mutation, used_extents, write_manifest
from meshd.store.errors import QuarantinedError
from meshd.store.records import Extent  # noqa: TC001  msgspec reads the annotations
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.store.engine.write_batch import WriteBatch
    from meshd.store.index.index import Index
    from meshd.store.records import Record

_STAMP = 9  # NUL and the stamp after a name


class Quarantined(msgspec.Struct, frozen=True, array_like=True):
    """The damage of a version: its extents, when it was found (ms since the epoch), and what is wrong."""

    extents: tuple[Extent, ...]
    found: int
    why: str = ""


def require_not_quarantined(record: Record) -> None:
    """Raises QuarantinedError if the version is in quarantine."""
    if record.broken:
        raise QuarantinedError(
            "the bytes of this version are damaged on this node and in quarantine; if no other node has a "
            "copy, put the object again"
        )


def _key(name: bytes, stamp: int) -> bytes:
    return name + b"\0" + stamp.to_bytes(_STAMP - 1, "big")


def add_to_quarantine(index: Index, txn: Any, name: bytes, stamp: int, about: Quarantined) -> None:
    """Records a damaged version."""
    index.quarantine.put(txn, _key(name, stamp), msgspec.msgpack.encode(about))


def release_from_quarantine(index: Index, txn: Any, name: bytes, stamp: int) -> None:
    """Removes the record of a version that was repaired or removed."""
    index.quarantine.delete(txn, _key(name, stamp))


def all_quarantined(
    index: Index, txn: Any, after: tuple[bytes, int] | None = None
) -> Iterator[tuple[bytes, int, Quarantined]]:
    """Yields (name, stamp, damage) of every quarantined version after `after`, in order."""
    start = b"" if after is None else _key(after[0], after[1] + 1)
    for key, raw in index.quarantine.items(txn, start):
        stamp = int.from_bytes(key[1 - _STAMP :], "big")
        yield key[:-_STAMP], stamp, msgspec.msgpack.decode(raw, type=Quarantined)


def stale_entries(index: Index, txn: Any) -> Iterator[tuple[bytes, int]]:
    """Yields (name, stamp) of recorded versions that were removed or replaced meanwhile."""
    for name, stamp, _ in all_quarantined(index, txn):
        record = index.versions.version_at(txn, name, stamp)
        if record is None or not record.broken:
            yield name, stamp


class QuarantineVersion(Mutation):
    """Quarantines a version if it still uses one of these extents; returns True if it entered the
    quarantine."""

    exclusive = True

    def __init__(self, name: bytes, stamp: int, extents: Sequence[Extent], found: int, why: str) -> None:
        self.name, self.stamp, self.extents, self.found, self.why = name, stamp, extents, found, why

    def update_index(self, batch: WriteBatch, txn: Any) -> bool:
        index = batch.index
        record = index.versions.version_at(txn, self.name, self.stamp)
        bad = () if record is None else tuple(each for each in record.extents if each in self.extents)
        if record is None or not bad:
            return False
        key = _key(self.name, self.stamp)
        raw = index.quarantine.get(txn, key)
        known = () if raw is None else msgspec.msgpack.decode(raw, type=Quarantined).extents
        bad = tuple(dict.fromkeys((*known, *bad)))
        add_to_quarantine(index, txn, self.name, self.stamp, Quarantined(bad, self.found, self.why))
        failpoints.hit("store.quarantine.confined")
        if not record.broken:
            index.versions.replace_version(txn, self.name, msgspec.structs.replace(record, broken=True))
        return not record.broken


class DropDamagedPart(Mutation):
    """Drops a damaged part of an upload in progress, so that the client or another node must send it again.
    Returns True if it was there."""

    exclusive = True

    def __init__(self, upload_id: str, number: int, extents: Sequence[Extent]) -> None:
        self.upload_id, self.number, self.extents = upload_id, number, extents

    def update_index(self, batch: WriteBatch, txn: Any) -> bool:
        part = batch.index.get_part(txn, self.upload_id, self.number)
        if part is None or not any(extent in self.extents for extent in part.extents):
            return False
        batch.release_extents(part.extents)
        batch.index.delete_part(txn, self.upload_id, self.number)
        return True


class RestoreManifest(Mutation):
    """Rewrites a version's damaged manifest; the object's bytes are not affected. Returns True if it still
    used that manifest."""

    exclusive = True

    def __init__(self, name: bytes, stamp: int, extent: Extent) -> None:
        self.name, self.stamp, self.extent = name, stamp, extent
        self.existing: Record | None = None
        self.record: Record | None = None

    def check(self, batch: WriteBatch, txn: Any) -> None:
        record = batch.index.versions.version_at(txn, self.name, self.stamp)
        if record is not None and record.manifest == self.extent:
            self.existing = record

    def write_data(self, batch: WriteBatch, txn: Any | None) -> None:
        if self.existing is None:
            return
        bucket, _, key = self.name.decode().partition("\0")
        moved = msgspec.structs.replace(self.existing, manifest=None, moves=self.existing.moves + 1)
        self.record = write_manifest(batch, bucket, key, moved)

    def update_index(self, batch: WriteBatch, txn: Any) -> bool:
        if self.existing is None or self.record is None:
            return False
        batch.replace_extents(used_extents(self.existing), used_extents(self.record))
        batch.index.versions.replace_version(txn, self.name, self.record)
        return True


class PruneQuarantine(Mutation):
    """Forgets quarantined versions that were removed or replaced meanwhile; returns how many."""

    exclusive = True

    def update_index(self, batch: WriteBatch, txn: Any) -> int:
        index = batch.index
        over = list(stale_entries(index, txn))
        for name, stamp in over:
            release_from_quarantine(index, txn, name, stamp)
        return len(over)
