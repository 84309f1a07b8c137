"""Finished frames of other nodes: which node makes a frame, and how it comes from there or the near cache.

A frame is a function of its address: it is the same whichever node builds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from meshd.core import peer_messages
from meshd.core.frame_address import BlockAddress, FrameAddress, consecutive_steps, leading_frames
from meshd.core.memory_frames import MemoryFrame
from meshd.errors import MeshdError
from meshd.peer_reads.peer_fetcher import append_bytes, receive_body
from meshwire.cluster.routes import batch_nodes, frame_address, rendezvous_order
from meshwire.http_values.mesh_headers import SERVER_TIMING_HEADER as TIMING
from meshwire.http_values.mesh_headers import parse_timing

if TYPE_CHECKING:
    from meshd.core.frame_address import AnyFrameAddress, Frame, FrameResult, FrameSource
    from meshd.core.memory_frames import MemoryAccount
    from meshd.peer_reads.peer_fetcher import NearCache
    from meshd.peer_reads.replica_selection import ReplicaSelector


class RendezvousFrameSource:
    """A FrameSource that has each frame made by the node to which rendezvous hashing assigns its address, so
    that no two nodes make the same frame at once."""

    def __init__(self, remote: PeerFrames, frames: FrameSource) -> None:
        self._remote, self._frames = remote, frames

    def __repr__(self) -> str:
        return f"<RendezvousFrameSource before {self._frames!r}>"

    async def get_frame(self, address: AnyFrameAddress, kept_bytes: int | None = None) -> Frame:
        """Return the frame; see `FrameSource`."""
        if isinstance(address, FrameAddress | BlockAddress):
            frame = await self._remote.assigned_peer_frame(address)
            if frame is not None:
                return frame
        return await self._frames.get_frame(address, kept_bytes)

    async def get_frames(self, first: FrameAddress, count: int, kept_bytes: int | None = None) -> list[Frame]:
        """Return the frames of consecutive steps; see `FrameSource`."""
        steps = consecutive_steps(first, count)
        return await leading_frames(self.get_frame(step, kept_bytes) for step in steps)


class NearCacheFrameSource(RendezvousFrameSource):
    """A RendezvousFrameSource that keeps the frames of steps in the near cache."""

    async def get_frame(self, address: AnyFrameAddress, kept_bytes: int | None = None) -> Frame:
        """Return the frame; see `FrameSource`."""
        if not isinstance(address, FrameAddress):
            return await super().get_frame(address, kept_bytes)
        frame = await self._remote.cached_frame(address)
        if frame is None:
            frame = await super().get_frame(address, kept_bytes)
            self._remote.cache_frame(address, frame)
        return frame


class PeerFrames:
    """Frames of other nodes, and frames in the near cache. One instance per process."""

    def __init__(
        self, selector: ReplicaSelector, near_cache: NearCache | None, memory: MemoryAccount
    ) -> None:
        self._selector, self._near_cache, self._memory = selector, near_cache, memory
        self._mesh = selector.mesh

    def __repr__(self) -> str:
        return f"<PeerFrames from {self._mesh.node_id}>"

    async def assigned_peer_frame(self, address: FrameAddress | BlockAddress) -> Frame | None:
        """Return the frame from the node that is assigned its address. None if that is this node or the node
        does not supply it: then this node makes the frame."""
        node = next(
            iter(rendezvous_order(batch_nodes(self._mesh.current_map()), _rendezvous_name(address))), None
        )
        if node is None or node.node_id == self._mesh.node_id:
            return None
        room = MemoryFrame(0, self._memory)
        try:
            async with self._selector.peers.open_typed(node, peer_messages.READ_FRAME, address) as answer:
                await receive_body(answer, room)
                room.rows = int(answer.headers["x-mesh-rows"])
                room.took = parse_timing(answer.headers.get(TIMING, "")).took
                return room.hand_out(cast("FrameResult", answer.headers["x-mesh-frame"]))
        except MeshdError as error:
            self._selector.report_unreachable(node, error)
            return None

    async def cached_frame(self, address: FrameAddress) -> Frame | None:
        """Return the frame if the near cache holds it."""
        found = None if self._near_cache is None else await self._near_cache.get_frame(address)
        if found is None:
            return None
        pieces, rows = found
        room = MemoryFrame(0, self._memory)
        for piece in pieces:
            append_bytes(room, piece)
        room.rows = rows
        return room.hand_out("hit")

    def cache_frame(self, address: FrameAddress, frame: Frame) -> None:
        """Put a copy into the near cache, if this node has one."""
        if self._near_cache is not None:
            self._near_cache.keep_frame(address, frame)


def _rendezvous_name(address: FrameAddress | BlockAddress) -> str:
    """Return the text that stands for the address in rendezvous hashing."""
    if isinstance(address, BlockAddress):
        return f"{address.digest}/{address.block}"
    place = address.rank, address.world, address.batch, address.origin
    return frame_address(address.plan, address.epoch, address.step, *place)
