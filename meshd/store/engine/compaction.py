"""Compaction: rewrites the live members of a sparse segment and removes the old file.

Law: compaction writes through the committer like every other writer. Readers keep the files they
opened, and a retired file stays on disk for a grace period, because other processes may hold its path.
Invariant: a member that cancels others is carried along as long as any file may still contain them.

It keeps neighbours together: what it holds in memory at a time is written in order of bucket and key. This
costs no reads or writes, since these bytes are moved anyway.
"""

from __future__ import annotations

import asyncio
import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from meshd.store.disks.layout import has_free_space
from meshd.store.engine.compaction_mutations import (
    ForgetRetiredFiles,
    MoveManifestedExtent,
    MoveMember,
    Piece,
    PruneTombstones,
    RetireFile,
    RewriteTombstoneMember,
)
from meshd.store.engine.file_scan import DataFileScan
from meshd.store.engine.group_commit import store_error_from
from meshd.store.engine.member_header import cancels_others, stamp_of_version_id
from meshd.store.engine.mutations import Mutation
from meshd.store.engine.packs import should_be_packed
from meshd.store.errors import CorruptExtentError, DiskFullError
from meshd.store.index.index import object_key
from meshd.store.index.ordered_table import slot_filter
from meshd.store.index.tombstones import prunable_before
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from meshd.config import StoreSettings
    from meshd.store.disks.layout import Disks
    from meshd.store.engine.file_scan import ScannedMember
    from meshd.store.engine.group_commit import Committer
    from meshd.store.engine.member_header import Member
    from meshd.store.index.index import Index
    from meshd.store.records import DataFile, Extent
    from meshd.util.clock import Clock

GRACE = 60.0  # seconds that a retired file stays for processes that hold its path
_SORTED_BYTES: Final = 64 << 20
"""Bytes that are in memory, and in order, at a time."""
_GROUP_BYTES: Final = 4 << 20
_MEMBER_BYTES: Final = 4 << 10  # what a member in memory takes beside its data
_PASSES = 3
_RESERVES_KEPT: Final = 3  # of a full disk's reserve, a rewrite leaves a third to deletes and documents
_TOMBSTONES_PAUSE = 0.05


class _Move(NamedTuple):
    """A mutation that carries a member along, and the place of its copy among the others: what an epoch reads
    here first, in order of bucket and key."""

    place: tuple[int, bytes]
    mutation: Mutation


