"""FrameBuilder: resolves and renders the rows of one frame, applies the bad-sample policy and seals it.

Law: the result depends on the address alone. Substitutes come from a keyed sample sequence, so every
node and world size picks the same ones. Unreachable data is never substituted.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshd.batches.assembly.bad_sample_ledger import max_bad_rows
from meshd.batches.assembly.column_copies import (
    FEWEST_ROWS,
    SMALL_BYTES,
    ColumnCopies,
    RowPlaces,
    block_fields,
)
from meshd.batches.assembly.failed_row import FailedRow
from meshd.batches.assembly.frame_buffer import FrameBuffer
from meshd.batches.read_ahead.arrivals import Arrivals
from meshd.core.api_errors import busy, damaged
from meshd.core.document_store import asset_places
from meshd.core.memory_frames import MemoryAccount
from meshd.core.peer_source import SINGLE_NODE
from meshd.core.sample_locations import PinnedObjects, bytes_columns
from meshd.store.integrity.verification import report_damaged_object
from meshd.telemetry import tracing
from meshd.telemetry.training_metrics import record_rendering
from meshd.transform.decoded_cache.sample_set import SampleSet
from meshd.transform.renderer import UNREADABLE_KINDS, RowWork
from meshd.util.async_tasks import cancel_and_discard
from meshwire.frame.tensor_frame import Status
from meshwire.http_values.mesh_headers import FrameTiming
from meshwire.plan.epoch_order import mix_bounds
from meshwire.plan.keyed_random import KeyedRandom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.batches.assembly.bad_sample_ledger import BadSampleLedger
    from meshd.batches.assembly.frame_rows import Rows
    from meshd.core.api_errors import BatchError
    from meshd.core.memory_frames import MemoryFrame
    from meshd.core.peer_source import PeerSource
    from meshd.core.plan_record import Plan
    from meshd.core.sample_locations import DecompressedArchives
    from meshd.store.api import ObjectStore
    from meshd.transform.decoded_cache.sample_set import OwnRows
    from meshd.transform.messages import Failure
    from meshd.transform.renderer import Renderer
    from meshwire.dataset.build_snapshot import Snapshot

_AT_A_TIME = 1024
FETCHED_BYTES = 64 << 20  # bytes of samples that are fetched from other nodes before their rows are rendered
PROBES = 16
PROBE_STREAM = 1 << 32  # stream of the keyed randomness, beyond the index of any op
_EVERY_ROW = " (as are all rows of this batch)"


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The dependencies that all builders of a node share."""

    store: ObjectStore
    renderer: Renderer
    ledger: BadSampleLedger
    node: str
    archives: DecompressedArchives
    remote: PeerSource = SINGLE_NODE
    memory: MemoryAccount = field(default_factory=MemoryAccount)

    def pin(self, snapshot: Snapshot) -> PinnedObjects:
        """Return the objects of a snapshot, to be looked up for one frame or a part of it."""
        return PinnedObjects(self.store, snapshot, self.archives, self.remote, self.memory)


class _Located(NamedTuple):
    """Rows that can be rendered until `pinned` is closed."""

    rows: list[RowWork]
    pinned: PinnedObjects


