"""Render calls: what callers ask a renderer for, and a call's slices and result while the pool works on it.

Law: the result of a call is set once, when all its rows are done. Replies after a cancellation are
dropped, and every descriptor is closed once.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from meshd.telemetry import tracing
from meshd.transform.decoded_cache.messages import REFUSED
from meshd.transform.decoded_cache.slice_order import NO_ROOM
from meshd.transform.messages import RenderRequest, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.transform.decoded_cache.messages import KeptPlace
    from meshd.transform.decoded_cache.sample_set import SampleSet
    from meshd.transform.decoded_cache.slice_order import SliceOrder
    from meshd.transform.messages import Failure, RaggedColumn, RenderReply, RowBlock
    from meshd.transform.scheduling import QueueTicket
    from meshd.transform.source_files import AssetPlace, Piece, Pieces

UNREADABLE_KINDS: Final = frozenset({"read", "damaged"})
"""Kinds of failure after which the location of the bytes is looked up once more."""
PlacedPieces = tuple[tuple[tuple[int, ...], ...], ...]


def program_digest(program_text: str) -> str:
    """Return the name of a program for transform processes."""
    return hashlib.sha256(program_text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class RowWork:
    """One row to render: its number in the frame, its epoch position, and the pieces of its bytes.

    `sources`: for each bytes field, ordered by name. `partner`: the same of the row at position ^ 1, if the
    plan mixes the two and that row exists. `sample`, `partner_sample`: their numbers in the snapshot, -1 if
    unknown. `block`: many rows, from `row` on, that are copied; `paths`: its files.
    """

    row: int
    position: int
    sources: tuple[Pieces, ...]
    partner: tuple[Pieces, ...] = ()
    sample: int = -1
    partner_sample: int = -1
    block: RowBlock | None = None
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RaggedPart:
    """Ragged data of some rows: `columns` one after the other in `fd`, which the receiver closes."""

    rows: tuple[int, ...]
    columns: tuple[RaggedColumn, ...]
    fd: int


@dataclass(frozen=True, slots=True)
class RowChecksums:
    """The crc32c of `rows` in the frame: `columns`, one per fixed field, ordered by name."""

    rows: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]


class KeptRow(NamedTuple):
    """What became of a row whose prefixes alone were made. `verdict`: one of the decoded cache's messages;
    `why`: why something was not stored, "" if it may be the next time.
    """

    verdict: int
    why: str = ""


@dataclass(slots=True)
class RenderResult:
    """The outcome of all requested rows: those not in `failures` are in the frame, or in `parts` if ragged.

    `seconds`: time of the processes; `reading`: the part of it spent on reading source bytes; `cpu`: their
    processor time. If only prefixes were made: `kept`, by row, with their bytes and the processor time that
    they took.
    """

    failures: list[Failure] = field(default_factory=list)
    parts: list[RaggedPart] = field(default_factory=list)
    checksums: list[RowChecksums] = field(default_factory=list)
    seconds: float = 0.0
    reading: float = 0.0
    cpu: float = 0.0
    kept: dict[int, KeptRow] = field(default_factory=dict)
    kept_seconds: float = 0.0
    kept_bytes: int = 0

    def add_kept(self, item: RowSlice, reply: RenderReply) -> None:
        """Add what became of the rows of a slice whose prefixes alone were made."""
        if not reply.verdicts:
            return
        samples = {work.row: work.sample for work in item.rows}
        for row, verdict in zip(reply.rendered, reply.verdicts, strict=True):
            why = ""
            if verdict == REFUSED:
                why = NO_ROOM if item.prefixes is None else item.prefixes.refused.get(samples[row], "")
            self.kept[row] = KeptRow(verdict, why)
        if reply.prefixes is not None:
            self.kept_bytes += sum(entry.length for entry in reply.prefixes.stored)
            self.kept_seconds += sum(use.made_seconds + use.store_seconds for use in reply.prefixes.uses)

    def close(self) -> None:
        """Close the scratch files. Idempotent."""
        while self.parts:
            os.close(self.parts.pop().fd)


class Renderer(Protocol):
    """Renders rows into a frame in shared memory: the transform pool, or a test."""

    async def render(
        self,
        job: str,
        program_text: str,
        epoch: int,
        rows: Sequence[RowWork],
        *,
        frame_fd: int,
        frame_bytes: int,
        targets: Sequence[tuple[int, int] | None],
        assets: Sequence[AssetPlace] = (),
        account: str = "",
        samples: SampleSet | None = None,
        early: bool = False,
    ) -> RenderResult:
        """Render the rows. `assets`: those that the program's ops are built with.

        `targets`: for each field, ordered by name, then for each column that mixing adds, (offset of its
        tensor, number of its rows), or None for a ragged field. `account`: the tenant whose share of the
        processes is used. `samples`: what the rows' sample numbers refer to; None: nothing of them is kept.
        `early`: nobody waits for the rows yet; those of earlier positions of the job are rendered first.
        """
        ...


@dataclass(frozen=True, slots=True)
class RenderSpec:
    """The parameters that all rows of a call share; `asked`: the call's time by the event loop's clock.

    `prefixes_only`: only the decoded cache's entries are made, in the background.
    """

    asked: float
    account: str
    job: str
    program_text: str
    program: str
    epoch: int
    frame_bytes: int
    targets: tuple[tuple[int, int] | None, ...]
    assets: tuple[AssetPlace, ...] = ()
    samples: SampleSet | None = None
    prefixes_only: bool = False


class RenderCall:
    """The state that all slices of one `render` share: the spec, and the outcome as it accumulates.

    The frame's descriptor stays open until the last slice is released.
    """

    def __init__(self, order: RenderSpec, frame_fd: int, rows: int) -> None:
        self.order = order
        self.frame_fd = os.dup(frame_fd)
        self.outcome: asyncio.Future[RenderResult] = asyncio.get_running_loop().create_future()
        self.span = tracing.current()
        self._rendered = RenderResult()
        self._left, self._slices = rows, 0

    @property
    def is_pending(self) -> bool:
        """Whether a caller still waits for the outcome."""
        return not self.outcome.done()

    def add_slice(self) -> None:
        self._slices += 1

    def release_slice(self) -> None:
        self._slices -= 1
        if not self._slices:
            os.close(self.frame_fd)

    def add_result(self, part: RenderResult, rows: int) -> None:
        """Add the outcome of `rows` more rows."""
        if not self.is_pending:
            part.close()
            return
        self._rendered.failures += part.failures
        self._rendered.parts += part.parts
        self._rendered.checksums += part.checksums
        self._rendered.seconds += part.seconds
        self._rendered.reading += part.reading
        self._rendered.cpu += part.cpu
        self._rendered.kept |= part.kept
        self._rendered.kept_seconds += part.kept_seconds
        self._rendered.kept_bytes += part.kept_bytes
        self._left -= rows
        if not self._left:
            self.outcome.set_result(self._rendered)

    def fail_call(self, error: Exception) -> None:
        if self.is_pending:
            self.discard()
            self.outcome.set_exception(error)

    def discard(self) -> None:
        """Close the scratch files of a call that failed or was cancelled."""
        self._rendered.close()


class RowSlice:
    """Rows that travel together. `suspect`: a single row, retried because a process died on it.

    `lost`: how often a process died that had received this slice but not begun it; `turn`: the ticket to
    return to the queue; `prefixes`: what its process does with the decoded cache; `queued`, `sent`: when it
    was, if its call is traced.
    """

    def __init__(self, call: RenderCall, rows: Sequence[RowWork], *, suspect: bool = False) -> None:
        self.call, self.rows, self.suspect = call, rows, suspect
        self.number, self.lost = 0, 0
        self.turn: QueueTicket[RowSlice] | None = None
        self.prefixes: SliceOrder | None = None
        self.queued, self.sent = tracing.now() if call.span is not None else 0.0, 0.0
        call.add_slice()

    def to_request(self, number: int, *, with_text: bool) -> RenderRequest:
        self.number, self.sent = number, tracing.now() if self.call.span is not None else 0.0
        paths: dict[str, int] = {}

        def placed(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], ...]:
            return tuple((paths.setdefault(piece[0], len(paths)), *piece[1:]) for piece in pieces)

        def path_index(path: str) -> int:
            return paths.setdefault(path, len(paths))

        def kept(sample: int) -> tuple[tuple[KeptPlace, ...], ...]:
            return () if prefixes is None or sample < 0 else prefixes.places(sample, path_index)

        def all_placed(sources: Sequence[Sequence[Piece]]) -> PlacedPieces:
            return tuple(map(placed, sources))

        def placed_block(work: RowWork) -> RowBlock | None:
            if work.block is None:
                return None
            return msgspec.structs.replace(work.block, files=tuple(map(path_index, work.paths)))

        prefixes = self.prefixes
        rows = tuple(
            Row(
                work.row,
                work.position,
                all_placed(work.sources),
                all_placed(work.partner),
                work.sample,
                work.partner_sample,
                kept(work.sample),
                kept(work.partner_sample),
                placed_block(work),
            )
            for work in self.rows
        )
        fields = () if prefixes is None else prefixes.fields(path_index)
        order = self.call.order
        assets = tuple((digest, placed(pieces)) for digest, pieces in order.assets)
        return RenderRequest(
            number,
            order.program,
            order.program_text if with_text else "",
            order.epoch,
            order.frame_bytes,
            order.targets,
            tuple(paths),
            rows,
            assets,
            self.suspect,
            fields,
            order.prefixes_only,
            self.call.span is not None,
        )

    def record_spans(self, reply: RenderReply) -> None:
        """Record how long the slice waited and what its process did, if its call is traced."""
        if self.call.span is None:
            return
        ended = tracing.now()
        tracing.record(self.call.span, "queue", self.queued, self.sent)
        span = tracing.Span("render", self.call.span, self.sent)
        span.attributes = {"shardmesh.rows": len(reply.rendered)}
        tracing.record_timed(span, reply.spans)
        span.end(ended)
