"""A request as our connections make it: aiohttp's, plus what happened to its body on the way in.

Law: data about one request; no behaviour of S3.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.http import RawRequestMessage
    from aiohttp.streams import StreamReader
    from aiohttp.web_protocol import RequestHandler

    from meshd.service.authorization.access import RequestContext
    from meshd.web.authentication import Authenticated
    from meshd.web.hops import Hop
    from meshd.web.peers import PeerGate
    from meshd.web.settling import Trace


class MeshRequest(web.BaseRequest):
    """`truncated`: the client ended its side before the body was whole. `continued`: it was told `100
    Continue`.

    `pressed`: answers should not be kept in memory for slow clients just now.

    `verified_body`: a small body that was read and compared with its signed digest before the handler was
    called. `held_body`: the whole body, not verified, read to be passed on. `hop`: the node that passed this
    request on, and what it says of the client. `gate` verifies other nodes' calls. `trace`, `signer`
    (who signed) and `context` (what policies may ask) are there for native requests.
    """

    ATTRS = web.BaseRequest.ATTRS | frozenset(
        {"context", "continued", "gate", "held_body", "hop", "signer", "trace", "verified_body"}
    )

    continued: bool = False
    verified_body: bytes | None = None
    signer: Authenticated | None = None
    context: RequestContext | None = None
    gate: PeerGate | None = None
    held_body: bytes | None = None
    hop: Hop | None = None
    trace: Trace

    @property
    def truncated(self) -> bool:
        return getattr(self.protocol, "truncated_body", None) is self.content

    @property
    def is_last(self) -> bool:
        return getattr(self.protocol, "at_its_last", False)

    @property
    def pressed(self) -> bool:
        return getattr(self.protocol, "pressed", False)

    async def read(self) -> bytes:
        """The whole body, the verified one where there is one."""
        return await super().read() if self.verified_body is None else self.verified_body


def request_factory() -> Callable[..., MeshRequest]:
    """What the server calls for every request head. Must be made in the running loop."""
    loop = asyncio.get_running_loop()

    def make(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> MeshRequest:
        return MeshRequest(message, payload, protocol, writer, task, loop)

    return make