class Compactor:
    """Compacts one file at a time. Only the coordinator process uses it."""

    def __init__(
        self,
        index: Index,
        disks: Disks,
        committer: Committer,
        clock: Clock,
        run: Callable[..., Awaitable[Any]],
        settings: StoreSettings,
    ) -> None:
        self._index, self._disks, self._committer = index, disks, committer
        self._clock, self._run = clock, run
        self.turn, self.segment_bytes = asyncio.Lock(), settings.segment_bytes
        """Held while members are moved that belong together."""
        self.first_copies: Callable[[str], bytes | None] = lambda bucket: None
        """Returns the slots of a bucket for which this node is the first to be asked, as a byte each that is
        not 0; None: all. Set in a mesh."""
        self._retired: dict[int, float] = {}
        self._tombstone_seconds = settings.tombstone_seconds
        self._tombstone_ms = round(1e3 * self._tombstone_seconds)

    def candidates(self, dead_share: float) -> list[int]:
        """Returns the sealed segments of which at least this share is dead, those with the most dead bytes
        first, and those whose small objects would take much less space in packs."""
        with self._index.read_transaction() as txn:
            files = [
                (file, info)
                for file, info in self._index.files.all_files(txn)
                if _sealed_segment(info) and info.disk in self._disks.roots
            ]
        shares = [
            (info.dead / max(1, info.live + info.dead) if info.refs else 1.0, file, should_be_packed(info))
            for file, info in files
        ]
        return [file for share, file, small in sorted(shares, reverse=True) if share >= dead_share or small]

    def is_short_of_space(self) -> bool:
        """Returns True if no disk can take another segment without touching its reserve (blocking)."""
        return not self._has_room(self.segment_bytes, 1)

    def _has_room(self, wanted: int, reserves: int) -> bool:
        return any(has_free_space(str(root), wanted, reserves) for root in self._disks.roots.values())

    async def compact(self, file: int) -> bool:
        """Moves the live members out of a sealed segment and retires it; call `purge` later. Returns True if
        it is retired or gone.

        Raises CorruptExtentError, DiskFullError, DiskFailedError; the file then stays as it is.
        """
        with self._index.read_transaction() as txn:
            info = self._index.files.get_file(txn, file)
        if info is None or info.state == "retired":
            return True  # its last user was removed meanwhile, and the file with it
        if not _sealed_segment(info):
            return False
        if not self._has_room(info.live, _RESERVES_KEPT):
            raise DiskFullError(
                f"no space to rewrite {info.live} live bytes of a segment; delete more objects, or add a disk"
            )
        for _ in range(_PASSES):
            try:
                async with self.turn:
                    await self._move_live_members(file, info)
            except FileNotFoundError:
                pass  # its last user was removed meanwhile
            except OSError as error:
                raise store_error_from(error) from error
            if await self._committer.submit(RetireFile(file)):
                self._retired[file] = self._clock.monotonic()
                return True
        return False

    async def purge(self, synced_before: float = math.inf) -> int:
        """Unlinks files that were retired, or first seen as retired, at least GRACE seconds ago; returns how
        many. A file of one object, which no compaction has moved, need not wait, except for a checkpoint."""
        now = self._clock.monotonic()
        with self._index.read_transaction() as txn:
            retired = {
                file: info.kind for file, info in self._index.files.all_files(txn) if info.state == "retired"
            }
        for file in retired:
            self._retired.setdefault(file, now)
        due = [
            file
            for file, kind in retired.items()
            if now - self._retired[file] >= (0 if kind == "own" else GRACE)
            and self._retired[file] < synced_before
        ]
        if not due:
            return 0
        paths = await self._committer.submit(ForgetRetiredFiles(due))
        await self._run(lambda: _unlink(paths))
        for file in due:
            del self._retired[file]
        return len(paths)

    async def prune_tombstones(self) -> None:
        """Drops tombstones that every node has had time to receive."""
        with self._index.read_transaction() as txn:
            now = self._clock.now_ms() * 1_000_000
            before = prunable_before(self._index, txn, now, self._tombstone_seconds)
        start = await self._committer.submit(PruneTombstones(before, b""))
        while start:
            await asyncio.sleep(_TOMBSTONES_PAUSE)
            start = await self._committer.submit(PruneTombstones(before, start))

    async def _move_live_members(self, file: int, info: DataFile) -> None:
        with DataFileScan(info.disk, file, self._disks.path(info.disk, file)) as scan:
            members, oldest = scan.members(info.end), self._oldest_cancelled(file)
            first = _FirstCopies(self.first_copies)
            while found := await self._run(lambda: list(self._gather(scan, members, oldest, first))):
                found.sort(key=lambda move: move.place)
                for group in commit_groups(move.mutation for move in found):
                    await asyncio.gather(*[self._committer.submit(mutation) for mutation in group])

    def _gather(
        self, scan: DataFileScan, members: Iterator[ScannedMember], oldest: int, first: _FirstCopies
    ) -> Iterator[_Move]:
        """Yields the next moves, as many as are in memory at a time, in the order of the file (blocking)."""
        weight = 0
        for found in members:
            move = self._move_for(scan, found, oldest, first)
            if move is not None:
                yield move
                weight += move.mutation.data_bytes + _MEMBER_BYTES
                if weight >= _SORTED_BYTES:
                    return

    def _move_for(
        self, scan: DataFileScan, found: ScannedMember, oldest: int, first: _FirstCopies
    ) -> _Move | None:
        member, extent = found.member, found.extent
        name = object_key(member.bucket, member.key)
        with self._index.read_transaction() as txn:
            record = self._index.versions.version_using_extent(txn, member, extent)
            if record is not None:
                piece = Piece(member, extent, _verified_bytes(scan, extent))
                current = self._index.versions.current_version(txn, name)
                read = current is not None and current.stamp == record.stamp and extent != record.manifest
                rank = 2 if not read else 0 if first.includes(member.bucket, name) else 1
                mutation = MoveMember(piece) if record.manifest is None else MoveManifestedExtent(piece)
                return _Move((rank, name), mutation)
            if self._uses(txn, member, extent):
                return _Move((2, name), MoveMember(Piece(member, extent, _verified_bytes(scan, extent))))
            needed = cancels_others(member) and self._still_cancels(txn, member, oldest)
        return _Move((2, name), RewriteTombstoneMember(member)) if needed else None

    def _uses(self, txn: Any, member: Member, extent: Extent) -> bool:
        """Returns True if an upload in progress uses this extent."""
        if member.kind == "part":
            part = self._index.uploads.get_part(txn, member.upload, member.part) if member.upload else None
            return part is not None and extent in part.extents
        upload = (
            self._index.uploads.get_upload(txn, member.bucket, member.key, member.upload)
            if member.upload
            else None
        )
        return upload is not None and upload.place == extent

    def _still_cancels(self, txn: Any, member: Member, oldest: int) -> bool:
        """Returns True if data that this member cancelled could come back without it. A newer null version
        also covers older null versions; nothing else covers a version with an id."""
        stamp = int(member.stamp)
        if self._tombstone_ms and stamp > (self._clock.now_ms() - self._tombstone_ms) * 1_000_000:
            return True  # a rebuilt index must still be able to tell other nodes of the removal
        if member.version and member.kind == "deleted":
            return oldest <= (stamp_of_version_id(member.version) or 0)
        if member.kind != "deleted":
            return oldest < stamp
        null = self._index.versions.null_version(txn, object_key(member.bucket, member.key))
        return oldest < stamp and (null is None or null.stamp < stamp)

    def _oldest_cancelled(self, file: int) -> int:
        """Returns the lowest stamp that a member cancelled by one in `file` may have, over all other
        files."""
        with self._index.read_transaction() as txn:
            files = [
                info for other, info in self._index.files.all_files(txn) if other != file and info.buried
            ]
        return min((info.first_stamp for info in files), default=1 << 64)


