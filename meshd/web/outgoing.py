"""A client's request as it goes to another node: its head as it came, its body held or as it comes.

Law: what the client signed goes out as it is; headers of the connection alone stay behind (RFC 9110 §7.6.1).
Invariant: a request is sent again only while no part of its body has gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.net.wires import PeerUnreachableError
from meshd.web.authentication import ANONYMOUS
from meshd.web.hops import HOP_HEADER
from meshd.web.replies import SentReply, connection_word
from meshd.web.settling import must_close
from meshd.web.streaming import RequestBody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from meshd.net.wires import Wire
    from meshd.web.incoming import MeshRequest
    from meshd.web.relaying import Relay
    from meshwire.s3.parsing import RequestHead

_NOT_SENT: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade", b"expect")
)


class Begun(NamedTuple):
    """A body that was begun to be read: what was read, and what is left."""

    read: Sequence[bytes]
    rest: AsyncIterator[bytes]


class Sending:
    """One request on its way, to one node after the other until one answers."""

    def __init__(
        self, request: MeshRequest, head: RequestHead, body_timeout: float, begun: Begun | None
    ) -> None:
        self._request, self._begun = request, begun
        announced = request.body_exists or "Expect" in request.headers
        self._body = RequestBody(request, head, ANONYMOUS, body_timeout) if announced else None
        self.streams = False
        """Whether the body goes out as it comes."""
        self.gone = False
        """Whether a part of it has: then the request cannot be begun again."""
        self.received = 0
        self.relay: Relay | None = None

    async def hold(self, most: int) -> None:
        """Read the body now if it is small, and whoever sends it does not wait to be asked."""
        length = self._request.content_length
        self.streams = self._begun is not None
        if self.streams or self._body is None or self._request.held_body is not None:
            return
        if length is None or length > most or (length and "Expect" in self._request.headers):
            self.streams = True
            return
        self._request.held_body = b"".join([data async for data in self._body.raw()])
        self.received = len(self._request.held_body)

    def head(self, hop: str) -> bytes:
        """The request as it goes out, a body that is held included."""
        return outgoing_head(self._request, hop, streams=self.streams)

    async def _pieces(self) -> AsyncIterator[bytes]:
        assert self._body is not None
        if self._begun is None:
            async for data in self._body.raw():
                yield data
            return
        for data in self._begun.read:
            yield data
        async for data in self._begun.rest:
            yield data

    async def run(self, relay: Relay, wire: Wire) -> None:
        """Send the body when it is asked for. Raises S3Error for one that does not come as it should,
        ConnectionError when the client is gone."""
        assert self._body is not None
        if not await relay.wanted:
            return
        left = self._request.content_length
        wire.sending = self.gone = True
        try:
            async for data in self._pieces():
                self.received += len(data)
                if left is None:
                    wire.send(b"%x\r\n%b\r\n" % (len(data), data))
                else:
                    wire.send(data)
                    left -= len(data)
                    if not left:
                        wire.sent_all()
                await wire.drained()
                if relay.outcome.done() or relay.head is not None:
                    return
            if left is None:
                wire.send(b"0\r\n\r\n")
                wire.sent_all()
        except PeerUnreachableError:
            return  # the relay hears of it, too
        finally:
            wire.sending = False

    def connection(self) -> str:
        """What the answer says of the client's connection; asked when its head is here."""
        request = self._request
        return connection_word(request, bool(request.keep_alive) and not must_close(request))

    def reply(self) -> SentReply:
        """What was sent."""
        relay = self.relay
        assert relay is not None
        assert relay.head is not None
        keep_alive = bool(self._request.keep_alive) and not relay.closing
        return SentReply(relay.head.status, keep_alive=keep_alive)


def outgoing_head(request: MeshRequest, hop: str, *, streams: bool = False) -> bytes:
    """A client's request as it goes to another node: a body that is held included, one that `streams`
    announced."""
    lines = [f"{request.method} {request.raw_path} HTTP/1.1".encode("utf-8", "surrogateescape")]
    lines += [b"%b: %b" % pair for pair in request.raw_headers if pair[0].lower() not in _NOT_SENT]
    held = None if streams else request.held_body
    if "Host" not in request.headers:
        lines.append(b"host: ")
    if streams:
        lines.append(b"expect: 100-continue")
        if request.content_length is None:
            lines.append(b"transfer-encoding: chunked")
    elif held is not None and "Content-Length" not in request.headers:
        lines.append(b"content-length: %d" % len(held))
    lines.append(f"{HOP_HEADER}: {hop}".encode("utf-8", "surrogateescape"))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (held or b"")
