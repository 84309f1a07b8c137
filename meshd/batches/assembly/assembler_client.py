"""The call by which HTTP workers request frames from the assembler, which runs in the coordinator.

A frame is sent as a descriptor, and its memory counts until the worker has sent it. Where the coordinator is
not running, or ends, a call fails with Busy. A client may retry it because addresses are idempotent.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import msgspec

from meshd.core.api_errors import BatchError, busy
from meshd.core.frame_address import (
    AnyFrameAddress,  # noqa: TC001  msgspec reads the annotations
    Frame,
    FrameAddress,  # noqa: TC001
    FrameBlock,  # noqa: TC001
    FrameResult,  # noqa: TC001
    common_block,
)
from meshd.rpc.process_client import ProcessClient
from meshd.rpc.process_rpc import ErrorTypes, Method
from meshd.rpc.process_server import ProcessServer
from meshd.util.tenant_limits import current_tenant, tenant_scope
from meshwire.http_values.mesh_headers import FrameTiming

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from meshd.core.frame_address import FrameSource
    from meshd.rpc.process_client import Answer
    from meshd.rpc.process_server import ServerCall


class FrameRequest(msgspec.Struct, frozen=True):
    """`account`: the account that the work is charged to; `kept_bytes`: see `FrameSource`."""

    address: AnyFrameAddress
    account: str = ""
    kept_bytes: int | None = None


class FrameReply(msgspec.Struct, frozen=True):
    """A frame, whose memfd is attached to the reply. `fetch`, `prepare`: seconds spent on building it;
    `offset`, `block`: see `Frame`."""

    size: int
    rows: int
    result: FrameResult
    fetch: float
    prepare: float
    offset: int = 0
    block: FrameBlock | None = None


class SeriesRequest(msgspec.Struct, frozen=True):
    """As FrameRequest, for `count` consecutive steps."""

    first: FrameAddress
    count: int
    account: str = ""
    kept_bytes: int | None = None


class SeriesReply(msgspec.Struct, frozen=True):
    """The frames of consecutive steps, their memfds attached in this order; only one if all are in one
    block."""

    frames: list[FrameReply]


GET_FRAME: Method[FrameRequest, FrameReply] = Method("get-frame", FrameRequest, FrameReply)
GET_FRAMES: Method[SeriesRequest, SeriesReply] = Method("get-frames", SeriesRequest, SeriesReply)
_RPC_ERRORS = ErrorTypes(
    [BatchError],
    unexpected=lambda: BatchError(
        "InternalError", "the frame could not be assembled; the node's log says why"
    ),
    lost=lambda _: busy("the node's assembler is restarting"),
)


class AssemblerClient:
    """Requests frames from the coordinator. Use on one event loop only; `aclose` at the end."""

    def __init__(self, path: Path) -> None:
        self._client = ProcessClient(path, _RPC_ERRORS)

    def __repr__(self) -> str:
        return f"<AssemblerClient of {self._client!r}>"

    async def get_frame(self, address: AnyFrameAddress, kept_bytes: int | None = None) -> Frame:
        """As `Assembler.get_frame`. Also raises Busy while the coordinator is not running."""
        answer = await self._client.open(GET_FRAME, FrameRequest(address, current_tenant(), kept_bytes))
        return _frame(answer.message, answer.fds[0], answer.release)

    async def get_frames(self, first: FrameAddress, count: int, kept_bytes: int | None = None) -> list[Frame]:
        """As `Assembler.get_frames`, in one call. Also raises Busy while the coordinator is not running."""
        request = SeriesRequest(first, count, current_tenant(), kept_bytes)
        answer = await self._client.open(GET_FRAMES, request)
        made, fds = answer.message.frames, answer.fds
        done = _after(len(made), answer)
        if len(fds) == 1:
            try:
                for _ in made[1:]:
                    fds.append(os.dup(fds[0]))
            except OSError:
                answer.close()
                raise
        return [_frame(reply, fd, done) for reply, fd in zip(made, fds, strict=True)]

    async def aclose(self) -> None:
        """Close the connection; pending calls fail with Busy."""
        await self._client.aclose()


def _frame(made: FrameReply, fd: int, done: Callable[[], None]) -> Frame:
    took = FrameTiming(made.fetch, made.prepare)
    size, offset, block = made.size, made.offset, made.block
    return Frame(fd, size, made.rows, made.result, done=done, took=took, offset=offset, block=block)


def _after(count: int, answer: Answer[SeriesReply]) -> Callable[[], None]:
    """Return what releases the answer at its `count`-th call: when all its frames are closed."""
    calls = itertools.count(1)

    def done() -> None:
        if next(calls) == count:
            answer.release()

    return done


def _reply(frame: Frame) -> FrameReply:
    took = frame.took.fetch, frame.took.prepare
    return FrameReply(frame.size, frame.rows, frame.result, *took, frame.offset, frame.block)


async def serve_assembler(
    assembler: FrameSource, listener: socket.socket, others: Sequence[Callable[[ProcessServer], None]] = ()
) -> None:
    """Serve workers on `listener` until cancelled. When a worker ends, its requests are cancelled.

    `others`: register the methods of other services of this process.
    """

    async def get_frame(request: FrameRequest, call: ServerCall) -> FrameReply:
        with tenant_scope(request.account):
            frame = await assembler.get_frame(request.address, request.kept_bytes)
        call.attach(frame.fd, on_release=frame.close)
        return _reply(frame)

    async def get_frames(request: SeriesRequest, call: ServerCall) -> SeriesReply:
        with tenant_scope(request.account):
            frames = await assembler.get_frames(request.first, request.count, request.kept_bytes)

        def close() -> None:
            for frame in frames:
                frame.close()

        for frame in frames[:1] if common_block(frames) else frames:
            call.attach(frame.fd, on_release=close)
        return SeriesReply([_reply(frame) for frame in frames])

    server = ProcessServer(_RPC_ERRORS)
    server.register(GET_FRAME, get_frame)
    server.register(GET_FRAMES, get_frames)
    for register in others:
        register(server)
    await server.serve_forever(listener)
