"""Client of one transform worker: its connection and the slices assigned to it.

Law: when a worker dies, its slices return to the pool once: the current one as crashed, with the row,
the others as lost. No slice waits in line behind a long one.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Protocol

from meshd.rpc.process_client import ProcessClient, Reconnect
from meshd.rpc.process_rpc import ProcessLostError
from meshd.transform.messages import RENDER, read_progress
from meshd.transform.worker_main import MAX_PROGRAMS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshd.rpc.process_client import Answer
    from meshd.transform.messages import RenderReply
    from meshd.transform.render_calls import RowSlice

IN_FLIGHT = 2  # slices per process: one in progress, and one so that it never waits
QUICK_SLICE_SECONDS = 0.25  # a slice that is expected to take longer has its process for itself
_RECONNECT = Reconnect((0.02, 0.05, 0.1, 0.2, 0.5, 1.0), forever=True)


class SliceSource(Protocol):
    """Provides slices and receives their outcomes."""

    @property
    def closed(self) -> bool:
        """Whether the node is shutting down."""
        ...

    async def next_slice(self, *, brave: bool) -> RowSlice:
        """Return the next slice of a pending call; with `brave`, also of jobs that killed processes."""
        ...

    def on_reply(self, item: RowSlice, reply: RenderReply, fds: Sequence[int]) -> None:
        """Handle the result of all or a part of `item`."""
        ...

    def abandon_slice(self, item: RowSlice) -> None:
        """Fail `item`, because the node is shutting down."""
        ...

    def on_slice_lost(self, item: RowSlice) -> None:
        """Handle the death of a process that had not begun `item`."""
        ...

    def on_worker_crash(self, item: RowSlice, row: int, seconds: float) -> None:
        """Handle the death of a process on a row of `item`, `seconds` after it began the slice."""
        ...


class WorkerClient:
    """The client of one transform process. `brave`: the process takes slices of jobs that kill processes."""

    def __init__(self, path: Path, pool: SliceSource, *, brave: bool) -> None:
        self._path, self._pool, self._brave = path, pool, brave
        self._sent: deque[RowSlice] = deque()
        self._number = 0
        self._progress = os.memfd_create("mesh-progress", os.MFD_CLOEXEC)
        self._finalizer = weakref.finalize(self, os.close, self._progress)
        self._room = asyncio.Event()
        self._since = 0.0
        """When the process began the first of its slices, at the earliest."""

    async def run(self) -> None:
        client = ProcessClient(self._path, reconnect=_RECONNECT)
        try:
            while not self._pool.closed:
                await client.connect()
                await self._serve_connection(client)
        finally:
            await client.aclose()
            for item in self._sent:
                self._pool.abandon_slice(item)
            self._finalizer()

    async def _serve_connection(self, client: ProcessClient) -> None:
        """Send slices until the process dies; then blame the slice it was working on."""
        self._update_room()
        sending = asyncio.ensure_future(self._send_all(client))
        lost = asyncio.ensure_future(client.wait_until_lost())
        try:
            await asyncio.wait((sending, lost), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()  # raises if sending failed
            await lost
        finally:
            sending.cancel()
            lost.cancel()
            await asyncio.gather(sending, lost, return_exceptions=True)
        self._return_slices()

    def _return_slices(self) -> None:
        """Return the slices of the dead process; the row it was working on is the suspect."""
        number, row = read_progress(self._progress)
        left, self._sent = list(self._sent), deque()
        for item in reversed(left):
            if item.number == number:
                self._pool.on_worker_crash(item, row, self._now() - self._since)
            else:
                self._pool.on_slice_lost(item)

    async def _send_all(self, client: ProcessClient) -> None:
        texts: set[str] = set()
        while True:
            await self._room.wait()
            item = await self._pool.next_slice(brave=self._brave)
            program = item.call.order.program
            if len(texts) > MAX_PROGRAMS // 2:
                texts.clear()
            self._number += 1
            if not self._sent:
                self._since = self._now()
            self._sent.append(item)
            self._update_room()
            request = item.to_request(self._number, with_text=program not in texts)
            texts.add(program)
            try:
                fds = (item.call.frame_fd, self._progress)
                call = await client.start(RENDER, request, fds, connect=False)
            except ProcessLostError:
                return  # replies already received are handled before the loss is
            call.answer.add_done_callback(self._on_answer)

    def _on_answer(self, answer: asyncio.Future[Answer[RenderReply]]) -> None:
        """Handle a reply; they arrive in order. A slice without one is returned when the connection ends."""
        if answer.cancelled() or answer.exception() is not None:
            return
        item = self._sent.popleft()
        self._since = self._now()
        self._update_room()
        reply = answer.result()
        self._pool.on_reply(item, reply.message, reply.fds)

    def _update_room(self) -> None:
        """Set whether the process gets another slice. No slice waits behind one expected to take long."""
        quick = all(item.turn is None or item.turn.expected < QUICK_SLICE_SECONDS for item in self._sent)
        if not self._sent or (quick and len(self._sent) < IN_FLIGHT):
            self._room.set()
        else:
            self._room.clear()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
