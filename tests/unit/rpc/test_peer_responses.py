"""Responses of a peer that are not HTTP."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.rpc.http_connection import HttpConnection, PeerUnreachableError
from meshd.rpc.peer_client import PeerResponse


@pytest.mark.parametrize("length", [b"x", b"-1", b"9" * 5000])
def test_a_content_length_that_is_none_ends_the_exchange(length: bytes) -> None:
    async def check() -> None:
        connection, response = HttpConnection("n2"), PeerResponse()
        transport: Any = SimpleNamespace(
            write=lambda data: None, abort=lambda: None, is_closing=lambda: False
        )
        connection.connection_made(transport)
        connection.send_request(response, b"GET / HTTP/1.1\r\n\r\n", patience=60.0)
        head = b"HTTP/1.1 200 OK\r\ncontent-length: " + length + b"\r\n\r\n"
        connection.get_buffer(len(head))[: len(head)] = head
        connection.buffer_updated(len(head))
        assert response.head_future.done()
        with pytest.raises(
            PeerUnreachableError, match="n2 sent an invalid HTTP response: the content length"
        ):
            await response.wait_head()

    asyncio.run(check())
