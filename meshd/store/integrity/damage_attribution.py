"""Damage attribution: maps damaged extents to the versions and parts that use them, and quarantines those.

Law: bytes are read again before anything is quarantined; a version that does not use them is left
alone. This code may run in any process of a node: the committer's transaction decides what enters the
quarantine.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from meshd.store.engine.file_scan import DataFileScan, DirectFile
from meshd.store.engine.mutations import used_extents, version_using_extent
from meshd.store.errors import is_exhausted
from meshd.store.integrity.quarantine import DropDamagedPart, QuarantineVersion, RestoreManifest
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from meshd.store.disks.layout import Disks
    from meshd.store.engine.group_commit import Committer
    from meshd.store.engine.member_header import Member
    from meshd.store.index.index import Index
    from meshd.store.records import DataFile, Extent
    from meshd.util.clock import Clock

_log = logging.getLogger(__name__)


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
        self._index, self._disks, self._committer, self._clock, self._run = (
            index,
            disks,
            committer,
            clock,
            run,
        )

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
            _log.error("damaged bytes quarantined; they are not served", extra={"object": name, "why": why})
        return bool(done)

    # blocking ---------------------------------------------------------------------------------------------

    def _damaged_uses(
        self, file: int, suspected: Sequence[Extent]
    ) -> tuple[str, Mapping[ExtentUse, list[Extent]]]:
        """Returns what is wrong, and the damaged extents by user."""
        with self._index.read_transaction() as txn:
            info = self._index.get_file(txn, file)
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
            record = version_using_extent(self._index, txn, member, extent)
            name = f"{member.bucket}\0{member.key}".encode()
            if record is not None:
                return ExtentUse(name, record.stamp, manifest=record.manifest == extent)
            if member.kind != "part" or not member.upload:
                return None
            part = self._index.get_part(txn, member.upload, member.part)
            if part is not None and extent in part.extents:
                return ExtentUse(name, upload=member.upload, part=member.part)
        return None

    def search_uses(self, wanted: set[Extent]) -> Iterator[tuple[ExtentUse, Extent]]:
        """Yields every use of these extents. Scans the whole index."""
        with self._index.read_transaction() as txn:
            for name, record in self._index.all_records(txn):
                for extent in used_extents(record):
                    if extent in wanted:
                        yield ExtentUse(name, record.stamp, manifest=extent == record.manifest), extent
            for upload_id, part in self._index.all_parts(txn):
                for extent in part.extents:
                    if extent in wanted:
                        yield ExtentUse(b"", upload=upload_id, part=part.number), extent
