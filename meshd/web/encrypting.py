"""File ranges onto a connection that encrypts: through the process, piece by piece, at the client's pace.

Law: the event loop never waits for a disk, and other connections get their turn after every piece.
Invariant: memory a connection is a few pieces, whatever the object's size and however slow the client.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from meshd.kit import failpoints
from meshd.web.tearing import TornError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiohttp import web

    from meshd.store.records import Span

_PIECE = 256 << 10  # encrypted at once: about a tenth of a millisecond


def is_encrypted(transport: asyncio.BaseTransport) -> bool:
    """Whether what is written to `transport` is encrypted by it, so that nothing may be written past it."""
    return transport.get_extra_info("sslcontext") is not None


async def write_spans(
    request: web.BaseRequest, head: bytes, spans: Sequence[Span], resident: Callable[[int, int, int], bool]
) -> None:
    """Write a head and then the bytes of `spans`. Raises ConnectionError when the client went away, TornError
    when they cannot be read."""
    held, sent = head, 0
    for span in spans:
        offset, end = span.offset, span.offset + span.length
        while offset < end:
            size = min(end - offset, _PIECE)
            try:
                if resident(span.fd, offset, size):
                    data = _read(span.fd, size, offset)
                else:
                    loop = asyncio.get_running_loop()
                    data = await loop.run_in_executor(None, _read, span.fd, size, offset)
            except OSError as error:
                if held:
                    await write_piece(request, held)
                raise TornError(sent, error) from error
            await write_piece(request, held + data if held else data)
            held, offset, sent = b"", offset + size, sent + size
    if held:
        await write_piece(request, held)


def _read(fd: int, size: int, offset: int) -> bytes:
    failpoints.hit("web.send.before")
    data = os.pread(fd, size, offset)
    if len(data) != size:
        raise OSError(f"a data file ends {size - len(data)} bytes before its extent does")
    return data


async def write_piece(request: web.BaseRequest, data: bytes) -> None:
    """At the client's pace, by way of the connection's transport. Raises ConnectionError."""
    transport, protocol = request.transport, request.protocol
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client closed the connection")
    transport.write(data)
    await request.writer.drain()
    if hasattr(protocol, "moved"):
        protocol.moved += len(data)
    await asyncio.sleep(0)
