"""What a loader asks nodes for: the address of a step's frame, whole or in parts.

Law: an address is a function of plan, place and rank; what it holds does not depend on who asks, or when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshsdk.native import FrameAddress
from meshsdk.parts import Parts
from meshwire.slices import batch_rows, rank_rows

if TYPE_CHECKING:
    from meshsdk.native import PlanInfo
    from meshsdk.reporting import Reporter
    from meshsdk.transport import Request
    from meshwire.slices import Tail


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of one rank's frames. `parted`: nodes may be asked for their rows of one."""

    plan: PlanInfo
    batch: int
    rank: int
    world: int
    tail: Tail
    share: str | None
    parted: bool
    reporter: Reporter | None = None

    def plain(self, epoch: int, step: int, origin: int) -> Request:
        """For a frame that nothing is told along with."""
        share = self.share
        return FrameAddress(
            self.plan.hash, epoch, step, self.rank, self.world, self.batch, origin, share
        ).request()

    def request(self, epoch: int, step: int, origin: int) -> Request:
        """For a frame; with it goes what the job reports."""
        request = self.plain(epoch, step, origin)
        reported = self.reporter.headers() if self.reporter is not None else None
        return replace(request, headers={**request.headers, **reported}) if reported else request

    def parts(self, epoch: int, origin: int) -> Parts | None:
        """How an epoch's frames are asked for in parts; None where they may not be."""
        if not self.parted:
            return None

        def ask(step: int, version: int) -> Request:
            request = self.request(epoch, step, origin)
            return replace(request, query=f"{request.query}&part={version}")

        def rows(step: int) -> int:
            whole = batch_rows(self.plan.positions, self.batch, origin, step, self.tail)
            first, end = rank_rows(whole, self.rank, self.world)
            return end - first

        return Parts(ask, rows)
