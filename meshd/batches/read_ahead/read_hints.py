"""Hints about which frames of plans are read: what reads ahead, or keeps the bytes that are read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from meshd.batches.read_ahead.own_samples import OwnSamples
    from meshd.core.frame_address import FrameAddress
    from meshd.core.plan_record import Plan
    from meshd.transform.source_files import Piece
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.frame.columns import Integers
    from meshwire.plan.shuffle import SampleOrder


class PackedReads(Protocol):
    """What the rows of a packed plan read. They are its samples, of whose elements they have pieces."""

    @property
    def in_objects(self) -> bool:
        """Whether they read objects of the snapshot, of which other nodes read theirs; else what this node
        has stored."""
        ...

    @property
    def mean_bytes(self) -> float:
        """The bytes of a row, on average."""
        ...

    def order(self, epoch: int) -> SampleOrder:
        """Return the order of an epoch: its rows."""
        ...

    def bytes_of(self, rows: Integers, own: OwnSamples | None) -> Integers:
        """Return the bytes of each of these rows (int64[n]) that the node reads itself; `own`: which samples
        it reads, None for all (blocking)."""
        ...

    async def pieces_of(self, rows: Integers, *, gap: int = ...) -> list[Piece]:
        """Return the pieces of files of this node that hold the bytes of these rows (int64[n]), and of gaps
        of at most `gap` bytes between these; by default those that a disk reads through."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedFrame:
    """A frame of a plan that is requested. `kept_bytes`: see `FrameSource`; `in_parts`: other nodes build
    other rows of it. `packed`: if its rows are packed, what they read."""

    plan: Plan
    snapshot: Snapshot
    address: FrameAddress
    kept_bytes: int | None = None
    in_parts: bool = False
    packed: PackedReads | None = None

    @property
    def use_decoded(self) -> bool:
        """Whether decoded samples that the node keeps may be used for it."""
        return self.kept_bytes != 0


class ReadHints(Protocol):
    """Receives hints about which frames are read."""

    def frame_requested(self, frame: PlannedFrame) -> None:
        """Note that a frame is requested that has to be built, or was for this request. Returns at once."""
        ...