class _FirstCopies:
    """Which names this node is the first to be asked for, under one map. `slots`: see `Compactor`."""

    def __init__(self, slots: Callable[[str], bytes | None]) -> None:
        self._slots = slots
        self._filters: dict[str, Callable[[bytes], bool]] = {}

    def includes(self, bucket: str, name: bytes) -> bool:
        if bucket not in self._filters:
            slots = self._slots(bucket)
            self._filters[bucket] = (lambda _: True) if slots is None else slot_filter(slots)
        return self._filters[bucket](name)


_M = TypeVar("_M", bound=Mutation)


def commit_groups(mutations: Iterable[_M]) -> Iterator[list[_M]]:
    """Yields mutations in groups of a few megabytes, for one commit each."""
    group: list[_M] = []
    weight = 0
    for mutation in mutations:
        group.append(mutation)
        weight += mutation.data_bytes + _MEMBER_BYTES
        if weight >= _GROUP_BYTES:
            yield group
            group, weight = [], 0
    if group:
        yield group


def _sealed_segment(info: DataFile) -> bool:
    return info.kind == "segment" and info.state == "sealed"


def _verified_bytes(scan: DataFileScan, extent: Extent) -> bytes:
    if not scan.is_intact(extent):
        metrics.store_corrupt_reads.inc()
        raise CorruptExtentError(
            f"{extent.length} bytes at {extent.offset} of {scan.path} do not match their checksum; "
            "run meshd fsck"
        )
    return scan.read_extent(extent)


def _unlink(paths: list[str]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)
