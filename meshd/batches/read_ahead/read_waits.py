"""Read waits: reads for other nodes wait for windows that bring the same bytes.

Law: a wait is short, and changes no bytes. A node that builds a whole batch asks the others for the rows that
it lacks, whose windows may lag behind its own; read one by one, each would move the arm away and back, and
the window that is late would become later.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.api_errors import BatchError
from meshd.core.node_tasks import RPC_ERRORS
from meshd.rpc.process_client import ProcessClient
from meshd.rpc.process_rpc import Method

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from meshd.batches.read_ahead.scheduler import ReadScheduler
    from meshd.rpc.process_server import ProcessServer, ServerCall
    from meshd.transform.source_files import Piece

_log = logging.getLogger("meshd.read_ahead")


class WaitRequest(msgspec.Struct, frozen=True):
    """`pieces`: (path, offset, length) of each."""

    pieces: list[tuple[str, int, int]]


WAIT_READ: Final[Method[WaitRequest, None]] = Method("wait-read", WaitRequest, None)


class ReadWaits:
    """Lets other processes of the node wait for the reads of its scheduler."""

    def __init__(self, scheduler: ReadScheduler) -> None:
        self._scheduler = scheduler

    def register(self, server: ProcessServer) -> None:
        """Answer the calls of `ReadWaitClient`."""
        server.register(WAIT_READ, self._wait)

    async def _wait(self, request: WaitRequest, call: ServerCall) -> None:
        await self._scheduler.wait_for_pieces(tuple(request.pieces))


class ReadWaitClient:
    """Waits for reads ahead of the coordinator behind `socket`. One instance per process."""

    def __init__(self, socket: Path) -> None:
        self._client = ProcessClient(socket, RPC_ERRORS)

    async def wait_for_pieces(self, pieces: Sequence[Piece]) -> None:
        """Wait until windows that are being read have brought these pieces; at once for others."""
        try:
            await self._client.call(
                WAIT_READ, WaitRequest([(path, offset, length) for path, offset, length, *_ in pieces])
            )
        except BatchError as error:  # they are read without waiting
            _log.info("reads for another node do not wait for their window", extra={"why": str(error)})
