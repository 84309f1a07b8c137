"""Write batch: the members, data files and space accounts that one group commit changes.

Law: only the committer thread uses a batch. It flushes data first, then writes the accounts inside the
index transaction, then removes the files that nothing uses.
Invariant: stamps of a key rise in commit order, deletions included; a write that another process has
overtaken is restamped in place. A stamp is the time of submission, not the time of execution, because a
process may be suspended between the two while other nodes go on.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from meshd.store.disks.layout import LOST_DISKS_KEY, FreeSpace
from meshd.store.engine.member_header import (
    ALIGNED,
    PAGE,
    RESERVE,
    cancels_others,
    render_member_header,
    stamp_text,
    version_id_of,
)
from meshd.store.engine.packs import data_crc32, is_packed, render_entry
from meshd.store.errors import DiskFailedError, StaleEpochError
from meshd.store.index.tombstones import Tombstones
from meshd.store.records import DataFile, Extent
from meshd.telemetry import metrics
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshd.store.disks.layout import Disks
    from meshd.store.engine.data_files import LargeObjectFile, Segment
    from meshd.store.engine.member_header import Member
    from meshd.store.index.index import Index
    from meshd.store.writer_api import Buffer
    from meshd.util.clock import Clock


class StagedMember(msgspec.Struct):
    """A staged member: where its data are, and how to change its header before the commit."""

    extent: Extent
    stamp: int
    patch: Callable[[Member], None]
    member: Member
    durable: bool  # `patch` syncs the file itself
    large_file: LargeObjectFile | None = None


class _Change(msgspec.Struct):
    """Changes of one data file's accounts by a commit group."""

    live: int = 0
    dead: int = 0
    refs: int = 0
    tombs: int = 0
    buried: int = 0
    end: int = 0
    framing: int = 0
    stamps: list[int] = msgspec.field(default_factory=list)
    made: DataFile | None = None
    sealed: bool = False
    kept: bool = False


def _aligned_header_size(member: Member, size: int, start: int) -> int | None:
    """Returns the header size that makes the data of a large member at `start` begin at a page boundary; None
    if no padding is needed. sendfile would split unaligned data, on both ends of the connection."""
    if size < ALIGNED:
        return None
    needed = len(render_member_header(member, size))
    short = -(start + needed) % PAGE
    return needed + short if short else None


def _restamp_file(large_file: LargeObjectFile, member: Member) -> None:
    large_file.patch_header(0, render_member_header(member, large_file.size, reserve=RESERVE))


class Syncable(Protocol):
    """A data file that can be synced."""

    def sync(self) -> None:
        """Makes written bytes durable. Raises OSError."""
        ...


def timed_sync(file: Syncable, clock: Clock) -> None:
    """Makes a data file durable and records how long that took (blocking). Raises OSError."""
    began = clock.monotonic()
    file.sync()
    metrics.store_sync_seconds.observe(clock.monotonic() - began)


