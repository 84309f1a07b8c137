"""Key-order rewrite: current versions of small objects, written again in the order of their names.

Law: it moves members as compaction does, through the committer, one version at a time: what was replaced,
removed or changed meanwhile stays as it is, and readers keep the files that they opened. Compaction reclaims
the space. Objects in files of their own, and those that need a manifest, are never moved. An object that has
one only because its tags or ACL were changed, or because it is a copy, gets a header that says all of it.
"""

from __future__ import annotations

import asyncio
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from awscrt.checksums import crc32c

from meshd.store.disks.layout import free_above_reserve
from meshd.store.engine.compaction import commit_groups
from meshd.store.engine.compaction_mutations import MoveMember, Piece
from meshd.store.engine.file_scan import DirectFile
from meshd.store.engine.group_commit import store_error_from
from meshd.store.engine.member_header import object_member, render_member_header
from meshd.store.engine.mutations import replace_version
from meshd.store.errors import DiskFullError, MetadataTooLargeError
from meshd.store.index.index import object_key
from meshd.store.index.ordered_table import slot_filter
from meshd.store.index.versions import decode
from meshd.util.async_tasks import finish_before_cancel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from meshd.store.disks.layout import Disks
    from meshd.store.engine.compaction import Compactor
    from meshd.store.engine.group_commit import Committer
    from meshd.store.engine.write_batch import WriteBatch
    from meshd.store.index.index import Index
    from meshd.store.records import Extent, Record

LARGE: Final = "in a file of its own"
IN_PARTS: Final = "uploaded in parts"
LONG_TAGS: Final = "tags too long for its header"
DAMAGED: Final = "damaged"
_COMMIT_SECONDS: Final = 100.0  # that a cancelled move waits for its commit


class PlacedObject(NamedTuple):
    """A current version and where it is. `fixed`: why it is never moved, or ""."""

    key: str
    record: Record
    fixed: str

    @property
    def extent(self) -> Extent:
        """The place of an object that may be moved."""
        return self.record.extents[0]


