"""Replica streams: the bytes of a large body, sent to a replica while they arrive."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.cluster.replication.full_nodes import is_full, nothing_changed
from meshd.errors import MeshdError
from meshd.rpc.peer_rpc import encode_message

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshd.cluster.replication.replicator import ReplicaData, Replicator
    from meshd.store.replica.changes import ReplicaAck, ReplicaFacts
    from meshwire.cluster import Node

_QUEUE_LENGTH: Final = 4  # chunks queued per node
_STALL_TIMEOUT: Final = 5.0  # seconds that a slow node may delay a writer


class ReplicaStream:
    """Streams bytes to one node, followed by their metadata."""

    def __init__(self, replicator: Replicator, node: Node, data: ReplicaData) -> None:
        self.node = node
        self._replicator, self._size = replicator, data.size
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_LENGTH)
        self._facts: asyncio.Future[ReplicaFacts] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(replicator.send_stream(node, data, self._body()))
        self._task.add_done_callback(_retrieve_exception)

    def __repr__(self) -> str:
        return f"<ReplicaStream to {self.node.node_id}, {'over' if self._task.done() else 'open'}>"

    async def _body(self) -> AsyncGenerator[bytes, None]:
        while (piece := await self._queue.get()) is not None:
            yield piece
        yield encode_message(await self._facts)

    async def put_chunk(self, piece: bytes | None) -> None:
        """Queues more bytes; None ends them. Raises NodeFullError if the node has no room for them."""
        if self._task.done():
            if not self._task.cancelled() and is_full(error := self._task.exception()):
                self._replicator.full.record(self.node.node_id, self._size, error)
                raise nothing_changed(self.node.node_id, error)
            return
        try:
            self._queue.put_nowait(piece)
        except asyncio.QueueFull:
            await self._wait_for_room(piece)

    async def _wait_for_room(self, piece: bytes | None) -> None:
        room = asyncio.ensure_future(self._queue.put(piece))
        await asyncio.wait((room, self._task), timeout=_STALL_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if not room.done():
            room.cancel()
            self._task.cancel()

    async def send_metadata(self, facts: ReplicaFacts) -> ReplicaAck | None:
        """Sends the metadata; returns the node's reply, or None if it did not accept the data."""
        if not self._facts.done():
            self._facts.set_result(facts)
        try:
            return await self._task
        except (MeshdError, asyncio.CancelledError):
            if not self._task.done():
                raise
            return None

    async def abort(self) -> None:
        """Cancels the stream; the node discards what it received."""
        self._task.cancel()
        with suppress(asyncio.CancelledError, MeshdError):
            await self._task


def _retrieve_exception(task: asyncio.Task[ReplicaAck]) -> None:
    if not task.cancelled():
        task.exception()
