"""Distributes new connections: the worker with the fewest connections accepts.

All workers listen on one socket. A worker that sees another worker with fewer connections waits a moment
before it accepts. Each worker writes only its own count in shared memory. Connections spread evenly over the
workers in any arrival pattern, and no connection waits for a busy worker. TLS handshakes that stall are
bounded; a new one evicts the oldest.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
from functools import partial
from typing import TYPE_CHECKING, Any

from meshd.rpc.tcp_congestion import disable_pacing, restore_pacing
from meshd.telemetry import metrics
from meshd.util.async_tasks import BackgroundTasks
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from meshd.server.http_server import MeshServer

# Seconds between looks, and looks, during which a worker with fewer connections has priority.
_LOOK, _LOOKS = 0.002, 5
_TURN = 4  # connections accepted in a row before the loop runs other work
_SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_HANDSHAKES_SHARE = 8  # 1/8 of a worker's connections may be in their TLS handshake
_RESPITE = 0.5  # seconds until the next attempt when the system is out of resources
_QUEUED = 4096  # maximum connections accepted at the end
_ARRIVAL = 1.0  # seconds for their handshakes
_AWAY = 1 << 40
_log = logging.getLogger("meshd.server")


class ConnectionCounts:
    """The number of connections of each worker, in shared memory. Create it before the workers are forked."""

    def __init__(self, workers: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, 8 * workers)).cast("q")

    def __repr__(self) -> str:
        return f"<ConnectionCounts {list(self._counts)}>"

    def set_count(self, worker: int, count: int) -> None:
        """Set the worker's own count."""
        self._counts[worker] = count

    def withdraw(self, worker: int) -> None:
        """Mark the worker as accepting no more connections."""
        self._counts[worker] = _AWAY

    def is_fewest(self, worker: int) -> bool:
        """Whether no worker has fewer connections."""
        return self._counts[worker] <= min(self._counts)


class Acceptor:
    """Accepts connections from the shared socket for one worker, with `options` (TLS). Must be closed."""

    def __init__(
        self,
        listener: socket.socket,
        server: MeshServer,
        tally: ConnectionCounts,
        worker: int,
        options: Mapping[str, Any],
    ) -> None:
        self._listener, self._server, self._tally, self._worker = listener, server, tally, worker
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks("connections")
        self._coming: dict[socket.socket, asyncio.Task[None]] = {}
        self._most_coming = max(16, server.guard.limit // _HANDSHAKES_SHARE)
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0
        listener.setblocking(False)
        disable_pacing(listener)
        server.on_connection_lost = self._publish_count
        self._publish_count()
        self._watch()

    def __repr__(self) -> str:
        return f"<Acceptor of worker {self._worker}, {self._tally!r}>"

    def close(self) -> None:
        """Accept the connections that are established already, since closing the last listener would reset
        them, then stop. Accepted connections stay open. Idempotent."""
        for _ in range(_QUEUED if self._listener.fileno() >= 0 else 0):
            if not self._take():
                break
        self._server.on_connection_lost = None
        self._tally.withdraw(self._worker)
        if self._timer is not None:
            self._timer.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_for_handshakes(self) -> None:
        """Return when the last accepted connections have finished their handshakes, or after a second."""
        if self._coming:
            await asyncio.wait(self._coming.values(), timeout=_ARRIVAL)

    def _publish_count(self) -> None:
        self._tally.set_count(self._worker, self._server.connection_count + len(self._coming))

    def _watch(self) -> None:
        self._timer, self._looks = None, 0
        self._loop.add_reader(self._listener, self._on_readable)

    def _later(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(seconds, self._look_again)

    def _on_readable(self) -> None:
        """Accept connections that wait on the socket."""
        for _ in range(_TURN):
            if not self._tally.is_fewest(self._worker):
                self._later(_LOOK)
                return
            if not self._take():
                return

    def _look_again(self) -> None:
        """Wait on while another worker has fewer connections, but only for a while: it may be busy, or
        gone."""
        self._looks += 1
        waited = self._looks >= _LOOKS
        if waited or self._tally.is_fewest(self._worker):
            self._watch()
            if waited:
                self._take()
        else:
            self._later(_LOOK)

    def _take(self) -> bool:
        """Accept one connection, if one is still waiting."""
        try:
            client, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno in _SHORT_OF:
                self._wait_for_room(error)
            else:  # an error of that connection only (accept(2))
                _log.warning("a connection could not be accepted", extra={"why": error.strerror})
            return False
        client.setblocking(False)
        restore_pacing(client, address)
        task = self._coming[client] = self._tasks.spawn(self._welcome(client), "welcome")
        task.add_done_callback(partial(self._on_accepted, client))
        self._publish_count()
        if len(self._coming) > self._most_coming:
            metrics.http_turned_away.labels("slow handshake").inc()
            self._coming.pop(next(iter(self._coming))).cancel()
        return True

    def _wait_for_room(self, error: OSError) -> None:
        """Evict idle connections, which hold resources that a new one needs; without any, retry later."""
        made = self._server.guard.evict_idle()
        level = logging.WARNING if made else logging.ERROR
        why = open_files_message(error) or error.strerror
        _log.log(level, "out of resources for another connection", extra={"why": why})
        self._later(_LOOK if made else _RESPITE)

    async def _welcome(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._server, client, **self._options)
        except (OSError, TimeoutError):  # the client disconnected, or the handshake failed
            client.close()

    def _on_accepted(self, client: socket.socket, task: asyncio.Task[None]) -> None:
        self._coming.pop(client, None)
        if task.cancelled():
            client.close()
        if self._server.on_connection_lost is not None:
            self._publish_count()
