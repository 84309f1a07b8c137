"""Hints about which frames of plans are read: what reads ahead, or keeps the bytes that are read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from meshd.core.frame_address import FrameAddress
    from meshd.core.plan_record import Plan
    from meshwire.dataset.build_snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class PlannedFrame:
    """A frame of a plan that is requested. `kept_bytes`: see `FrameSource`; `in_parts`: other nodes build
    other rows of it."""

    plan: Plan
    snapshot: Snapshot
    address: FrameAddress
    kept_bytes: int | None = None
    in_parts: bool = False

    @property
    def use_decoded(self) -> bool:
        """Whether decoded samples that the node keeps may be used for it."""
        return self.kept_bytes != 0


class ReadHints(Protocol):
    """Receives hints about which frames are read."""

    def frame_requested(self, frame: PlannedFrame) -> None:
        """Note that a frame is requested that has to be built, or was for this request. Returns at once."""
        ...
