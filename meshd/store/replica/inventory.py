"""Inventory of a replica: what it holds of each name, and the removal of data that it need not hold.

Law: an inventory page is read in one transaction; names come in byte order, each once, with versions,
uploads, parts and tombstones. Two stores with the same contents return the same inventory, however
often compaction has moved their bytes. Dropping is not a deletion: it leaves no tombstone and notifies no
other node. Until compaction has run, an index rebuild may restore dropped data; the next comparison drops it
again.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.engine.mutations import Mutation
from meshd.store.engine.upload_mutations import drop_unowned_upload
from meshd.store.index.tombstones import Tombstone, tombstones_complete_since
from meshd.store.index.uploads import UPLOAD_ID_LENGTH
from meshd.store.index.versions import TAIL
from meshd.store.integrity.quarantine import release_from_quarantine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.store.engine.group_commit import Committer
    from meshd.store.engine.write_batch import WriteBatch
    from meshd.store.index.index import Index
    from meshd.store.index.ordered_table import OrderedTable, TableCursor


_NOTHING = msgspec.Raw(b"\x80")
_AFTER = b"\x01"  # after a name: sorts after all its index entries


class HeldVersion(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A version, identified by id ("" for the null version) and stamp; `amended`: the stamp of its tags and
    ACL. `broken`: its bytes on this node are damaged, so another node must supply them."""

    version: str
    stamp: int
    size: int = 0
    marker: bool = False
    amended: int = 0
    broken: bool = False


class HeldPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of an upload in progress."""

    number: int
    stamp: int
    size: int


class HeldUpload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A multipart upload in progress."""

    upload_id: str
    parts: tuple[HeldPart, ...] = ()


