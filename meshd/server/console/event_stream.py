"""Event stream of one page: the documents that it watches, first whole, then as changes (server-sent events).

A page names the documents it watches: a few JSON documents of the native routes. The node requests them on
behalf of the session, with the rights that its key has at that time, and sends changes as merge patches (RFC
7396). Per stream, it stores only the last version of each document. A stream ends after an hour, with its
session, or when the node stops; the page then opens another one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

import msgspec

from meshd.server.console.static_files import CONFINEMENT
from meshd.server.response import StreamedReply, connection_header, head_bytes
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.auth.identities.console_sessions import ConsoleSession, ConsoleSessions
    from meshd.server.console.signed_request import SessionSigner
    from meshd.server.request import MeshRequest
    from meshd.server.response import Reply
    from meshd.util.clock import Clock

WATCHABLE: Final = ("/-/activity", "/-/cluster", "/-/jobs")
INTERVAL: Final = 2.0
"""Seconds between two checks of the documents."""
MAX_STREAMS: Final = 64
"""Maximum number of streams of one worker."""
_LIFETIME: Final = 3600.0
_POLL: Final = 0.2  # seconds until a stream notices that the node stops
_HEARTBEATS: Final = 7  # checks without a change until a comment is sent, to detect disconnected clients
_MAX_DOCUMENT: Final = 1 << 20
_ABSENT: Final = object()


def merge_patch(before: Any, after: Any) -> Any:
    """Return the merge patch (RFC 7396) from one document to another; `{}` if they are equal objects. A null
    in `after` counts as a missing member."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return after
    patch: dict[str, Any] = {name: None for name in before if after.get(name) is None}
    for name, value in after.items():
        old = before.get(name, _ABSENT)
        if value is None or old == value:
            patch.pop(name, None) if old is _ABSENT or old == value else None
            continue
        patch[name] = merge_patch(old, value)
    return patch


class EventStreams:
    """Sends the streams of the pages of a worker. `ask` handles a signed request without a connection."""

    def __init__(
        self,
        sessions: ConsoleSessions,
        signer: SessionSigner,
        ask: Callable[[MeshRequest, str], Awaitable[Reply]],
        clock: Clock,
    ) -> None:
        self._sessions, self._signer, self._ask, self._clock = sessions, signer, ask, clock
        self._open = 0

    def __repr__(self) -> str:
        return f"<EventStreams, {self._open} open>"

    async def send(self, request: MeshRequest, cookie: str) -> Reply:
        """Send a stream until it ends. Raises S3Error InvalidArgument, SlowDown, AccessDenied."""
        try:
            pairs = parse_qsl(request.raw_path.partition("?")[2], max_num_fields=16)
        except ValueError:  # more fields than a page sends
            pairs = []
        targets = [value for name, value in pairs if name == "watch"]
        if not targets or not set(targets) <= set(WATCHABLE):
            raise S3Error("InvalidArgument", f"watch must be one or more of {', '.join(WATCHABLE)}.")
        if self._open >= MAX_STREAMS:
            raise S3Error(
                "SlowDown",
                f"This worker serves {MAX_STREAMS} open pages of the console, its maximum. Close some pages.",
                headers={"retry-after": "5"},
            )
        self._sessions.open(cookie)
        self._open += 1
        try:
            return await self._send(request, cookie, targets)
        finally:
            self._open -= 1

    async def _send(self, request: MeshRequest, cookie: str, targets: Sequence[str]) -> Reply:
        headers = [
            ("Content-Type", "text/event-stream"),
            ("Cache-Control", "no-store"),
            ("Transfer-Encoding", "chunked"),
            *CONFINEMENT,
        ]
        now = self._clock.now_ms() // 1000
        connection = connection_header(request, keep_alive=request.keep_alive)
        await self._write(request, head_bytes(200, headers, now, connection=connection))
        known: dict[str, Any] = {}
        quiet, until = 0, self._clock.monotonic() + _LIFETIME
        while self._clock.monotonic() < until and not request.connection.is_closing:
            try:
                session = self._sessions.open(cookie)
            except S3Error as error:
                await self._write(request, _chunk("ended", {"message": error.message}))
                break
            events = b"".join([await self._changes(request, session, target, known) for target in targets])
            quiet = 0 if events else quiet + 1
            if events or quiet >= _HEARTBEATS:
                await self._write(request, events or b"3\r\n:\n\n\r\n")
                quiet = 0
            await self._rest(request)
        await self._write(request, b"0\r\n\r\n")
        return StreamedReply(200, keep_alive=request.keep_alive)

    async def _changes(
        self, request: MeshRequest, session: ConsoleSession, target: str, known: dict[str, Any]
    ) -> bytes:
        """Return the event of a document that has changed; empty if it has not."""
        asked = self._signer.made(target, request, request.headers.get("host", ""), session)
        reply = await self._ask(asked, target)
        if len(reply.body) > _MAX_DOCUMENT:
            document: Any = {
                "error": {
                    "code": "TooLarge",
                    "message": "The document is too large for the event stream; request it with the API.",
                }
            }
        else:
            document = msgspec.json.decode(reply.body)
        if target not in known:
            known[target] = document
            return _chunk("document", {"target": target, "document": document})
        patch = merge_patch(known[target], document)
        if patch == {}:
            return b""
        known[target] = document
        return _chunk("patch", {"target": target, "patch": patch})

    async def _rest(self, request: MeshRequest) -> None:
        """Wait until the next check; shorter if the node stops."""
        for _ in range(round(INTERVAL / _POLL)):
            if request.connection.is_closing:
                return
            await asyncio.sleep(_POLL)

    @staticmethod
    async def _write(request: MeshRequest, data: bytes) -> None:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client closed the connection")
        request.response_started = True
        transport.write(data)
        request.connection.wrote(len(data))
        await request.drain()


def _chunk(event: str, data: object) -> bytes:
    """Return an event as one chunk of the body."""
    text = b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(data))
    return b"%x\r\n%b\r\n" % (len(text), text)
