"""Group commit: one thread per process makes all pending mutations durable together.

Law: data before index; one fdatasync per dirty file and one index transaction per group. Conditions are
checked inside that transaction, which LMDB serializes across processes, so the checks are exact.
Invariant: a future resolves after the index commit, or fails with nothing of its write visible.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import queue
import sys
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from meshd.store.disks.disk_type import RotationalDisks
from meshd.store.disks.layout import index_free_space, is_on_disk, reserves_kept
from meshd.store.disks.reserve_files import release_reserves
from meshd.store.engine.data_files import Segment
from meshd.store.engine.packs import is_worth_packing
from meshd.store.engine.write_batch import WriteBatch
from meshd.store.errors import (
    DiskFailedError,
    DiskFullError,
    ExhaustedError,
    IndexFullError,
    IndexMapFullError,
    StaleEpochError,
    StoreClosedError,
    StoreError,
    is_exhausted,
)
from meshd.store.records import INTERNAL_WRITE, RESERVED_BUCKET
from meshd.telemetry import metrics, tracing
from meshd.util.shared_counters import last_checkpoint
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.config import StoreSettings
    from meshd.store.disks.layout import Disks
    from meshd.store.engine.mutations import Mutation
    from meshd.store.index.index import Index
    from meshd.store.records import WriteContext
    from meshd.util.clock import Clock

_GROUP_BYTES = 32 << 20  # bytes per group: bounds its memory and the latency of its last mutation
_GROUP_MUTATIONS = 2048
_IDS_LOW, _IDS_BLOCK = 64, 256
_AMPLE_BYTES: Final = 4 << 30
"""Free bytes above the reserve: more than is written between two measurements."""
_CHECKPOINT_TIMEOUT: Final = 60.0  # seconds that writers wait for slow disks
_CHECKPOINT_POLL: Final = 0.005


def store_error_from(error: OSError) -> StoreError:
    """Translates an operating system error into a StoreError."""
    if is_exhausted(error):
        why = open_files_message(error)
        return ExhaustedError(why or f"{error.strerror or error}; stop other programs, or add memory")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    metrics.store_disk_errors.labels("full" if full else "failed").inc()
    if full:
        return DiskFullError("the disk is full; delete objects, add a disk, or free space under --disk")
    return DiskFailedError(
        f"the disk reported an error: {error.strerror or error}; see the kernel log, then run meshd fsck"
    )


class _Ticket(msgspec.Struct, eq=False):
    """A mutation and the future that waits for it."""

    mutation: Mutation
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    result: Any = None
    error: BaseException | None = None

    def attempt(self, step: Callable[[], Any]) -> None:
        """Runs a step. A failure affects this mutation only."""
        if self.error is not None:
            return
        try:
            self.result = step()
        except OSError as error:
            self.error = store_error_from(error)
            self.error.__cause__ = error
        except Exception as error:
            self.error = error


def _only_documents(group: list[_Ticket]) -> bool:
    return all(ticket.mutation.bucket == RESERVED_BUCKET for ticket in group)


def _split_retries(group: list[_Ticket], error: Exception) -> tuple[list[_Ticket], list[_Ticket]]:
    """Divides a group that has failed into the mutations that fail with it and those that are attempted again
    in smaller groups: deletions for which the index had too few free pages together."""
    if not isinstance(error, IndexMapFullError) or len(group) == 1:
        return group, []
    again = [each for each in group if each.error is None and not each.mutation.needs_free_space]
    return [each for each in group if each.error is not None or each.mutation.needs_free_space], again


def _resolve(tickets: list[_Ticket]) -> None:
    for ticket in tickets:
        if ticket.future.done():
            continue
        if ticket.error is not None:
            ticket.future.set_exception(ticket.error)
        else:
            ticket.future.set_result(ticket.result)


class Committer:
    """Executes the mutations of one process in one thread, and owns its open segments and file numbers."""

    def __init__(
        self, index: Index, disks: Disks, clock: Clock, settings: StoreSettings, writer: str
    ) -> None:
        self._index, self._disks, self._clock, self._writer = index, disks, clock, writer
        self._durable = settings.durability == "commit"
        self._family, self._sync_seconds = settings.family, settings.sync_seconds
        self._bounds_unsynced = not self._durable and not settings.evictable
        self._segment_bytes = settings.segment_bytes
        self._rotational = RotationalDisks(settings.disk_type)
        self._keep_tombstones = settings.tombstone_seconds > 0
        self._queue: queue.SimpleQueue[_Ticket | None] = queue.SimpleQueue()
        self._ids: deque[int] = deque()
        self._segments: dict[int, Segment] = {}
        self._closed = False
        self._space_check_seconds = settings.space_check_seconds
        self._ample_until = 0.0  # monotonic: until then free space is not measured
        self._broken: list[int] = []  # segments whose device failed: never written again
        self._reopen_segments()
        try:
            self._refill_ids()
        except BaseException:
            self._close_segments()
            raise
        self._thread = threading.Thread(target=self._run, name="meshd-commit", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Committer {self._writer} {list(self._segments.values())} pending≈{self._queue.qsize()}>"

    # the event loop's side --------------------------------------------------------------------------------

    def submit(self, mutation: Mutation, context: WriteContext = INTERNAL_WRITE) -> asyncio.Future[Any]:
        """Queues a mutation under the fence of `context`. Its stamp is the time of this call, whenever it is
        committed.

        The future fails with StoreError. Cancelling it does not cancel the mutation.
        """
        if self._closed:
            raise StoreClosedError("the store is closing; send the request to another worker")
        mutation.epoch, mutation.submitted_stamp = context.epoch, self._clock.stamp()
        loop = asyncio.get_running_loop()
        ticket = _Ticket(mutation, loop.create_future(), loop)
        if (span := tracing.current()) is not None:
            ended = partial(tracing.record_until_done, span, "commit", tracing.now())
            ticket.future.add_done_callback(ended)
        # Checked here, too: the committer thread must not even stage a write whose lease has run out.
        if context.is_past_deadline(mutation.submitted_stamp):
            ticket.error = StaleEpochError(mutation.epoch)
            loop.call_soon(_resolve, [ticket])
        else:
            self._queue.put(ticket)
        return ticket.future

    def next_file_id(self) -> int | None:
        """Returns a file number reserved for this process; None if the committer must be asked for more."""
        try:
            return self._ids.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """Commits the queued mutations, stops the thread and closes the segments. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._close_segments()

    def _close_segments(self) -> None:
        for segment in self._segments.values():
            with suppress(OSError):
                segment.truncate_uncommitted()
            segment.close()

    # the thread's side ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            group, more = self._collect_group(first)
            self._commit(group)
            if not more:
                return

    def _collect_group(self, first: _Ticket) -> tuple[list[_Ticket], bool]:
        """Collects pending tickets up to the size limits. The flag is False once the queue was closed."""
        group, weight = [first], first.mutation.data_bytes
        while weight < _GROUP_BYTES and len(group) < _GROUP_MUTATIONS:
            try:
                ticket = self._queue.get_nowait()
            except queue.Empty:
                break
            if ticket is None:
                return group, False
            group.append(ticket)
            weight += ticket.mutation.data_bytes
        return group, True

    def _commit(self, group: list[_Ticket]) -> None:
        batch = WriteBatch(
            self._index,
            self._disks,
            self._clock,
            self._segment,
            writer=self._writer,
            durable=self._durable,
            keep_tombstones=self._keep_tombstones,
        )
        again: list[_Ticket] = []
        try:
            if self._bounds_unsynced:
                self._await_checkpoint()
            self._refill_ids()
            self._seal_full_segments(batch)
            self._refuse_when_full(batch, group)
            if any(ticket.mutation.exclusive for ticket in group):
                self._commit_exclusive(batch, group)
            else:
                self._commit_plain(batch, group)
        except Exception as error:
            batch.roll_back()
            group, again = _split_retries(group, error)
            self._fail_group(group, error)
        else:
            batch.finish_commit()
        metrics.store_commits.inc()
        metrics.store_writes.inc(len(group))
        if any(isinstance(each.error, DiskFullError) and each.error.__cause__ is not None for each in group):
            release_reserves(self._disks.with_index(self._index.path))  # met by a write: deletes must go on
        self._resolve_futures(group)
        for part in again[: len(again) // 2], again[len(again) // 2 :]:
            if part:
                self._commit(part)

    def _await_checkpoint(self) -> None:
        """Waits while disks are slower than writers, so that what is acknowledged but not synced is bounded;
        not where no process takes checkpoints. Raises DiskFailedError."""
        end = self._clock.monotonic() + _CHECKPOINT_TIMEOUT
        while synced := last_checkpoint(self._family):
            now = self._clock.monotonic()
            if now - synced <= self._sync_seconds:
                return
            if now > end:
                raise DiskFailedError(
                    f"nothing was synced for {now - synced:.0f} s; see the log of this node and the kernel's"
                )
            threading.Event().wait(_CHECKPOINT_POLL)

    def _commit_plain(self, batch: WriteBatch, group: list[_Ticket]) -> None:
        with self._index.read_transaction() as txn:
            batch.load_last_stamp(txn)
        for ticket in group:
            batch.submitted_stamp = ticket.mutation.submitted_stamp
            ticket.attempt(partial(ticket.mutation.write_data, batch, None))
        batch.flush_segments()
        with self._index.write_transaction() as txn:
            for ticket in group:
                self._apply(batch, txn, ticket)
            batch.documents_only = _only_documents(group)
            batch.write_accounts(txn)

    def _commit_exclusive(self, batch: WriteBatch, group: list[_Ticket]) -> None:
        with self._index.write_transaction() as txn:
            batch.load_last_stamp(txn)
            for ticket in group:
                batch.submitted_stamp = ticket.mutation.submitted_stamp
                if ticket.mutation.epoch:
                    ticket.attempt(partial(batch.check_epoch, txn, ticket.mutation.epoch))
                ticket.attempt(partial(ticket.mutation.check, batch, txn))
                ticket.attempt(partial(ticket.mutation.write_data, batch, txn))
                self._apply(batch, txn, ticket)
            batch.flush_segments()
            batch.documents_only = _only_documents(group)
            batch.write_accounts(txn)

    @staticmethod
    def _apply(batch: WriteBatch, txn: Any, ticket: _Ticket) -> None:
        """Updates the index. A StoreError affects this mutation only; any other error fails the group,
        because the index may be half changed."""
        if ticket.error is not None:
            return
        try:
            if ticket.mutation.epoch:
                batch.check_epoch(txn, ticket.mutation.epoch)
            ticket.result = ticket.mutation.update_index(batch, txn)
        except StaleEpochError as error:
            ticket.error = error
            ticket.mutation.withdraw(batch)
        except StoreError as error:
            ticket.error = error

    def _fail_group(self, group: list[_Ticket], error: Exception) -> None:
        if isinstance(error, OSError):
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._retire_segments()
            cause, error = error, store_error_from(error)
            error.__cause__ = cause
        for ticket in group:
            ticket.error = ticket.error or error

    def _resolve_futures(self, group: list[_Ticket]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Ticket]] = {}
        for ticket in group:
            by_loop.setdefault(ticket.loop, []).append(ticket)
        for loop, tickets in by_loop.items():
            with suppress(RuntimeError):  # the loop is closed: no caller waits any more
                loop.call_soon_threadsafe(_resolve, tickets)

    def _refuse_when_full(self, batch: WriteBatch, group: list[_Ticket]) -> None:
        """Refuses mutations that need space while enough remains for the tombstones and index pages of
        deletes. A write is accepted if the emptiest disk can take it, whichever disk its name prefers."""
        puts = [ticket for ticket in group if ticket.mutation.needs_free_space]
        now = self._clock.monotonic()
        if not puts or not self._disks.roots or now < self._ample_until:
            return
        appended, least, ample = 0, sys.maxsize, True
        for reserves, tickets in itertools.groupby(puts, lambda each: reserves_kept(each.mutation.bucket)):
            index_room = index_free_space(str(self._index.path), reserves)
            index_full = index_room <= 0
            index_apart = index_full and not is_on_disk(self._index.path, self._disks.roots.values())
            map_room = self._index.map_free_space(reserves)
            room = batch.free_space.largest_free(reserves)
            least = min(least, index_room, room)
            ample = ample and map_room > min(_AMPLE_BYTES, self._index.map_bytes // 2)
            for ticket in tickets:
                fits = appended + ticket.mutation.data_bytes < room
                if map_room <= 0:
                    ticket.error = IndexMapFullError()
                elif index_full and (index_apart or fits):
                    ticket.error = IndexFullError(
                        f"the file system of the index is nearly full; free space under {self._index.path}"
                    )
                elif not fits:
                    ticket.error = DiskFullError("the disks are nearly full; delete objects or add a disk")
                else:
                    appended += ticket.mutation.data_bytes
        if ample and least > _AMPLE_BYTES:
            self._ample_until = now + self._space_check_seconds

    # segments and numbers ---------------------------------------------------------------------------------

    def _reopen_segments(self) -> None:
        """Reopens the segments that this writer left open, and cuts off what a crash left behind their
        end."""
        with self._index.read_transaction() as txn:
            mine = list(self._index.files.open_files(txn, self._writer))
        for file, info in mine:
            usable = info.kind == "segment" and info.state == "open" and info.disk in self._disks.roots
            if usable and info.disk not in self._segments:
                self._segments[info.disk] = self._open_segment(info.disk, file, info.end, info.framing)

    def _segment(self, disk: int) -> Segment:
        segment = self._segments.get(disk)
        if segment is None:
            segment = self._segments[disk] = self._open_segment(disk, self._ids.popleft())
        return segment

    def _open_segment(self, disk: int, file: int, end: int | None = None, framing: int = 0) -> Segment:
        in_runs = self._rotational.any_of([self._disks.roots[disk]])
        return Segment(self._disks, disk, file, end, framing, in_runs=in_runs)

    def _seal_full_segments(self, batch: WriteBatch) -> None:
        """Seals segments that have reached their size, or hold so many small packs that compaction should
        join them."""
        for disk, segment in list(self._segments.items()):
            if segment.end >= self._segment_bytes or is_worth_packing(segment.framing, segment.end):
                segment.seal(self._durable)
                del self._segments[disk]
                batch.seal_segment(segment.file)
        for file in self._broken:
            batch.seal_segment(file)
        self._broken.clear()

    def _retire_segments(self) -> None:
        """Closes all segments and continues in new files: after a failed sync the kernel may have dropped
        dirty pages."""
        for segment in self._segments.values():
            with suppress(OSError):
                segment.close()
            if segment.end:
                self._broken.append(segment.file)
            else:
                with suppress(OSError):
                    os.unlink(segment.path)
        self._segments.clear()

    def _refill_ids(self) -> None:
        if len(self._ids) >= _IDS_LOW:
            return
        with self._index.write_transaction() as txn:
            first = self._index.get_meta("next_file", txn) or 1
            self._index.put_meta(txn, "next_file", first + _IDS_BLOCK)
        self._ids.extend(range(first, first + _IDS_BLOCK))