class HeldName(msgspec.Struct, frozen=True, array_like=True):
    """Everything a replica holds of one name (bucket, NUL, key); versions newest first."""

    name: bytes
    versions: tuple[HeldVersion, ...] = ()
    uploads: tuple[HeldUpload, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()

    @property
    def bucket(self) -> str:
        return self.name.partition(b"\0")[0].decode()

    @property
    def key(self) -> str:
        return self.name.partition(b"\0")[2].decode()

    @property
    def size(self) -> int:
        """Returns the bytes of all versions and parts."""
        parts = sum(part.size for upload in self.uploads for part in upload.parts)
        return parts + sum(version.size for version in self.versions)


class InventoryPage(msgspec.Struct, frozen=True, array_like=True):
    """A page of an inventory. `after` begins the next page, b"" after the last one. `since`: all removals
    with a higher stamp are still recorded (0 if unknown)."""

    names: tuple[HeldName, ...]
    after: bytes = b""
    since: int = 0


class _Outline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A Record without its node-specific fields, decoded partially."""

    size: int
    etag: msgspec.Raw
    stamp: int
    modified: msgspec.Raw
    extents: msgspec.Raw
    headers: msgspec.Raw = _NOTHING
    metadata: msgspec.Raw = _NOTHING
    checksums: msgspec.Raw = _NOTHING
    checksum_type: msgspec.Raw = _NOTHING
    parts: msgspec.Raw = _NOTHING
    owner: msgspec.Raw = _NOTHING
    manifest: msgspec.Raw = _NOTHING
    moves: int = 0
    version: str = ""
    marker: bool = False
    tags: msgspec.Raw = _NOTHING
    acl: msgspec.Raw = _NOTHING
    amended: int = 0
    broken: bool = False


_outline = msgspec.msgpack.Decoder(_Outline).decode


def _second_nul(key: bytes) -> bytes:
    """Returns the name in a tombstone's key."""
    end = key.find(b"\0", key.index(b"\0") + 1)
    return key if end < 0 else key[:end]


class _Source:
    """A cursor over one table that advances name by name."""

    def __init__(self, cursor: TableCursor, name_of: Callable[[bytes], bytes]) -> None:
        self._cursor, self._name_of = cursor, name_of
        self.name = self._cursor_name()

    def _cursor_name(self) -> bytes | None:
        return None if self._cursor.key is None else self._name_of(self._cursor.key)

    def advance_past(self, name: bytes, found: list[tuple[bytes, Any]] | None) -> None:
        """Advances past `name`, and appends its entries to `found`."""
        cursor = self._cursor
        while self.name == name:
            if found is not None:
                assert cursor.key is not None
                found.append((cursor.key, cursor.value))
            cursor.next()
            self.name = self._cursor_name()


class _PageBuilder:
    """Builds the names of one page."""

    def __init__(self, index: Index, txn: Any) -> None:
        self._index, self._txn = index, txn

    def held_name(self, name: bytes, sources: dict[str, _Source]) -> HeldName:
        """Returns everything held of one name, and advances the sources past it."""
        rows: dict[str, list[tuple[bytes, Any]]] = {kind: [] for kind in sources}
        for kind, source in sources.items():
            source.advance_past(name, rows[kind])
        return HeldName(
            name,
            tuple(self._version(raw) for _, raw in (*rows["objects"], *rows["older"])),
            tuple(self._upload(key) for key, _ in rows["uploads"]),
            tuple(
                Tombstone(key[len(name) + 1 :].decode(), int.from_bytes(raw, "big"))
                for key, raw in rows["graves"]
            ),
        )

    @staticmethod
    def _version(raw: Any) -> HeldVersion:
        found = _outline(raw)
        return HeldVersion(found.version, found.stamp, found.size, found.marker, found.amended, found.broken)

    def _upload(self, key: bytes) -> HeldUpload:
        upload_id = key[-UPLOAD_ID_LENGTH:].decode()
        parts = self._index.uploads.parts_of(self._txn, upload_id)
        return HeldUpload(upload_id, tuple(HeldPart(part.number, part.stamp, part.size) for part in parts))


def read_inventory(
    index: Index, accepts: Callable[[bytes], bool], after: bytes, limit: int, max_visited: int
) -> InventoryPage:
    """Returns the next names after `after` that `accepts` accepts: at most `limit` of them, out of at most
    `max_visited` names visited.

    Takes microseconds per name; on the event loop, `max_visited` should be a few hundred.
    """
    tables: dict[str, tuple[OrderedTable, Callable[[bytes], bytes]]] = {
        "objects": (index.objects, lambda key: key),
        "older": (index.versions.older, lambda key: key[:-TAIL]),
        "uploads": (index.uploads.table, lambda key: key[: -UPLOAD_ID_LENGTH - 1]),
        "graves": (index.tombstones, _second_nul),
    }
    start = after + _AFTER if after else b""
    held: list[HeldName] = []
    with index.read_transaction() as txn, ExitStack() as stack:
        sources = {
            kind: _Source(stack.enter_context(table.open_cursor(txn, start)), name_of)
            for kind, (table, name_of) in tables.items()
        }
        builder, name = _PageBuilder(index, txn), after
        everyone = tuple(sources.values())
        for _ in range(max_visited):
            names = [source.name for source in everyone if source.name is not None]
            if not names:
                return InventoryPage(tuple(held))
            name = min(names)
            if accepts(name):
                held.append(builder.held_name(name, sources))
                if len(held) == limit:
                    break
            else:
                for source in everyone:
                    if source.name == name:
                        source.advance_past(name, None)
    return InventoryPage(tuple(held), name)


class DropUnowned(Mutation):
    """Drops exactly these versions and uploads; returns how many were there."""

    exclusive = True

    def __init__(self, names: Sequence[HeldName]) -> None:
        self.names = names

    def update_index(self, batch: WriteBatch, txn: Any) -> int:
        return sum(self._drop(batch, txn, held) for held in self.names)

    @staticmethod
    def _drop(batch: WriteBatch, txn: Any, held: HeldName) -> int:
        versions, dropped = batch.index.versions, 0
        for held_version in held.versions:
            record = versions.version_at(txn, held.name, held_version.stamp)
            if record is not None and record.version == held_version.version:
                batch.release_extents(record.used_extents)
                versions.remove_version(txn, held.name, record)
                release_from_quarantine(batch.index, txn, held.name, record.stamp)
                dropped += 1
        for held_upload in held.uploads:
            upload = batch.index.uploads.get_upload(txn, held.bucket, held.key, held_upload.upload_id)
            if upload is not None:
                drop_unowned_upload(batch, txn, upload)
                dropped += 1
        return dropped


class RaiseWriteFence(Mutation):
    """Carries nothing but its epoch: committing it fences off writes of this node under earlier maps
    (`WriteContext`)."""

    exclusive = True


class RecordSyncedStamp(Mutation):
    """Records the stamp up to which this store has received every change. A rebuilt index knows none."""

    exclusive = True

    def __init__(self, stamp: int) -> None:
        self.stamp = stamp

    def update_index(self, batch: WriteBatch, txn: Any) -> None:
        batch.index.put_meta(txn, "standing", self.stamp)


class ReplicaInventory:
    """What a store holds as a replica, and up to when it is complete. One per process."""

    def __init__(self, index: Index, committer: Committer) -> None:
        self._index, self._committer = index, committer

    def read_page(
        self,
        accepts: Callable[[bytes], bool],
        after: bytes = b"",
        *,
        limit: int = 1000,
        max_visited: int = 1000,
    ) -> InventoryPage:
        """Returns the next names (bucket, NUL, key) after `after` that `accepts` admits, with everything held
        of them.

        At most `limit` of them, out of at most `max_visited` visited; takes a few microseconds per name.
        """
        return read_inventory(self._index, accepts, after, limit, max_visited)

    async def drop_unowned(self, names: Sequence[HeldName]) -> int:
        """Drops these versions and uploads locally, because other nodes hold them or no node needs
        them; returns how many were there."""
        dropped: int = await asyncio.shield(self._committer.submit(DropUnowned(names)))
        return dropped

    def synced_stamp(self) -> int:
        """Returns the stamp up to which this store has received every change that concerns it; 0 if
        unknown."""
        return int(self._index.get_meta("standing") or 0)

    async def record_synced_stamp(self, stamp: int) -> None:
        """Records that this store has received every change up to `stamp`."""
        await asyncio.shield(self._committer.submit(RecordSyncedStamp(stamp)))

    def tombstones_complete_since(self) -> int:
        """Returns the stamp above which every removal is still recorded (see `index.tombstones`); 0 for a new
        store."""
        with self._index.read_transaction() as txn:
            return tombstones_complete_since(self._index, txn)
