"""Frames that other nodes make, or that this node has copies of.

Law: a frame is a function of its address: whoever made it, it is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from meshd.assembly.addressing import BlockAddress, FrameAddress
from meshd.assembly.memory import MemoryFrame
from meshd.errors import MeshdError
from meshd.service.remote import wire
from meshd.service.remote.fetching import placed, receive
from meshwire.cluster.meeting import assemblers, frame_name, meeting
from meshwire.servertimings import HEADER as TIMING
from meshwire.servertimings import parse_timing

if TYPE_CHECKING:
    from meshd.assembly.addressing import Asked, Frame, FrameResult, FrameSource
    from meshd.assembly.memory import Memory
    from meshd.service.remote.asking import Asking
    from meshd.service.remote.fetching import Fetching


class MeetingFrames:
    """A FrameSource: each frame is made where its address meets, so that no two nodes make one at once."""

    def __init__(self, remote: RemoteFrames, frames: FrameSource) -> None:
        self._remote, self._frames = remote, frames

    def __repr__(self) -> str:
        return f"<MeetingFrames before {self._frames!r}>"

    async def frame(self, address: Asked) -> Frame:
        """See FrameSource."""
        if isinstance(address, FrameAddress | BlockAddress):
            met = await self._remote.met(address)
            if met is not None:
                return met
        return await self._frames.frame(address)


class RemoteFrames:
    """One a process."""

    def __init__(self, asking: Asking, fetching: Fetching, memory: Memory) -> None:
        self._asking, self._fetching, self._memory = asking, fetching, memory
        self._mesh = asking.mesh

    def __repr__(self) -> str:
        return f"<RemoteFrames from {self._mesh.node_id}>"

    async def met(self, address: FrameAddress | BlockAddress) -> Frame | None:
        """The frame as the node has it at which its address meets; None where that is this node, or it does
        not give it: then it is made here."""
        node = next(iter(meeting(assemblers(self._mesh.map()), _name(address))), None)
        if node is None or node.node_id == self._mesh.node_id:
            return None
        room = MemoryFrame(0, self._memory)
        try:
            async with self._asking.peers.call(
                node, "POST", wire.FRAMES, body=wire.encode(address)
            ) as answer:
                await receive(answer, room)
                room.rows = int(answer.headers["x-mesh-rows"])
                room.took = parse_timing(answer.headers.get(TIMING, "")).took
                return room.hand_out(cast("FrameResult", answer.headers["x-mesh-frame"]))
        except MeshdError as error:
            self._asking.note(node, error)
            return None

    async def kept_frame(self, address: FrameAddress) -> Frame | None:
        """A batch of which this node has a copy."""
        found = None if self._fetching.near is None else await self._fetching.near.frame(address)
        if found is None:
            return None
        pieces, rows = found
        room = MemoryFrame(0, self._memory)
        for piece in pieces:
            placed(room, piece)
        room.rows = rows
        return room.hand_out("hit")

    def keep_frame(self, address: FrameAddress, frame: Frame) -> None:
        """Have this node keep a copy, if it keeps any."""
        if self._fetching.near is not None:
            self._fetching.near.keep_frame(address, frame.fd, frame.size, frame.rows)


def _name(address: FrameAddress | BlockAddress) -> str:
    """A text to meet at."""
    if isinstance(address, BlockAddress):
        return f"{address.digest}/{address.block}"
    place = address.rank, address.world, address.batch, address.origin
    return frame_name(address.plan, address.epoch, address.step, *place)
