"""A stream to a control store that is still being connected when its client is closed."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from meshd.control import http_connections
from meshd.control.etcd.gateway import EtcdMember, Gateway
from meshd.control.kubernetes.api_client import ApiClient, ApiServer
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE = 600.0  # longer than a test may take


@pytest.mark.parametrize("kind", ["etcd", "kubernetes"])
def test_a_stream_that_connects_while_its_client_is_closed_ends(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # answers nothing
        host, port = listener.getsockname()
        client: Gateway | ApiClient
        stream: Iterator[dict[str, Any]]
        if kind == "etcd":
            client = Gateway((EtcdMember(host, port),), SystemClock())
            stream = client.stream("watch", {}, IDLE)
        else:
            client = ApiClient(ApiServer(host, port), SystemClock())
            stream = client.watch("/api/v1/configmaps", IDLE)
        connect = http_connections.connect

        def closed_meanwhile(connection: Any) -> None:
            connect(connection)
            client.close()

        monkeypatch.setattr(http_connections, "connect", closed_meanwhile)
        assert list(stream) == []
