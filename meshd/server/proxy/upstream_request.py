"""A client's request as it is sent to another node: its head, and its body, buffered or as it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.rpc.http_connection import PeerUnreachableError
from meshd.server.proxy.hops import HOP_HEADER, forwarded_trace
from meshd.server.request_body import RequestBody
from meshd.server.response import StreamedReply, connection_header, must_close_connection
from meshd.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from meshd.rpc.http_connection import HttpConnection
    from meshd.server.proxy.response_relay import ResponseRelay
    from meshd.server.request import MeshRequest
    from meshwire.s3.parse_request import RequestHead

_NOT_SENT: Final = frozenset(
    b"connection keep-alive proxy-connection te transfer-encoding upgrade expect x-mesh-trace".split()
)


class PartialBody(NamedTuple):
    """A partly read body: the part that was read, and the rest."""

    received: Sequence[bytes]
    rest: AsyncIterator[bytes]


class UpstreamRequest:
    """One request, sent to one node after the other until one answers."""

    def __init__(
        self, request: MeshRequest, head: RequestHead, body_timeout: float, begun: PartialBody | None
    ) -> None:
        self._request, self._begun = request, begun
        announced = request.body_exists or "expect" in request.headers
        self._body = RequestBody(request, head, body_timeout) if announced else None
        self.streams = False
        """Whether the body is sent as it arrives."""
        self.body_started = False
        """Whether a part of the body was sent, so that the request cannot be sent again."""
        self.received = 0
        self.relay: ResponseRelay | None = None

    async def buffer_small_body(self, most: int) -> None:
        """Read the body now if it is small and the client does not wait for `100 Continue`."""
        length = self._request.content_length
        self.streams = self._begun is not None
        if self.streams or self._body is None or self._request.held_body is not None:
            return
        if length is None or length > most or (length and "expect" in self._request.headers):
            self.streams = True
            return
        self._request.held_body = b"".join([data async for data in self._body.iter_raw()])
        self.received = len(self._request.held_body)

    def head_bytes(self, hop: str) -> bytes:
        """Return the request's bytes, including a buffered body."""
        return upstream_head(self._request, hop, streams=self.streams)

    async def _pieces(self) -> AsyncIterator[bytes]:
        assert self._body is not None
        if self._begun is None:
            async for data in self._body.iter_raw():
                yield data
            return
        for data in self._begun.received:
            yield data
        async for data in self._begun.rest:
            yield data

    async def stream_body(self, relay: ResponseRelay, wire: HttpConnection) -> None:
        """Send the body when the node asks for it. Raises S3Error if it does not arrive properly,
        ConnectionError if the client is gone."""
        assert self._body is not None
        if not await relay.body_requested:
            return
        left = self._request.content_length
        wire.sending = self.body_started = True
        try:
            async for data in self._pieces():
                self.received += len(data)
                if left is None:
                    wire.send_body(b"%x\r\n%b\r\n" % (len(data), data))
                else:
                    wire.send_body(data)
                    left -= len(data)
                    if not left:
                        wire.finish_body()
                await wire.drain()
                if relay.outcome.done() or relay.head is not None:
                    return
            if left is None:
                wire.send_body(b"0\r\n\r\n")
                wire.finish_body()
        except PeerUnreachableError:
            return  # the relay gets the error too
        finally:
            wire.sending = False

    def connection_header(self) -> str:
        """Return the Connection header of the response; called when its head has arrived."""
        request = self._request
        return connection_header(request, request.keep_alive and not must_close_connection(request))

    def reply(self) -> StreamedReply:
        """Return the reply that was sent."""
        relay = self.relay
        assert relay is not None
        assert relay.head is not None
        keep_alive = self._request.keep_alive and not relay.closes_connection
        return StreamedReply(relay.head.status, keep_alive=keep_alive)


def upstream_head(request: MeshRequest, hop: str, *, streams: bool = False) -> bytes:
    """Return a client's request for another node: with a buffered body, or announcing one that `streams`."""
    lines = [f"{request.method} {request.raw_path} HTTP/1.1".encode("utf-8", "surrogateescape")]
    lines += [b"%b: %b" % pair for pair in request.raw_headers if pair[0].lower() not in _NOT_SENT]
    held = None if streams else request.held_body
    if "host" not in request.headers:
        lines.append(b"host: ")
    if streams:
        lines.append(b"expect: 100-continue")
        if request.content_length is None:
            lines.append(b"transfer-encoding: chunked")
    elif held is not None and "content-length" not in request.headers:
        lines.append(b"content-length: %d" % len(held))
    lines.append(f"{HOP_HEADER}: {hop}".encode("utf-8", "surrogateescape"))
    head = b"\r\n".join(lines) + b"\r\n" + forwarded_trace(tracing.current())
    return head + b"\r\n" + (held or b"")
