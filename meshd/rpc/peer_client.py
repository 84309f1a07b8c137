"""Signed HTTP calls to other nodes over pooled connections.

A call is signed with SigV4 as `mesh-peer:NODE`, under a key that all nodes derive from the cluster's secret.
A failed call raises one of three errors. Nothing is retried implicitly: only the caller knows whether a
request is idempotent. Use `call_typed` for calls between nodes, `acquire_connection` to relay bytes directly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from meshd.errors import MeshdError
from meshd.rpc.http_connection import PeerUnreachableError
from meshd.rpc.peer_clock import CLOCKS_CODE, REFUSED_CODE, describe_skew
from meshd.rpc.peer_connector import CONNECT_TIMEOUT, PeerConnector
from meshd.rpc.peer_rpc import (
    END_MARKER,
    MAX_PIECE_BYTES,
    PREFIX,
    SILENCE_TIMEOUT,
    FrameDecoder,
    frame_body,
    piece_header,
)
from meshd.telemetry import tracing
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import UNSIGNED_PAYLOAD, Credential, sign

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
    from pathlib import Path

    from meshd.rpc.http_connection import HttpConnection, ResponseHead
    from meshd.rpc.peer_rpc import PeerCall
    from meshd.util.clock import Clock
    from meshwire.cluster import Node

Request = TypeVar("Request")
Response = TypeVar("Response")
PEER_KEY: Final = "mesh-peer:"
PURPOSE: Final = "peer calls"
"""Purpose under which the key of peer calls is derived from the cluster's secret."""
MAP_HEADER: Final = "x-mesh-map"
FRAMED_HEADER: Final = "x-mesh-framed"
POOL_HEADER: Final = "x-mesh-lane"
"""Says that all calls on this connection belong to one pool, so that the connection may be handed to the
process that answers them."""
REGION: Final = "mesh"
_MAX_IDLE = 128  # idle connections per node
_IDLE_SECONDS = 20.0  # seconds for which an idle connection is reused; servers close theirs later
_BACKLOG = 1 << 20  # bytes of a response that may wait for their reader

__all__ = [
    "PeerClient",
    "PeerClockError",
    "PeerRefusedError",
    "PeerResponse",
    "PeerUnreachableError",
    "StaleMapError",
]


