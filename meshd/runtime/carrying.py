"""The mover's process: compares and fetches on the steward's behalf, and serves other nodes that do.

Law: started when somebody comes to its door, ends by itself when nobody has; killed at any point, nothing is
lost but time. It gives way: of a busy processor it gets what is left, and a share that keeps it going.
Invariant: what waits for its store's lock never waits for a thread that gives way: the committer does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from meshd.cluster.carrying import Carrier, Carry, MoverDoor
from meshd.cluster.pulling import RemoteHolder
from meshd.control.nodesecret import NodeSecret
from meshd.kit.tasks import Tasks
from meshd.kit.yielding import Yielding, give_way
from meshd.net.unixmessages import accept_streams
from meshd.origin.heap import keep_freed_pages
from meshd.runtime.chores import process_chores, start_chores
from meshd.runtime.moving import movement_doors, offers
from meshd.runtime.node import CARRIER, open_node
from meshd.telemetry import logs, metrics, verbosity
from meshd.web.guests import Guest, GuestServer
from meshd.web.peers import PeerGate

if TYPE_CHECKING:
    import socket

    from meshd.config import NodeSettings
    from meshd.net.unixmessages import MessageStream
    from meshd.runtime.children import Reporter
    from meshd.runtime.listening import Doors
    from meshd.runtime.node import Node

_log = logging.getLogger("meshd.moving")
MOVER: Final = "mover-0"
_IDLE: Final = 5.0  # seconds without work after which it ends
_LOOK: Final = 0.5


def mover_door(settings: NodeSettings) -> MoverDoor | None:
    """The way there, of a node in a mesh."""
    return None if settings.cluster.control is None else MoverDoor(settings.mover_socket)


def run_mover(settings: NodeSettings, doors: Doors, reporter: Reporter) -> None:
    """From start to end."""
    logs.configure(settings.log_format, settings.log_level, "mover")
    verbosity.follow(settings.log_level)
    keep_freed_pages()
    with (
        open_node(settings, CARRIER) as node,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        give_way()
        runner.run(_until_idle(node, doors.mover, reporter))


async def _until_idle(node: Node, listener: socket.socket, reporter: Reporter) -> None:
    stop, tasks = asyncio.Event(), Tasks("mover")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    work = _Work(node)
    start_chores(process_chores(node, reporter), tasks)
    tasks.spawn(accept_streams(listener, work.take), "work")
    reporter.ready()
    try:
        while not stop.is_set() and not work.is_over():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK)
    finally:
        await tasks.aclose()
        await work.aclose()
        listener.close()


class _Work:
    """What this process is asked for."""

    def __init__(self, node: Node) -> None:
        self._node = node
        rest = Yielding(node.clock, metrics.moves_pause.set).rest
        given, holder = offers(node, rest), partial(RemoteHolder, node.peers)
        self._carrier = Carrier(node.store, given, node.mesh, holder, rest, node.clock)
        gate = PeerGate(NodeSecret(node.control).derive, node.clock)
        self._guests = GuestServer(movement_doors(node, given), gate, node.clock, node.settings.http)
        self._carrying = 0
        self._last = node.clock.monotonic()

    def __repr__(self) -> str:
        return f"<_Work, carrying {self._carrying}, {self._guests!r}>"

    def is_over(self) -> bool:
        """Whether there was none for a while."""
        now = self._node.clock.monotonic()
        if self._carrying or self._guests.answering:
            self._last = now
        return now - self._last > _IDLE

    async def aclose(self) -> None:
        await self._guests.aclose()
        await self._node.peers.aclose()

    async def take(self, stream: MessageStream) -> None:
        body, fds = await stream.receive()
        self._last = self._node.clock.monotonic()
        try:
            wanted = msgspec.convert(body, Carry | Guest, str_keys=True)
            if isinstance(wanted, Guest):
                await self._guests.welcome(wanted, fds)
                return
        finally:
            for fd in fds:
                os.close(fd)
        self._carrying += 1
        try:
            await self._carrier.serve(wanted, stream)
        finally:
            self._carrying -= 1