class WriteBatch:
    """The state of one commit group. `segment(disk)` returns the open segment of a disk."""

    def __init__(
        self,
        index: Index,
        disks: Disks,
        clock: Clock,
        segment: Callable[[int], Segment],
        *,
        writer: str,
        durable: bool,
        keep_tombstones: bool = False,
    ) -> None:
        self.index, self.disks, self.clock, self.writer, self.durable = index, disks, clock, writer, durable
        self.free_space = FreeSpace(disks)
        self._keep_tombstones = keep_tombstones
        self._segment = segment
        self._segments: dict[int, Segment] = {}
        self._changes: dict[int, _Change] = {}
        self._published: list[LargeObjectFile] = []
        self._unused_files: list[str] = []
        self._tombstones: Tombstones | None = None
        self._restamped = False
        self.submitted_stamp = 0
        self.last_stamp = 0
        self.documents_only = False
        """Whether it writes to the reserved bucket alone."""

    # staging ----------------------------------------------------------------------------------------------

    def load_last_stamp(self, txn: Any) -> None:
        """Makes the stamps of this group exceed every committed stamp, even if the clock was set back."""
        self.last_stamp = max(self.last_stamp, self.index.get_meta("last_stamp", txn) or 0)

    def observe_stamp(self, stamp: int) -> None:
        """Makes later stamps of this node exceed another node's stamp, whatever its clock shows."""
        self.last_stamp = max(self.last_stamp, stamp)

    def check_epoch(self, txn: Any, epoch: int) -> None:
        """Admits a write under map version `epoch` and fences off writes under earlier versions. Raises
        StaleEpochError if a later version was seen.

        The epoch is stored in the index, so the fence holds for every process of the node, and it is checked
        inside the transaction that commits the write.
        """
        known: int = self.index.get_meta("epoch", txn) or 0
        if epoch < known:
            raise StaleEpochError(known)
        if epoch > known:
            self.index.put_meta(txn, "epoch", epoch)

    def next_stamp(self) -> int:
        """Returns the next stamp: the time at which the current mutation was submitted, or one above all
        known stamps."""
        self.last_stamp = max(self.submitted_stamp, self.last_stamp + 1)
        return self.last_stamp

    def _change(self, file: int) -> _Change:
        return self._changes.setdefault(file, _Change())

    def append_member(self, member: Member, stamp: int, chunks: Sequence[Buffer], size: int) -> StagedMember:
        """Stages a member in the open segment of its disk. Raises OSError, DiskFailedError."""
        segment = self._segment(self.free_space.choose_disk(member.bucket, member.key, size))
        packed = is_packed(member, size)
        start = segment.next_start(packed=packed)
        member = msgspec.structs.replace(member, file=segment.file, at=start)
        if packed:
            render = partial(render_entry, size=size, crc32=data_crc32(chunks))
            data = segment.append_entry(render(member), chunks, size, member.modified)
        else:
            render = partial(
                render_member_header, size=size, reserve=_aligned_header_size(member, size, start)
            )
            data = segment.append(render(member), chunks, size)
        self._segments[segment.file] = segment
        change = self._change(segment.file)
        change.made = DataFile(segment.disk, "segment", "open", self.writer, framing=0)
        change.stamps.append(stamp)
        change.tombs += cancels_others(member)
        extent = Extent(segment.disk, segment.file, data, size, member.crc32c)

        def patch(late: Member) -> None:
            segment.patch_header(start, render(late))

        return StagedMember(extent, stamp, patch, member, False)

    def publish_file(self, large_file: LargeObjectFile, member: Member, stamp: int) -> StagedMember:
        """Writes the header of a large object file and renames it. Raises OSError."""
        member = msgspec.structs.replace(member, file=large_file.file)
        large_file.publish(render_member_header(member, large_file.size, reserve=RESERVE), self.durable)
        self._published.append(large_file)
        change = self._change(large_file.file)
        change.made = DataFile(large_file.disk, "own", "sealed", self.writer)
        change.end = RESERVE + large_file.size
        change.stamps.append(stamp)
        extent = Extent(large_file.disk, large_file.file, RESERVE, large_file.size, large_file.crc)
        return StagedMember(extent, stamp, partial(_restamp_file, large_file), member, True, large_file)

    def flush_segments(self) -> None:
        """Writes and syncs everything staged. Raises OSError."""
        for segment in self._segments.values():
            segment.write_pending()
            change = self._change(segment.file)
            change.end, change.framing = segment.tail, segment.pending_framing
            if self.durable:
                timed_sync(segment, self.clock)

    # settling, inside the index transaction ---------------------------------------------------------------

    def restamp_if_behind(self, staged: StagedMember, existing: int) -> int:
        """Returns the stamp to commit with. If it is not above `existing`, because another process committed
        in between, the member gets a new stamp in the data file."""
        if staged.stamp > existing:
            return staged.stamp
        self.last_stamp = max(self.last_stamp, existing)
        staged.stamp = self.next_stamp()
        version = version_id_of(staged.stamp) if staged.member.version else ""
        staged.patch(msgspec.structs.replace(staged.member, stamp=stamp_text(staged.stamp), version=version))
        self._restamped = self._restamped or not staged.durable
        return staged.stamp

    def tombstones(self, txn: Any) -> Tombstones:
        """Returns the tombstones as this group's transaction sees them."""
        if self._tombstones is None:
            self._tombstones = Tombstones(self.index, txn, keep=self._keep_tombstones)
        return self._tombstones

    def retain_extents(self, extents: Sequence[Extent]) -> None:
        """Accounts for a record that begins to use these extents."""
        for extent in extents:
            change = self._change(extent.file)
            change.live += extent.length
            change.refs += 1

    def release_extents(self, extents: Sequence[Extent]) -> None:
        """Accounts for a record that stops using these extents."""
        for extent in extents:
            change = self._change(extent.file)
            change.live -= extent.length
            change.dead += extent.length
            change.refs -= 1
            change.buried += 1

    def replace_extents(self, old: Sequence[Extent], new: Sequence[Extent]) -> None:
        """Accounts for a record that replaces another; extents of both stay in use."""
        if len(new) > 1 and old and not set(old).isdisjoint(new):  # a single extent was just written
            both = Counter(old) & Counter(new)
            old, new = tuple((Counter(old) - both).elements()), tuple((Counter(new) - both).elements())
        self.release_extents(old)
        self.retain_extents(new)

    def discard_member(self, staged: StagedMember) -> None:
        """Accounts for a member that was written but will not be used."""
        change = self._change(staged.extent.file)
        change.dead += staged.extent.length
        change.buried += 1

    def void_member(self, staged: StagedMember) -> None:
        """Discards a member and marks it as void in the data file if an index rebuild would otherwise accept
        it."""
        self.discard_member(staged)
        if staged.member.kind == "object":
            staged.patch(msgspec.structs.replace(staged.member, kind="wasted"))
            self._restamped = self._restamped or not staged.durable

    def withdraw_member(self, staged: StagedMember) -> None:
        """Voids a member that its mutation must not commit. A large object file becomes a draft again,
        because its writer may submit it once more. Raises OSError."""
        self.void_member(staged)
        if staged.large_file is not None:
            staged.large_file.unpublish()
            self._published.remove(staged.large_file)
            del self._changes[staged.extent.file]

    def seal_segment(self, file: int) -> None:
        """Marks a segment as sealed: it takes no more members."""
        self._change(file).sealed = True

    def keep_unused_file(self, file: int) -> None:
        """Keeps a file although nothing uses it, because compaction will retire it."""
        self._change(file).kept = True

    def write_accounts(self, txn: Any) -> None:
        """Writes the accounts to the index. The last step before the index commits."""
        if self._tombstones is not None:
            self._tombstones.save(txn)
        if not (self._changes or self.index.objects.is_changed):
            return
        if self._restamped:  # headers changed after the first sync; they must be durable before the index
            self.flush_segments()
        self._reject_lost_disks(txn)
        committed = self.index.get_meta("last_stamp", txn) or 0
        self.last_stamp = max(self.last_stamp, committed + 1)
        for file, change in self._changes.items():
            if change.made is not None and not self.durable:
                self.index.files.mark_unsynced(txn, file)
            info = self.index.files.get_file(txn, file) or change.made
            if info is not None:
                self._account(txn, file, info, change)
        self.index.put_meta(txn, "last_stamp", self.last_stamp)
        if self.documents_only:
            self.index.note_documents(txn, committed, self.last_stamp)
        else:
            self.index.log_changes(txn, committed, self.last_stamp)
        failpoints.hit("store.index.before_commit")

    def _reject_lost_disks(self, txn: Any) -> None:
        """Refuses data on a disk that was retired meanwhile: it would not be looked for again. Raises
        DiskFailedError."""
        lost = self.index.get_meta(LOST_DISKS_KEY, txn)
        if not lost:
            return
        made = [change.made for change in self._changes.values() if change.made is not None]
        if any(file.disk in lost for file in made):
            raise DiskFailedError("a disk was retired during this write; repeat the write")

    def _account(self, txn: Any, file: int, info: DataFile, change: _Change) -> None:
        stamps = [*change.stamps, *([info.first_stamp, info.last_stamp] if info.last_stamp else [])]
        info = msgspec.structs.replace(
            info,
            state="sealed" if change.sealed else info.state,
            end=max(info.end, change.end),
            live=info.live + change.live,
            dead=info.dead + change.dead,
            refs=info.refs + change.refs,
            tombs=info.tombs + change.tombs,
            buried=info.buried + change.buried,
            framing=info.framing + change.framing if info.framing >= 0 else info.framing,
            first_stamp=min(stamps, default=0),
            last_stamp=max(stamps, default=0),
        )
        if info.refs == 0 and info.state == "sealed" and info.tombs == 0 and not change.kept:
            if self.durable:
                self.index.files.delete_file(txn, file)
                self._unused_files.append(self.disks.path(info.disk, file))
            else:  # the last checkpoint may still need it: compaction unlinks it after the next one
                self.index.files.put_file(txn, file, msgspec.structs.replace(info, state="retired"))
        else:
            self.index.files.put_file(txn, file, info)

    # after the index has committed, or failed to ----------------------------------------------------------

    def finish_commit(self) -> None:
        """Marks segments as committed and removes files that nothing uses."""
        failpoints.hit("store.index.after_commit")
        written = sum(segment.tail - segment.end for segment in self._segments.values())
        for segment in self._segments.values():
            segment.mark_committed()
        for large_file in self._published:
            written += large_file.size
            large_file.close()
        metrics.store_written_bytes.inc(written)
        for path in self._unused_files:
            with suppress(OSError):  # startup recovery removes what cannot be removed now
                os.unlink(path)

    def roll_back(self) -> None:
        """Undoes the group: truncates segments and removes published files."""
        for segment in self._segments.values():
            with suppress(OSError):
                segment.truncate_uncommitted()
        for large_file in self._published:
            with suppress(OSError):
                large_file.discard()


class Payload(msgspec.Struct):
    """Bytes to be stored: either chunks in memory or a finished large object file."""

    size: int
    crc: int
    chunks: Sequence[Buffer] = ()
    large_file: LargeObjectFile | None = None

    def stage_member(self, batch: WriteBatch, member: Member, stamp: int) -> StagedMember:
        if self.large_file is not None:
            return batch.publish_file(self.large_file, member, stamp)
        return batch.append_member(member, stamp, self.chunks, self.size)