class PeerRefusedError(MeshdError):
    """A node answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message or code)
        self.status, self.code, self.message = status, code, message


class PeerClockError(PeerRefusedError):
    """A node refused a call because its clock differs from the local one, or could not do as it was asked
    because a third node refuses its calls (CLOCKS_CODE). The message names both nodes."""


class StaleMapError(MeshdError):
    """The two sides use different cluster maps; `version` is that of the side that raised this. The side with
    the older map waits for the newer one (`ClusterView.wait_for_newer_map`) and routes the call again."""

    def __init__(self, version: int) -> None:
        super().__init__(f"the other side uses version {version} of the cluster map")
        self.version = version


def peer_secret(derived: bytes) -> str:
    """Return the secret key that nodes sign with, from the key derived from the cluster's secret for
    PURPOSE."""
    return derived.hex()


class PeerResponse:
    """One response; its body is read once, by `read_body` or `iter_body`. A framed body is verified."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._head: asyncio.Future[ResponseHead] = self._loop.create_future()
        self._go: asyncio.Future[bool] = self._loop.create_future()
        self._queue: deque[bytes] = deque()
        self._waiting = 0
        self._news: asyncio.Future[None] | None = None
        self._whole = False
        self._error: PeerUnreachableError | None = None
        self.wire: HttpConnection | None = None

    def __repr__(self) -> str:
        return f"<PeerResponse {self.status}{', whole' if self._whole else ''}>"

    async def read_body(self) -> bytes:
        """Return the whole body. Raises PeerUnreachableError, BodyFramingError."""
        return b"".join([piece async for piece in self.iter_body()])

    async def iter_body(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. Raises PeerUnreachableError, BodyFramingError."""
        if FRAMED_HEADER not in self.headers:
            async for data in self._arriving():
                yield data
            return
        frames = FrameDecoder()
        async for data in self._arriving():
            for piece in frames.feed(data):
                yield piece
        frames.finish()

    def close(self) -> None:
        """Release the connection; one with an unread response is closed."""
        if not self._whole and self.wire is not None:
            self.wire.abort()
        self.wire = None

    async def _arriving(self) -> AsyncIterator[bytes]:
        while True:
            while self._queue:
                data = self._queue.popleft()
                self._waiting -= len(data)
                if self._waiting <= _BACKLOG and self.wire is not None:
                    self.wire.resume()
                yield data
            if self._error is not None:
                raise self._error
            if self._whole:
                return
            self._news = self._loop.create_future()
            await self._news

    # called by the connection

    def on_continue(self) -> None:
        if not self._go.done():
            self._go.set_result(True)

    def on_head(self, head: ResponseHead) -> None:
        self.status, self.headers = head.status, head.headers
        if not self._go.done():
            self._go.set_result(False)
        if not self._head.done():
            self._head.set_result(head)

    def on_body(self, data: bytes) -> None:
        self._queue.append(data)
        self._waiting += len(data)
        if self._waiting > _BACKLOG and self.wire is not None and self.wire.body_left != 0:
            self.wire.pause()
        self._tell()

    def on_end(self) -> None:
        self._whole = True
        self._tell()

    def on_error(self, error: PeerUnreachableError) -> None:
        self._error = error
        if not self._go.done():
            self._go.set_result(False)
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # marks it as retrieved, since there may be no waiter
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # called by PeerClient.call

    async def wait_head(self) -> ResponseHead:
        return await self._head

    async def wait_body_requested(self) -> bool:
        """Wait and return whether to send the body; False: a response, or the connection's end, came
        first."""
        return await self._go

    @property
    def head_future(self) -> asyncio.Future[ResponseHead]:
        """Done when the response has begun, or has failed."""
        return self._head


class PeerClient:
    """Calls other nodes; one per process. `derive` derives keys from the cluster's secret
    (`ClusterSecret.derive_key`); `map_version` returns the version of the cluster map that this process uses.
    `ca`: see `PeerConnector`."""

    def __init__(
        self,
        node_id: str,
        derive: Callable[[str], bytes],
        clock: Clock,
        map_version: Callable[[], int] = lambda: 0,
        *,
        ca: Path | None = None,
    ) -> None:
        self.node_id, self._derive, self._clock = node_id, derive, clock
        self._map_version = map_version
        self.connector = PeerConnector(clock, ca)
        self._idle: dict[tuple[str, str], deque[HttpConnection]] = {}
        self._open: set[HttpConnection] = set()
        self._credential: Credential | None = None

    def __repr__(self) -> str:
        return f"<PeerClient of {self.node_id}, {len(self._open)} connections>"

    async def aclose(self) -> None:
        """Close all connections."""
        for wire in list(self._open):
            wire.abort()
        self._open.clear()
        self._idle.clear()

    @asynccontextmanager
    async def call(
        self,
        node: Node,
        method: str,
        target: str,
        *,
        body: bytes | AsyncIterable[bytes] = b"",
        timeout: float = SILENCE_TIMEOUT,  # noqa: ASYNC109  of silence, not of the call
        pool: str = "",
    ) -> AsyncGenerator[PeerResponse, None]:
        """Call a node: `async with peers.call(node, "POST", "/-/peer/…", body=…) as response`. The response's
        head has arrived; its body is still to be read. `target` is path and query, encoded. `timeout` is in
        seconds of silence. Calls of a `pool` share their connections only with each other.

        A body that is an iterable is sent when the peer asks for it, so a refusal costs no bytes. A response
        may begin before the body's end; the rest of the body is then sent while the response is read. Raises
        PeerUnreachableError, PeerRefusedError (any status from 400 on), StaleMapError (421), and what the
        iteration of the body raises.
        """
        answer = PeerResponse()
        sending: asyncio.Future[None] | None = None
        try:
            whole = frame_body(body) if isinstance(body, bytes) else None
            wire = await self._ask(answer, node, method, target, whole, timeout, pool)
            if not isinstance(body, bytes) and await answer.wait_body_requested():
                sending = asyncio.ensure_future(_send(answer, wire, body))
                await _either(sending, answer)
            await answer.wait_head()
            if answer.status >= 400:
                raise await self._refusal(node, answer)
            yield answer
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            answer.close()

    @asynccontextmanager
    async def open_typed(
        self,
        node: Node,
        call: PeerCall[Request, Any],
        request: Request,
        *,
        body: bytes | AsyncIterable[bytes] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  of silence, not of the call
    ) -> AsyncGenerator[PeerResponse, None]:
        """Send a typed call: `async with peers.open_typed(node, CALL, request) as response`. The response's
        head has arrived; its body is still to be read. `body` is the data of a call whose request is in its
        target. Raises as `call` does."""
        target, message = call.encode_request(request)
        options: dict[str, str] = {"pool": call.pool} if call.pool else {}
        name = f"peer {call.path.removeprefix(PREFIX)}"
        with tracing.stage(name, "client", {"server.address": node.node_id}):
            async with self.call(
                node,
                call.method,
                target,
                body=message if body is None else body,
                timeout=call.timeout if timeout is None else timeout,
                **options,
            ) as response:
                yield response

    async def call_typed(
        self,
        node: Node,
        call: PeerCall[Request, Response],
        request: Request,
        *,
        body: bytes | AsyncIterable[bytes] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109  of silence, not of the call
    ) -> Response:
        """Send a typed call and return its response. Raises as `call` does, BodyFramingError and
        MalformedResponseError."""
        async with self.open_typed(node, call, request, body=body, timeout=timeout) as response:
            return call.decode_response(await response.read_body())

    async def acquire_connection(
        self, node: Node, patience: float = CONNECT_TIMEOUT, pool: str = ""
    ) -> HttpConnection:
        """Return an idle or a new connection to a node. Raises PeerUnreachableError."""
        wire = self.idle_connection(node, pool)
        if wire is not None:
            return wire
        place = (node.endpoint, pool)
        wire = await self.connector.open_connection(node, lambda free: self._keep(place, free), patience)
        if len(self._open) > 4 * _MAX_IDLE:
            self._open = {wire for wire in self._open if not wire.closed}
        self._open.add(wire)
        return wire

    def idle_connection(self, node: Node, pool: str = "") -> HttpConnection | None:
        """Return an idle connection to a node, or None."""
        kept = self._idle.get((node.endpoint, pool))
        if not kept:
            return None
        now = asyncio.get_running_loop().time()
        while kept:
            wire = kept.pop()
            if not wire.closed and now - wire.last_activity < _IDLE_SECONDS:
                return wire
            self._open.discard(wire)
            wire.abort()
        return None

    def _keep(self, where: tuple[str, str], wire: HttpConnection) -> None:
        kept = self._idle.setdefault(where, deque())
        kept.append(wire)
        if len(kept) > _MAX_IDLE:
            oldest = kept.popleft()
            self._open.discard(oldest)
            oldest.abort()

    async def _ask(
        self,
        answer: PeerResponse,
        node: Node,
        method: str,
        target: str,
        whole: bytes | None,
        patience: float,
        pool: str,
    ) -> HttpConnection:
        """Send the request, except a body that is an iterable."""
        head = self._head(node, method, target, None if whole is None else len(whole), pool)
        wire = answer.wire = await self.acquire_connection(node, min(patience, CONNECT_TIMEOUT), pool)
        if whole is not None and method not in ("GET", "HEAD"):
            head += whole
        wire.send_request(answer, head, patience=patience, head_only=method == "HEAD", more=whole is None)
        return wire

    async def _refusal(self, node: Node, answer: PeerResponse) -> MeshdError:
        if answer.status == 421:
            version = answer.headers.get(MAP_HEADER, "")
            return StaleMapError(int(version) if version.isdigit() else 0)
        body = await answer.read_body()
        try:
            error = msgspec.json.decode(body)["error"]
            code, message = str(error["code"]), str(error["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return PeerRefusedError(answer.status, "", f"the node answered {answer.status}")
        if code == REFUSED_CODE:
            skew = describe_skew(node.node_id, self.node_id, answer.headers, self._clock.now_ms())
            return PeerClockError(answer.status, code, skew)
        if code == CLOCKS_CODE:
            return PeerClockError(answer.status, code, message)
        return PeerRefusedError(answer.status, code, message)

    def _head(self, node: Node, method: str, target: str, length: int | None, pool: str) -> bytes:
        path, _, query = target.partition("?")
        headers = {"host": urlsplit(node.endpoint).netloc, MAP_HEADER: str(self._map_version())}
        headers |= {POOL_HEADER: pool} if pool else {}
        headers |= tracing.outgoing_headers()
        if self._credential is None:
            self._credential = Credential(PEER_KEY + self.node_id, peer_secret(self._derive(PURPOSE)))
        headers |= sign(
            RequestHead(method, path, query, headers),
            self._credential,
            region=REGION,
            timestamp=self._clock.now_ms() // 1000,
            payload_hash=UNSIGNED_PAYLOAD,
        )
        if length is None:
            headers |= {"transfer-encoding": "chunked", "expect": "100-continue"}
        elif method not in ("GET", "HEAD"):
            headers["content-length"] = str(length)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode()


async def _either(sending: asyncio.Future[None], answer: PeerResponse) -> None:
    """Wait until the response begins or the body is sent. Raises what the iteration of the body raised."""
    await asyncio.wait((sending, answer.head_future), return_when=asyncio.FIRST_COMPLETED)
    if sending.done():
        sending.result()


async def _send(answer: PeerResponse, wire: HttpConnection, body: AsyncIterable[bytes]) -> None:
    """Send the body in pieces, each one HTTP chunk. If its iteration fails, the connection is closed."""
    wire.sending = True
    try:
        await _send_pieces(wire, body)
    except PeerUnreachableError:
        if not answer.head_future.done():
            raise
    except Exception as error:
        answer.on_error(
            PeerUnreachableError(f"the body of a call could not be produced: {error}", begun=True)
        )
        wire.abort()
        raise


async def _send_pieces(wire: HttpConnection, body: AsyncIterable[bytes]) -> None:
    async for data in body:
        with memoryview(data) as view:
            for start in range(0, len(view), MAX_PIECE_BYTES):
                piece = view[start : start + MAX_PIECE_BYTES]
                announced = piece_header(piece)
                wire.send_body(b"%x\r\n%b" % (len(piece) + len(announced), announced))
                wire.send_body(bytes(piece))
                wire.send_body(b"\r\n")
        await wire.drain()
    wire.send_body(b"%x\r\n%b\r\n0\r\n\r\n" % (len(END_MARKER), END_MARKER))
    wire.finish_body()
