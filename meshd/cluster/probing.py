"""Whether a node answers at all, and what its clock shows: one small request, by a clock.

Law: says nothing about who it is; whoever needs that signs (`meshd.net.peers`). A certificate is not looked
at: a node whose certificate ran out is not away, and where a clock is wrong certificates seem to be.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from meshwire.httpdates import parse_http

if TYPE_CHECKING:
    from meshwire.cluster import Node

PATIENCE: Final = 1.5
VERSION_HEADER: Final = "x-mesh-map"
_REQUEST = "GET /-/healthy HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"
_MAX_HEAD: Final = 8192


@dataclass(frozen=True, slots=True)
class Heard:
    """What a node answers: the `version` of the map that it goes by (0 when it does not say), and the time
    that its `clock` shows, in whole seconds since 1970 (None when it does not say)."""

    version: int
    clock: int | None


async def answers(node: Node, patience: float = PATIENCE) -> int | None:
    """The version of the map that a node goes by (0 when it does not say), None when it does not answer."""
    heard = await hear(node, patience)
    return None if heard is None else heard.version


async def hear(node: Node, patience: float = PATIENCE) -> Heard | None:
    """What a node answers within `patience` seconds; None when it does not."""
    with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        async with asyncio.timeout(patience):
            return await _ask(node)
    return None


async def _ask(node: Node) -> Heard | None:
    where = urlsplit(node.endpoint)
    port = where.port or (443 if where.scheme == "https" else 80)
    tls = _unverified() if where.scheme == "https" else None
    reader, writer = await asyncio.open_connection(where.hostname, port, ssl=tls, limit=_MAX_HEAD)
    try:
        writer.write(_REQUEST.format(where.netloc).encode())
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    finally:
        writer.transport.abort()
    if not lines[0].startswith("HTTP/1."):
        return None
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines[1:])
    }
    return Heard(int(headers.get(VERSION_HEADER, "0")), parse_http(headers.get("date", "")))


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
