"""Peer handlers for copy sources and frames of this node.

Law: a copy source is answered only for names that this node reads; otherwise the response is 421 with this
node's map version. `PeerReadService` answers the other calls of this subject itself.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from meshd.core.peer_messages import READ_FRAME
from meshd.reads.copy_source import FIND_SOURCE, READ_SOURCE, SOURCE_EXISTS
from meshd.rpc.peer_client import StaleMapError
from meshd.rpc.peer_rpc import handler, stream_handler

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.frame_address import AnyFrameAddress, Frame, FrameSource
    from meshd.reads.copy_source import CopySourceRequest, LocalCopySources
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.records import Record


class CopySourceHandlers:
    """Handlers of calls for copy sources. One instance per process."""

    def __init__(self, local: LocalCopySources, mesh: ClusterView) -> None:
        self._local, self._mesh = local, mesh

    @handler(FIND_SOURCE)
    async def find_source(self, asked: CopySourceRequest, context: CallContext) -> Record:
        self._require_reader(asked)
        return await self._local.find_source(asked)

    @handler(SOURCE_EXISTS)
    async def source_exists(self, asked: CopySourceRequest, context: CallContext) -> bytes:
        self._require_reader(asked)
        return b"1" if self._local.has_versions(asked.bucket, asked.key) else b""

    @stream_handler(READ_SOURCE)
    async def read_source(
        self, asked: CopySourceRequest, context: CallContext
    ) -> AsyncGenerator[bytes, None]:
        self._require_reader(asked)
        async with aclosing(self._local.read_source(asked)) as pieces:
            async for piece in pieces:
                yield piece

    def _require_reader(self, asked: CopySourceRequest) -> None:
        """Raise StaleMapError unless this node is in the read set of the name."""
        if not self._mesh.is_reader(asked.bucket, asked.key):
            raise StaleMapError(self._mesh.current_map().version)


class FrameHandlers:
    """Handler of calls for frames, from wherever this node gets them."""

    def __init__(self, frames: FrameSource) -> None:
        self._frames = frames

    @stream_handler(READ_FRAME)
    async def read_frame(self, address: AnyFrameAddress, context: CallContext) -> Frame:
        return await self._frames.get_frame(address)