class FrameBuilder:
    """Builds one frame, once. `whole`: the number of rows of its global batch, without padding.

    `kept_bytes`: bytes that the node may keep of the plan's decoded samples; None: the node decides.
    `arrivals`: the reads ahead of its bytes that have not ended. `own`: see `SampleSet`.
    """

    def __init__(
        self,
        context: BuildContext,
        plan: Plan,
        snapshot: Snapshot,
        epoch: int,
        rows: Rows,
        metadata: Mapping[str, str],
        *,
        whole: int | None = None,
        kept_bytes: int | None = None,
        arrivals: Arrivals | None = None,
        own: OwnRows | None = None,
    ) -> None:
        self._arrivals = arrivals or Arrivals()
        self._sample_set = SampleSet(snapshot.hash, snapshot.samples, kept_bytes, plan.bucket, own)
        self._context, self._plan, self._snapshot, self._epoch = context, plan, snapshot, epoch
        self._whole = len(rows) if whole is None else whole
        self._complaint: BatchError | None = None
        self._bad_rows = 0
        self._clock = asyncio.get_running_loop().time
        self._fetch = self._prepare = 0.0
        self._buffer = FrameBuffer(plan, snapshot, rows, metadata, context.memory)
        self._copied_fields = block_fields(plan.spec, plan.outputs, mixed=plan.pairs is not None)

    def __repr__(self) -> str:
        return f"<FrameBuilder {self._plan.hash[:12]} epoch {self._epoch}, {len(self._buffer.rows)} rows>"

    async def build(self) -> MemoryFrame:
        """Return the finished frame. Raises BatchError: SnapshotChanged, BadSample, OpFailed, Busy."""
        try:
            with tracing.stage("assemble"):
                rows = await self._copy_columns(len(self._buffer.rows))
                failures = await self._render(rows) if rows else []
                kept = await self._settle(failures) if failures else None
                with tracing.stage("seal"):
                    frame = self._buffer.seal(kept)
        except BaseException:
            self._buffer.frame.close()
            raise
        else:
            frame.bad, frame.complaint = self._bad_rows, self._complaint
            frame.took = FrameTiming(self._fetch, self._prepare)
            return frame
        finally:
            self._buffer.close()

    async def _copy_columns(self, count: int) -> Sequence[int]:
        """Copy the rows that need no rendering; return the others."""
        if self._copied_fields is None or count < FEWEST_ROWS:
            return range(count)
        rows = self._buffer.rows
        places = RowPlaces(self._snapshot, self._copied_fields)
        if places.whole_objects and places.row_bytes(rows.samples) > SMALL_BYTES:
            return range(count)
        pinned = self._context.pin(self._snapshot)
        await self._arrivals.until_read()
        began = self._clock()
        await pinned.look_up_rows(rows.samples)
        copies = ColumnCopies(places, pinned, rows.samples, rows.positions)
        self._fetch += self._clock() - began
        if not copies.work:
            return range(count)
        failures = await self._render_rows(copies.work)
        again = {failure.row for failure in failures}
        left = copies.rest
        for work in copies.work:
            if work.row in again and work.block is not None:
                left += range(work.row, work.row + work.block.count)
        return sorted(set(left))

    async def _render(self, rows: Sequence[int]) -> list[Failure]:
        """Render these rows of the frame; the failures returned are bad samples."""
        failures = await self._render_once(rows)
        unread = [failure.row for failure in failures if failure.kind in UNREADABLE_KINDS]
        if unread:  # compacted or replaced since the lookup: look the locations up again
            failures = [failure for failure in failures if failure.kind not in UNREADABLE_KINDS]
            failures += await self._render_once(unread)
        # Not even where its bytes are now: they may be damaged.
        for name in {self._failed_row(failure).object_name for failure in failures if failure.kind == "read"}:
            report_damaged_object(self._context.store.get(*name))
        for failure in failures:
            row = self._failed_row(failure)
            if failure.kind == "read":
                raise busy(f"{row.name} cannot be read now: {failure.message}")
            if failure.kind == "damaged" and self._has_peer_copy(row):
                raise busy(f"{row.name} is damaged on this node; retry to read another owner's copy")
            if failure.kind == "damaged":
                await self._record([failure])
                raise damaged(row.url, failure.message, row.detail())
            if failure.kind == "op":
                raise row.op_error()
        return failures

    async def _render_once(self, rows: Sequence[int]) -> list[Failure]:
        """Render one portion at a time, while the bytes of the next are fetched from other nodes."""
        failures: list[Failure] = []
        ahead: asyncio.Task[_Located] | None = None
        located: _Located | None = None
        try:
            for portion in [*self._portions(rows), ()]:
                ahead = asyncio.create_task(self._locate(portion)) if portion else None
                if located is not None:
                    async for group in self._arrivals.groups(located.rows):
                        failures += await self._render_rows(group)
                    located.pinned.close()
                began = self._clock()
                located = None if ahead is None else await ahead
                self._fetch += self._clock() - began
        finally:
            if located is not None:
                located.pinned.close()
            await cancel_and_discard(ahead, lambda unused: unused.pinned.close())
        return sorted(failures, key=lambda failure: failure.row)

    def _portions(self, rows: Sequence[int]) -> list[Sequence[int]]:
        """Split rows into portions of FETCHED_BYTES; a single node fetches nothing and has one portion."""
        if self._context.remote.single_node or not len(rows):
            return [rows]
        samples = self._buffer.rows.samples[list(rows)]
        lengths = [column.lengths_at(samples) for column in bytes_columns(self._snapshot).values()]
        shares = np.cumsum(np.sum(lengths, axis=0)) // FETCHED_BYTES
        cuts = np.flatnonzero(np.diff(shares, prepend=shares[0])).tolist()
        return [rows[start:end] for start, end in itertools.pairwise([0, *cuts, len(rows)]) if end > start]

    async def _locate(self, rows: Sequence[int]) -> _Located:
        """Look up the locations of the bytes of these rows. Raises BatchError SnapshotChanged, Busy."""
        pinned, work = self._context.pin(self._snapshot), list[RowWork]()
        samples, positions = self._buffer.rows.samples.tolist(), self._buffer.rows.positions.tolist()
        try:
            with tracing.stage("locate"):
                for start in range(0, len(rows), _AT_A_TIME):
                    some = rows[start : start + _AT_A_TIME]
                    wanted = [samples[row] for row in some]
                    paired = self._pair_samples(some)
                    await pinned.prepare([*wanted, *paired.values()])
                    sources = pinned.sample_sources(wanted)
                    others = dict(zip(paired, pinned.sample_sources(list(paired.values())), strict=True))
                    work += [
                        RowWork(
                            row,
                            positions[row],
                            pieces,
                            others.get(row, ()),
                            samples[row],
                            paired.get(row, -1),
                        )
                        for row, pieces in zip(some, sources, strict=True)
                    ]
                    await asyncio.sleep(0)  # give other frames a turn
        except BaseException:
            pinned.close()
            raise
        return _Located(work, pinned)

    async def _render_rows(self, work: Sequence[RowWork]) -> Sequence[Failure]:
        buffer, began = self._buffer, self._clock()
        copied = bool(work) and work[0].block is not None
        rendered = await self._context.renderer.render(
            self._plan.hash,
            self._plan.program_text,
            self._epoch,
            work,
            frame_fd=buffer.frame.fd,
            frame_bytes=buffer.frame.size,
            targets=buffer.targets,
            assets=asset_places(self._context.store, self._plan.assets),
            samples=None if copied else self._sample_set,
        )
        count = sum(1 if row.block is None else row.block.count for row in work)
        record_rendering(self._plan.hash, count, rendered.cpu, rendered.reading)
        took = self._clock() - began
        reading = took * rendered.reading / rendered.seconds if rendered.seconds else 0.0
        self._fetch += reading
        self._prepare += took - reading
        (buffer.add_copied if copied else buffer.add_rendered)(rendered)
        return rendered.failures

    def _pair_samples(self, rows: Sequence[int]) -> dict[int, int]:
        """Return the sample mixed into each of these rows, for the rows that have one."""
        partners = self._buffer.rows.partners
        if partners is None:
            return {}
        return {row: int(partners[row]) for row in rows if partners[row] >= 0}

    async def _settle(self, failures: list[Failure]) -> list[int] | None:
        """Apply the plan's policy to bad samples. Returns the rows to keep, None for all.

        In a part of a frame, a bad sample is an error, whatever the policy: a substitute may be on any node,
        and the bound on bad samples is known only for the whole frame.
        """
        if self._buffer.rows.places is not None:
            why = " (a partial frame has no substitutes: request the whole frame)"
            raise self._failed_row(failures[0]).bad_sample_error(why)
        await self._record(failures)
        self._check_bound(failures)
        bad = [failure.row for failure in failures]
        policy = self._plan.spec.on_bad
        if policy == "drop":
            return [row for row in range(len(self._buffer.rows)) if row not in set(bad)]
        if policy == "substitute":
            await self._substitute(failures)
            return None
        for row in bad:
            self._buffer.clear_row(row)
        self._mark(bad, Status.MASKED)
        return None

    async def _record(self, failures: Sequence[Failure]) -> None:
        found = [self._failed_row(failure).entry() for failure in failures]
        await self._context.ledger.record_bad_samples(self._plan.hash, found)

    def _check_bound(self, failures: list[Failure]) -> None:
        """Check the bound for this slice alone; the assembler adds the bad rows of the other slices."""
        spec, status = self._plan.spec, self._buffer.rows.status
        every = 1 < len(self._buffer.rows) == len(failures)
        if spec.on_bad == "raise":
            raise self._failed_row(failures[0]).bad_sample_error(_EVERY_ROW if every else "", every=every)
        counted = [failure for failure in failures if status[failure.row] != Status.PAD]
        if not counted:
            return
        bound = max_bad_rows(spec, self._whole)
        if len(counted) > bound:
            why = f" ({len(counted)} bad rows of {self._whole}, {bound} allowed)"
            raise self._failed_row(counted[0]).bad_sample_error(why, every=every)
        self._bad_rows = len(counted)
        why = f" (with other ranks' slices, more than {bound} bad rows of {self._whole}; {bound} allowed)"
        self._complaint = self._failed_row(counted[0]).bad_sample_error(why)

    async def _substitute(self, failures: list[Failure]) -> None:
        rows = self._buffer.rows
        left = {failure.row: failure for failure in failures}
        draws = {
            row: KeyedRandom(self._plan.spec.seed, self._epoch, int(rows.positions[row]), PROBE_STREAM)
            for row in left
        }
        whole = {row: self._substitutes_for(int(rows.samples[row])) for row in left}
        self._mark(list(left), Status.SUBSTITUTED)
        for _ in range(PROBES):
            for row in left:
                first, end = whole[row]
                rows.samples[row] = first + draws[row].integer(end - first)
            again = await self._render(sorted(left))
            left = {failure.row: failure for failure in again}
            if not left:
                return
            await self._record(again)
        failure = next(iter(left.values()))
        raise self._failed_row(failure).bad_sample_error(
            f" (and {PROBES} substitutes drawn for it are bad, too)", every=True
        )

    def _substitutes_for(self, sample: int) -> tuple[int, int]:
        """Return the range of samples that may substitute for a sample: all, or its part of a mix."""
        if self._plan.spec.mix is None:
            return 0, self._snapshot.samples
        bounds = mix_bounds(self._plan.spec.mix)
        part = int(np.searchsorted(bounds, sample, side="right"))
        return int(bounds[part - 1]), int(bounds[part])

    def _mark(self, rows: list[int], status: Status) -> None:
        """Set the status of rows; padding rows keep the status PAD."""
        found = self._buffer.rows.status
        found[rows] = np.where(found[rows] == Status.PAD, Status.PAD, status)

    def _failed_row(self, failure: Failure) -> FailedRow:
        """Return the row that failed, with the sample that it has now: substitution gives it another one."""
        rows = self._buffer.rows
        mixed = rows.partners if failure.partner else None
        sample = int((rows.samples if mixed is None else mixed)[failure.row])
        position, node = int(rows.positions[failure.row]), self._context.node
        return FailedRow(self._plan, self._snapshot, self._epoch, node, failure, position, sample)

    def _has_peer_copy(self, row: FailedRow) -> bool:
        """Return whether another node may have a good copy. This node's is reported as damaged."""
        record = self._context.store.get(*row.object_name)
        report_damaged_object(record)
        return record is not None and self._context.remote.has_peer_copies(*row.object_name)
