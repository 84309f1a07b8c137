"""A plan as one rank reads it: what `mesh doctor` measures.

Law: it holds what a request for a batch needs, and no position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshsdk.client.native_api import FrameAddress

if TYPE_CHECKING:
    from meshsdk.client.arena import Arena
    from meshsdk.client.native_api import PlanInfo
    from meshsdk.client.request import Request
    from meshsdk.client.transport import Transport
    from meshsdk.loader.output_stage import OutputStage


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """`batch`: the global batch; `expected`: bytes of a frame, 0 if unknown; `deadline`: in seconds."""

    transport: Transport
    plan: PlanInfo
    batch: int
    rank: int
    world: int
    stage: OutputStage
    arena: Arena
    expected: int
    connections: int = 4
    verify: bool = True
    deadline: float = 600.0
    source: str = ""

    def frame_request(self, epoch: int, step: int, *, moved: bool = False) -> Request:
        """Returns the request for a step's rows. With `moved` it has another address, for the same node: a
        frame that the node has prepared under the first address does not answer it."""
        plain = FrameAddress(self.plan.hash, epoch, step, self.rank, self.world, self.batch).request()
        if not moved:
            return plain
        origin = step * self.batch
        other = FrameAddress(self.plan.hash, epoch, 0, self.rank, self.world, self.batch, origin).request()
        return replace(other, meets=plain.meets)
