"""Client and server of the assembler: HTTP workers request frames from the coordinator over a Unix socket.

Law: a frame is sent as a descriptor, and its memory counts until the worker has sent it. Where the
coordinator is not running, or ends, a call fails with Busy. A client may retry it because addresses are
idempotent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from meshd.core.api_errors import BatchError, busy
from meshd.core.frame_address import AnyFrameAddress, Frame, FrameResult  # noqa: TC001  msgspec reads the annotations
from meshd.rpc.process_client import ProcessClient
from meshd.rpc.process_rpc import ErrorTypes, Method
from meshd.rpc.process_server import ProcessServer
from meshd.util.admission import current_tenant, tenant_scope
from meshwire.http_values.mesh_headers import FrameTiming

if TYPE_CHECKING:
    import socket
    from pathlib import Path

    from meshd.core.frame_address import FrameSource
    from meshd.rpc.process_server import ServerCall


class FrameRequest(msgspec.Struct, frozen=True):
    """`account`: the account that the work is charged to."""

    address: AnyFrameAddress
    account: str = ""


class FrameReply(msgspec.Struct, frozen=True):
    """A frame, whose memfd is attached to the reply. `fetch`, `prepare`: seconds spent on building it."""

    size: int
    rows: int
    result: FrameResult
    fetch: float
    prepare: float


GET_FRAME: Method[FrameRequest, FrameReply] = Method("get-frame", FrameRequest, FrameReply)
ERRORS = ErrorTypes(
    [BatchError],
    unexpected=lambda: BatchError(
        "InternalError", "the frame could not be assembled; the node's log says why"
    ),
    lost=lambda _: busy("the node's assembler is restarting"),
)


class AssemblerClient:
    """Requests frames from the coordinator. Use on one event loop only; `aclose` at the end."""

    def __init__(self, path: Path) -> None:
        self._client = ProcessClient(path, ERRORS)

    def __repr__(self) -> str:
        return f"<AssemblerClient of {self._client!r}>"

    async def get_frame(self, address: AnyFrameAddress) -> Frame:
        """As `Assembler.get_frame`. Also raises Busy while the coordinator is not running."""
        answer = await self._client.open(GET_FRAME, FrameRequest(address, current_tenant()))
        made = answer.message
        took = FrameTiming(made.fetch, made.prepare)
        return Frame(answer.fds[0], made.size, made.rows, made.result, done=answer.release, took=took)

    async def aclose(self) -> None:
        """Close the connection; pending calls fail with Busy."""
        await self._client.aclose()


async def serve_assembler(assembler: FrameSource, listener: socket.socket) -> None:
    """Serve workers on `listener` until cancelled. When a worker ends, its requests are cancelled."""

    async def get_frame(request: FrameRequest, call: ServerCall) -> FrameReply:
        with tenant_scope(request.account):
            frame = await assembler.get_frame(request.address)
        call.attach(frame.fd, on_release=frame.close)
        return FrameReply(frame.size, frame.rows, frame.result, frame.took.fetch, frame.took.prepare)

    server = ProcessServer(ERRORS)
    server.register(GET_FRAME, get_frame)
    await server.serve_forever(listener)
