"""Hints about which plans are read, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.frame_address import FrameAddress
    from meshd.core.plan_record import Plan
    from meshwire.dataset.build_snapshot import Snapshot


class ReadHints(Protocol):
    """Receives hints about which plans are read, and how far."""

    def frame_requested(
        self,
        plan: Plan,
        snapshot: Snapshot,
        address: FrameAddress,
        *,
        in_parts: bool = False,
        use_decoded: bool = True,
    ) -> None:
        """Note that a frame is requested that has to be built, or was for this request; `in_parts`: the
        node's rows of it; `use_decoded`: from decoded samples that the node keeps, where it has them. Returns
        at once."""
        ...


@dataclass(frozen=True, slots=True)
class FrameRequest:
    """A request for a frame. `kept_bytes`: that the node may keep of decoded samples; `in_parts`: for the
    node's rows alone."""

    plan: Plan
    snapshot: Snapshot
    address: FrameAddress
    kept_bytes: int | None
    in_parts: bool = False

    def note(self, receivers: Sequence[ReadHints]) -> None:
        """Pass it on as a hint."""
        for each in receivers:
            each.frame_requested(
                self.plan,
                self.snapshot,
                self.address,
                in_parts=self.in_parts,
                use_decoded=self.kept_bytes != 0,
            )
