"""What a Service is to clients: one address, behind it the pods that are ready. For tests.

A connection goes to one pod and stays there, as with kube-proxy.
"""

from __future__ import annotations

import selectors
import socket
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable


class Front:
    """`ready` says where connections may go now."""

    def __init__(self, ready: Callable[[], list[tuple[str, int]]]) -> None:
        self._ready, self._turn = ready, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = "http://{}:{}".format(*self._listener.getsockname())
        self._thread = threading.Thread(target=self._accept, name="front")
        self._open: list[threading.Thread] = []
        self._stopped = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._thread, *self._open):
            thread.join(10)

    def _accept(self) -> None:
        while not self._stopped:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            thread.start()
            self._open = [each for each in self._open if each.is_alive()] + [thread]

    def _serve(self, client: socket.socket) -> None:
        with client:
            places = self._ready()
            if not places:
                return
            self._turn += 1
            try:
                server = socket.create_connection(places[self._turn % len(places)], timeout=2)
            except OSError:
                return
            with server:
                self._splice(client, server)

    def _splice(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        with selectors.DefaultSelector() as waiting:
            for each in other:
                waiting.register(each, selectors.EVENT_READ)
            while not self._stopped:
                for key, _ in waiting.select(0.5):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    try:
                        piece = source.recv(1 << 16)
                        other[source].sendall(piece)
                    except OSError:
                        return
                    if not piece:
                        return
