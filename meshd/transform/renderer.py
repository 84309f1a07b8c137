"""Renderer: what a caller asks for, row by row, and the outcome of all rows."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from meshd.transform.decoded_cache.messages import REFUSED
from meshd.transform.decoded_cache.slice_order import NO_ROOM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.transform.decoded_cache.sample_set import SampleSet
    from meshd.transform.decoded_cache.slice_order import SliceOrder
    from meshd.transform.messages import Failure, RaggedColumn, RenderReply, RowBlock
    from meshd.transform.source_files import AssetPlace, Pieces

UNREADABLE_KINDS: Final = frozenset({"read", "damaged"})
"""Kinds of failure after which the location of the bytes is looked up once more."""


def program_digest(program_text: str) -> str:
    """Return the name of a program for transform processes."""
    return hashlib.sha256(program_text.encode()).hexdigest()[:32]


class RowWork(msgspec.Struct, frozen=True):
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


class RaggedPart(msgspec.Struct, frozen=True):
    """Ragged data of some rows: `columns` one after the other in `fd`, which the receiver closes."""

    rows: tuple[int, ...]
    columns: tuple[RaggedColumn, ...]
    fd: int


class RowChecksums(msgspec.Struct, frozen=True):
    """The crc32c of `rows` in the frame: `columns`, one per fixed field, ordered by name."""

    rows: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]


class KeptRow(NamedTuple):
    """What became of a row whose prefixes alone were made. `verdict`: one of the decoded cache's messages;
    `why`: why something was not stored, "" if it may be the next time.
    """

    verdict: int
    why: str = ""


class RenderResult(msgspec.Struct):
    """The outcome of all requested rows: those not in `failures` are in the frame, or in `parts` if ragged.

    `seconds`: time of the processes; `reading`: the part of it spent on reading source bytes; `cpu`: their
    processor time. If only prefixes were made: `kept`, by row, with their bytes and the processor time that
    they took.
    """

    failures: list[Failure] = msgspec.field(default_factory=list)
    parts: list[RaggedPart] = msgspec.field(default_factory=list)
    checksums: list[RowChecksums] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    reading: float = 0.0
    cpu: float = 0.0
    kept: dict[int, KeptRow] = msgspec.field(default_factory=dict)
    kept_seconds: float = 0.0
    kept_bytes: int = 0

    def add_kept(self, rows: Sequence[RowWork], prefixes: SliceOrder | None, reply: RenderReply) -> None:
        """Add what became of the rows of a slice whose prefixes alone were made, as `prefixes` says."""
        if not reply.verdicts:
            return
        samples = {work.row: work.sample for work in rows}
        for row, verdict in zip(reply.rendered, reply.verdicts, strict=True):
            why = ""
            if verdict == REFUSED:
                why = NO_ROOM if prefixes is None else prefixes.refused.get(samples[row], "")
            self.kept[row] = KeptRow(verdict, why)
        if reply.prefixes is not None:
            self.kept_bytes += sum(entry.length for entry in reply.prefixes.stored)
            self.kept_seconds += sum(use.made_seconds + use.store_seconds for use in reply.prefixes.uses)

    def merge(self, other: RenderResult) -> None:
        """Add the outcome of other rows of the same call, with their scratch files."""
        self.failures += other.failures
        self.parts += other.parts
        self.checksums += other.checksums
        self.seconds += other.seconds
        self.reading += other.reading
        self.cpu += other.cpu
        self.kept |= other.kept
        self.kept_seconds += other.kept_seconds
        self.kept_bytes += other.kept_bytes

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
        samples: SampleSet | None = None,
        early: bool = False,
    ) -> RenderResult:
        """Render the rows. `assets`: those that the program's ops are built with.

        `targets`: for each field, ordered by name, then for each column that mixing adds, (offset of its
        tensor, number of its rows), or None for a ragged field. `samples`: what the rows' sample numbers
        refer to; None: nothing of them is kept. `early`: nobody waits for the rows yet; those of earlier
        positions of the job are rendered first. The share of the current tenant is used.
        """
        ...
