"""Quarantine: the table of versions with damaged bytes, and the search for the users of damaged extents.

Law: a version in quarantine keeps its place, its metadata and its extents, but its bytes are never
served: its record is marked `broken`. The table says what is damaged. Data files hold no trace of the
quarantine; a rebuilt index finds the damage again.
Bytes are read again before anything is quarantined, and a version that does not use them is left alone.
Any process of a node may do that: the committer's transaction decides what enters the quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshd.store.engine.file_scan import DataFileScan, DirectFile
from meshd.store.engine.mutations import Mutation, write_manifest
from meshd.store.errors import QuarantinedError, is_exhausted
from meshd.store.integrity.verification import drain_damage_reports
from meshd.store.records import Extent  # noqa: TC001  msgspec reads the annotations
from meshd.telemetry import metrics
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from meshd.store.disks.layout import Disks
    from meshd.store.engine.group_commit import Committer
    from meshd.store.engine.member_header import Member
    from meshd.store.engine.write_batch import WriteBatch
    from meshd.store.index.index import Index
    from meshd.store.records import DataFile, Record
    from meshd.util.clock import Clock

_log = logging.getLogger(__name__)

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
        index.quarantine.put(txn, key, msgspec.msgpack.encode(Quarantined(bad, self.found, self.why)))
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
        part = batch.index.uploads.get_part(txn, self.upload_id, self.number)
        if part is None or not any(extent in self.extents for extent in part.extents):
            return False
        batch.release_extents(part.extents)
        batch.index.uploads.delete_part(txn, self.upload_id, self.number)
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
        batch.replace_extents(self.existing.used_extents, self.record.used_extents)
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


class ExtentUse(NamedTuple):
    """A use of an extent: by a version (name and stamp), for its bytes or for its manifest; or by a part of
    an upload (`part` from 1 on, `upload` its id)."""

    name: bytes
    stamp: int = 0
    manifest: bool = False
    upload: str = ""
    part: int = 0


class DamageAttributor:
    """Finds and quarantines the users of damaged extents. One per process."""

    def __init__(
        self,
        index: Index,
        disks: Disks,
        committer: Committer,
        clock: Clock,
        run: Callable[..., Awaitable[Any]],
    ) -> None:
        self._index, self._disks, self._committer = index, disks, committer
        self._clock, self._run = clock, run
        for disk in disks.roots.values():
            metrics.store_damage.labels(str(disk))  # 0 from the start: an increase needs a value before it

    async def attribute_damage(self, extents: Iterable[Extent]) -> int:
        """Reads these extents again and quarantines what uses damaged ones; returns how many versions and
        parts."""
        quarantined = 0
        by_file: dict[int, list[Extent]] = defaultdict(list)
        for extent in dict.fromkeys(extents):
            by_file[extent.file].append(extent)
        for file, suspected in by_file.items():
            why, uses = await self._run(
                lambda file=file, suspected=suspected: self._damaged_uses(file, suspected)
            )
            for use, bad in uses.items():
                quarantined += await self._quarantine(use, bad, why)
        return quarantined

    async def _quarantine(self, use: ExtentUse, bad: Sequence[Extent], why: str) -> bool:
        name = use.name.decode(errors="replace").replace("\0", "/", 1)
        if use.part:
            done = await self._committer.submit(DropDamagedPart(use.upload, use.part, bad))
        elif use.manifest:
            done = await self._committer.submit(RestoreManifest(use.name, use.stamp, bad[0]))
            if done:
                _log.warning("a damaged manifest was rewritten", extra={"object": name})
            return False
        else:
            mutation = QuarantineVersion(use.name, use.stamp, bad, self._clock.now_ms(), why)
            done = await self._committer.submit(mutation)
        if done:
            metrics.quarantined.inc()
            if (disk := self._disks.roots.get(bad[0].disk)) is not None:
                metrics.store_damage.labels(str(disk)).inc()
            _log.error("damaged bytes quarantined; they are not served", extra={"object": name, "why": why})
        return bool(done)

    # blocking ---------------------------------------------------------------------------------------------

    def _damaged_uses(
        self, file: int, suspected: Sequence[Extent]
    ) -> tuple[str, Mapping[ExtentUse, list[Extent]]]:
        """Returns what is wrong, and the damaged extents by user."""
        with self._index.read_transaction() as txn:
            info = self._index.files.get_file(txn, file)
        if info is None:
            return "", {}
        bad, why = self._damaged_extents(info, file, suspected)
        return (why, self._uses_of(info, file, bad)) if bad else ("", {})

    def _damaged_extents(
        self, info: DataFile, file: int, suspected: Sequence[Extent]
    ) -> tuple[list[Extent], str]:
        bad: list[Extent] = []
        why = "its bytes do not match their checksum"
        try:
            with DirectFile(self._disks.path(info.disk, file)) as found:
                for extent in suspected:
                    try:
                        if found.is_intact(extent):
                            # The device is fine, so the page cache may be wrong: drop the cached pages.
                            found.evict_cached_pages(extent)
                        else:
                            bad.append(extent)
                    except OSError as error:
                        if is_exhausted(error):
                            raise
                        why = f"the device cannot read it ({error.strerror})"
                        metrics.store_disk_errors.labels("failed").inc()
                        bad.append(extent)
        except FileNotFoundError:
            return list(suspected), "its data file is gone"
        except OSError as error:
            if is_exhausted(error):  # the next scrub or reader checks again
                _log.warning(
                    "cannot verify suspected bytes: this process is short of resources",
                    extra={"why": error.strerror},
                )
                return [], ""
            metrics.store_disk_errors.labels("failed").inc()
            return list(suspected), f"the device cannot open its data file ({error.strerror})"
        return bad, why

    def _uses_of(self, info: DataFile, file: int, bad: Sequence[Extent]) -> Mapping[ExtentUse, list[Extent]]:
        found: dict[ExtentUse, list[Extent]] = defaultdict(list)
        left = set(bad)
        if info.kind != "own" or info.refs <= 1:
            for member, extent in self._members(info, file, left):
                use = self.use_of_member(member, extent)
                if use is not None:
                    found[use].append(extent)
                    left.discard(extent)
        if left:  # shared by copies, or the member's header is damaged, too
            for use, extent in self.search_uses(left):
                found[use].append(extent)
        return found

    def _members(self, info: DataFile, file: int, wanted: set[Extent]) -> Iterator[tuple[Member, Extent]]:
        limit, missing = (info.end if info.kind == "segment" else None), set(wanted)
        try:
            with DataFileScan(info.disk, file, self._disks.path(info.disk, file)) as scan:
                for found in scan.members(limit):
                    extent = found.extent
                    if extent in missing:
                        missing.discard(extent)
                        yield found.member, extent
                    if not missing:
                        return
        except OSError:
            return

    def use_of_member(self, member: Member, extent: Extent) -> ExtentUse | None:
        """Returns the user of a member's bytes, according to the member's header."""
        with self._index.read_transaction() as txn:
            record = self._index.versions.version_using_extent(txn, member, extent)
            name = f"{member.bucket}\0{member.key}".encode()
            if record is not None:
                return ExtentUse(name, record.stamp, manifest=record.manifest == extent)
            if member.kind != "part" or not member.upload:
                return None
            part = self._index.uploads.get_part(txn, member.upload, member.part)
            if part is not None and extent in part.extents:
                return ExtentUse(name, upload=member.upload, part=member.part)
        return None

    def search_uses(self, wanted: set[Extent]) -> Iterator[tuple[ExtentUse, Extent]]:
        """Yields every use of these extents. Scans the whole index."""
        with self._index.read_transaction() as txn:
            for name, record in self._index.all_records(txn):
                for extent in record.used_extents:
                    if extent in wanted:
                        yield ExtentUse(name, record.stamp, manifest=extent == record.manifest), extent
            for upload_id, part in self._index.uploads.all_parts(txn):
                for extent in part.extents:
                    if extent in wanted:
                        yield ExtentUse(b"", upload=upload_id, part=part.number), extent


class Quarantine:
    """The quarantined versions of a store. One per process."""

    def __init__(
        self,
        index: Index,
        disks: Disks,
        committer: Committer,
        clock: Clock,
        run: Callable[..., Awaitable[Any]],
    ) -> None:
        self._index, self._disks, self._committer, self._run = index, disks, committer, run
        self.attributor = DamageAttributor(index, disks, committer, clock, run)
        self._counted = -1, 0  # after which transaction, and how many

    def entries(
        self, limit: int = 1000, after: tuple[bytes, int] | None = None
    ) -> Sequence[tuple[bytes, int, Quarantined]]:
        """Returns (name, stamp, damage) of quarantined versions after `after`, in order."""
        with self._index.read_transaction() as txn:
            return tuple(islice(all_quarantined(self._index, txn, after), limit))

    def count(self) -> int:
        """Returns the number of quarantined versions. Cheap while nothing is written."""
        newest = self._index.last_transaction
        if newest != self._counted[0]:
            with self._index.read_transaction() as txn:  # as of that transaction, or a later one
                self._counted = newest, self._index.quarantine.count(txn)
        return self._counted[1]

    async def process_damage_reports(self) -> int:
        """Checks what readers of this process found damaged and quarantines it; returns how many versions and
        parts were quarantined."""
        noticed = drain_damage_reports(
            lambda extent: extent.disk in self._disks.roots or extent.disk in self._disks.lost
        )
        return await self.attributor.attribute_damage(noticed) if noticed else 0

    async def prune(self) -> int:
        """Drops entries of versions that were removed or overwritten; returns how many."""
        if not await self._run(self._has_stale_entries):
            return 0
        swept: int = await asyncio.shield(self._committer.submit(PruneQuarantine()))
        return swept

    def _has_stale_entries(self) -> bool:
        with self._index.read_transaction() as txn:
            return any(True for _ in stale_entries(self._index, txn))

    async def damaged_bytes(self) -> int:
        """Returns the number of damaged bytes in quarantine. Scans all of it, like `prune`."""
        size: int = await self._run(self._damaged_bytes)
        return size

    def _damaged_bytes(self) -> int:
        with self._index.read_transaction() as txn:
            found = all_quarantined(self._index, txn)
            return sum(extent.length for *_, about in found for extent in about.extents)