class KeyOrderRewriter:
    """Moves objects of one store. Only the coordinator process uses it, with the one `compactor`, which then
    writes nothing between them."""

    def __init__(
        self,
        index: Index,
        disks: Disks,
        committer: Committer,
        run: Callable[..., Awaitable[Any]],
        compactor: Compactor,
    ) -> None:
        self._index, self._disks, self._committer = index, disks, committer
        self._run, self._turn = run, compactor.turn
        self.segment_bytes = compactor.segment_bytes

    def __repr__(self) -> str:
        return f"<KeyOrderRewriter of {self._disks!r}>"

    @property
    def roots(self) -> Mapping[int, Path]:
        """The directories of the disks in service, by number."""
        return self._disks.roots

    def free_bytes(self, disk: int) -> int:
        """Returns what a disk can take above its reserve (blocking). Raises OSError."""
        return free_above_reserve(str(self._disks.roots[disk]))

    def page(
        self, bucket: str, prefix: str, after: str, limit: int, slots: bytes | None = None
    ) -> list[PlacedObject]:
        """Returns up to `limit` current versions behind the key `after`, in order of key; with `slots` (a
        byte for each) only those in slots with a byte other than 0 (blocking)."""
        accepts = (lambda _: True) if slots is None else slot_filter(slots)
        base, start = object_key(bucket, prefix), object_key(bucket, after) + b"\0" if after else b""
        own: dict[int, bool] = {}
        found = []
        with self._index.read_transaction() as txn:
            named = self._index.versions.objects.items(txn, start, base)
            for name, raw in islice((each for each in named if accepts(each[0])), limit):
                record = decode(raw)
                key = bytes(name).partition(b"\0")[2].decode()
                found.append(PlacedObject(key, record, self._why_fixed(txn, bucket, key, record, own)))
        return found

    def _why_fixed(self, txn: Any, bucket: str, key: str, record: Record, own: dict[int, bool]) -> str:
        if record.broken:
            return DAMAGED
        if record.parts or len(record.extents) != 1:
            return IN_PARTS
        file = record.extents[0].file
        if file not in own:
            info = self._index.files.get_file(txn, file)
            own[file] = info is None or info.kind != "segment"
        if own[file]:
            return LARGE
        return LONG_TAGS if record.manifest is not None and not _fits_header(bucket, key, record) else ""

    async def move(self, bucket: str, objects: Sequence[PlacedObject]) -> tuple[int, list[str]]:
        """Writes objects again, one behind the other in the order given, and waits until they are durable.
        All their bytes are in memory meanwhile. Cancelled, it ends with the commit in progress.

        Returns the bytes written and the keys of damaged objects, which stay where they are. Raises
        DiskFullError, DiskFailedError.
        """
        try:
            found = await self._run(lambda: self._read(objects))
            moves = [
                _MoveObject(bucket, each, data)
                for each in objects
                if (data := found.get(each.extent)) is not None
            ]
            async with self._turn:
                for group in commit_groups(moves):
                    await self._run(lambda group=group: self._require_space(group))
                    commits = asyncio.gather(*[self._committer.submit(move) for move in group])
                    await finish_before_cancel(commits, _COMMIT_SECONDS)
        except OSError as error:
            raise store_error_from(error) from error
        damaged = [each.key for each in objects if found.get(each.extent, b"") is None]
        return sum(move.data_bytes for move in moves), damaged

    def _read(self, objects: Iterable[PlacedObject]) -> dict[Extent, bytes | None]:
        """Returns the bytes of each, read in the order of the disk; None for damaged ones, nothing for those
        whose file is gone."""
        found: dict[Extent, bytes | None] = {}
        extents = sorted(
            (each.extent for each in objects), key=lambda each: (each.disk, each.file, each.offset)
        )
        for (disk, number), there in groupby(extents, key=lambda each: (each.disk, each.file)):
            try:
                with DirectFile(self._disks.path(disk, number)) as file:
                    for extent in there:
                        data = b"".join(map(bytes, file.iter_chunks(extent.offset, extent.length)))
                        found[extent] = data if crc32c(data) == extent.crc32c else None
            except FileNotFoundError:  # compacted since the lookup
                continue
        return found

    def _require_space(self, moves: Iterable[_MoveObject]) -> None:
        """Raises DiskFullError if a disk cannot take the objects that are on it now."""
        wanted: dict[int, int] = {}
        for move in moves:
            old = move.piece.old
            wanted[old.disk] = wanted.get(old.disk, 0) + old.length
        for disk, size in wanted.items():
            if disk in self._disks.roots and self.free_bytes(disk) <= size:
                raise DiskFullError(
                    f"{self._disks.roots[disk]} is full: free some space, or wait for compaction, and start "
                    "the job again; it continues where it stopped"
                )


class _MoveObject(MoveMember):
    """Writes an object again as its record says; without effect if the record has changed since then."""

    def __init__(self, bucket: str, placed: PlacedObject, data: bytes) -> None:
        extent, self._record = placed.extent, placed.record
        super().__init__(Piece(object_member(bucket, placed.key, placed.record, extent.crc32c), extent, data))

    def _repoint_user(self, batch: WriteBatch, txn: Any, old: Extent, new: Extent) -> bool:
        name = object_key(self.piece.member.bucket, self.piece.member.key)
        if batch.index.versions.version_at(txn, name, self._record.stamp) != self._record:
            return False
        moved = msgspec.structs.replace(
            self._record, extents=(new,), manifest=None, moves=self._record.moves + 1
        )
        replace_version(batch, txn, name, moved, self._record)
        return True


def _fits_header(bucket: str, key: str, record: Record) -> bool:
    try:
        render_member_header(object_member(bucket, key, record, 0), record.size)
    except MetadataTooLargeError:
        return False
    return True
