"""Response bodies without sendfile: written piece by piece over TLS, and resumed after a failed read.

If stored bytes cannot be read to their end, the number of bytes already sent is known exactly, so the
response either continues with the next byte or the connection is closed. The event loop never waits for a
disk. Memory per connection is a few pieces, whatever the object size and the client's speed. Further requests
that arrive during a resumed response are queued in order, up to a small limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from meshd.server.direct_sender import PartialReadError
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.core.read_source import FailoverRead
    from meshd.server.request import MeshRequest
    from meshd.store.disks.cold_reads import ColdRead, ColdReader
    from meshd.store.records import Span


BodyResumer = Callable[[PartialReadError], "FailoverRead"]
"""Returns the read of the bytes behind those that were sent, or raises: the connection is cut then."""


_PIECE = 256 << 10  # bytes encrypted at a time: about 0.1 ms


async def write_spans_encrypted(
    request: MeshRequest,
    head: bytes,
    spans: Sequence[Span],
    resident: Callable[[int, int, int], bool],
    reader: ColdReader | None = None,
    begun: ColdRead | None = None,
) -> None:
    """Write a head, then the bytes of `spans`. `reader` reads those that are not in memory from rotational
    disks; `begun`: it does already. Raises ConnectionError if the client disconnected, PartialReadError if
    they cannot be read."""
    held, sent = head, 0
    try:
        for span in spans:
            offset, end = span.offset, span.offset + span.length
            while offset < end:
                size = min(end - offset, _PIECE)
                try:
                    if begun is not None:
                        begun.advance(sent)
                        await begun.until(sent + size)
                    if resident(span.fd, offset, size):
                        data = _read(span.fd, size, offset)
                    else:
                        if begun is None and reader is not None:
                            begun, reader = reader.begin(spans, sent), None
                            continue
                        loop = asyncio.get_running_loop()
                        data = await loop.run_in_executor(None, _read, span.fd, size, offset)
                except OSError as error:
                    if held:
                        await write_piece(request, held)
                    raise PartialReadError(sent, error) from error
                await write_piece(request, held + data if held else data)
                held, offset, sent = b"", offset + size, sent + size
    finally:
        if begun is not None:
            begun.close()
    if held:
        await write_piece(request, held)


def _read(fd: int, size: int, offset: int) -> bytes:
    failpoints.hit("web.send.before")
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise OSError(f"a data file ends {size - len(data)} bytes before its extent does")
    return data


async def write_piece(request: MeshRequest, data: bytes) -> None:
    """Write through the connection's transport at the client's pace. Raises ConnectionError."""
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client closed the connection")
    request.response_started = True
    transport.write(data)
    await request.drain()
    request.connection.moved += len(data)
    await asyncio.sleep(0)


log = logging.getLogger(__name__)
_HELD: Final = 64 << 10  # bytes of further requests that are accepted meanwhile


class PendingResponse:
    """Answers a client's only request outside the parser. `is_last`: close the client's connection after this
    response. `data`: the request, in case the parser must handle it after all; `continued`: with
    `100 Continue` sent."""

    def __init__(self, protocol: Any, data: bytes = b"") -> None:
        self._protocol = protocol
        self.data, self.held = data, b""
        self.is_last = self.continued = False

    @property
    def response_started(self) -> bool:
        """Whether a response was started; otherwise nothing was sent."""
        return True

    @property
    def closes_connection(self) -> bool:
        """Whether the response announces that the connection closes."""
        return False

    def hold_input(self, data: bytes) -> None:
        """Keep input that arrived after the request."""
        before, self.held = len(self.held), self.held + data
        if before <= _HELD < len(self.held):
            self._protocol.transport.pause_reading()

    def input_ended(self) -> None:
        """The client has closed its side of the connection."""

    def _read_on(self) -> None:
        """Resume reading before the kept input is processed."""
        if len(self.held) > _HELD:
            self._protocol.transport.resume_reading()


class ResumedResponse(PendingResponse):
    """Resumes a response. `ended` is called once: the rest was sent, or the connection was cut."""

    def __init__(
        self,
        protocol: Any,
        rest: BodyResumer,
        torn: PartialReadError,
        ended: Callable[[PendingResponse], None],
    ) -> None:
        super().__init__(protocol)
        self._ended = ended
        self._task = asyncio.get_running_loop().create_task(self._go_on(rest, torn))
        self._task.add_done_callback(self._on_done)

    def __repr__(self) -> str:
        return f"<ResumedResponse, {len(self.held)} bytes held>"

    def cancel(self) -> None:
        """Stop: the client is gone."""
        self._task.cancel()

    async def _go_on(self, rest: BodyResumer, torn: PartialReadError) -> None:
        async with aclosing(
            rest(torn).pieces()
        ) as pieces:  # at most what one turn takes: it may wait in memory
            async for piece in pieces:
                self._protocol.transport.write(piece)
                self._protocol.wrote(len(piece))

    def _on_done(self, task: asyncio.Task[None]) -> None:
        transport = self._protocol.transport
        error = None if task.cancelled() else task.exception()
        if transport is not None and (task.cancelled() or error is not None):
            log.warning("a response was cut off", extra={"why": str(error)})
            transport.abort()
        elif transport is not None and not transport.is_closing():
            self._read_on()
        self._ended(self)
