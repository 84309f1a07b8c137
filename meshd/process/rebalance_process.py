"""Rebalance process: compares and fetches for the coordinator, and serves other nodes that compare.

It starts when a client connects to its socket and exits when it has been idle; killing it at any point costs
only time. It runs at low priority: it gets the CPU time that others leave, and a minimum share. Code that
waits for the store's lock never waits for a low-priority thread; the committer is not one.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import uvloop

from meshd.cluster.rebalance.sync_source import RemoteSyncPeer
from meshd.cluster.rebalance.worker import ERRORS, SYNC, LocalWorker, WorkerSocket
from meshd.control.cluster_secret import ClusterSecret
from meshd.process.periodic_tasks import process_tasks, start_periodic_tasks
from meshd.process.wiring.cluster import local_rebalance_routes, sync_source
from meshd.process.wiring.node_context import REBALANCE_WRITER, open_node
from meshd.rpc.process_server import ProcessServer
from meshd.server.connection_handoff import HAND_OFF, HandoffServer
from meshd.server.peer_endpoint import PeerAuthenticator
from meshd.telemetry import logs, metrics
from meshd.util.async_tasks import BackgroundTasks
from meshd.util.malloc_tuning import keep_freed_pages
from meshd.util.shared_counters import BackgroundThrottle, lower_thread_priority

if TYPE_CHECKING:
    import socket

    from meshd.cluster.rebalance.anti_entropy import SyncStats
    from meshd.cluster.rebalance.worker import SyncRequest
    from meshd.config import NodeSettings
    from meshd.process.child_process import ChildReporter
    from meshd.process.listen_sockets import ListenSockets
    from meshd.process.wiring.node_context import NodeContext
    from meshd.rpc.process_server import ServerCall
    from meshd.server.connection_handoff import HandedConnection

REBALANCE_PROCESS: Final = "rebalancer-0"
_IDLE_TIMEOUT: Final = 5.0  # seconds without work after which it ends
_POLL_INTERVAL: Final = 0.5


def rebalance_socket(settings: NodeSettings) -> WorkerSocket | None:
    """Return the socket of the process; None for a node outside a cluster."""
    return None if settings.cluster.control is None else WorkerSocket(settings.rebalancer_socket)


def run_rebalance_process(settings: NodeSettings, sockets: ListenSockets, reporter: ChildReporter) -> None:
    """Run the rebalance process from start to end."""
    logs.configure(settings.log_format, settings.log_level, "rebalancer")
    logs.follow_runtime_level(settings.log_level)
    keep_freed_pages()
    with (
        open_node(settings, REBALANCE_WRITER) as node,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        lower_thread_priority()
        runner.run(_until_idle(node, sockets.rebalancer, reporter))


async def _until_idle(node: NodeContext, listener: socket.socket, reporter: ChildReporter) -> None:
    stop, tasks = asyncio.Event(), BackgroundTasks("rebalancer")
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    work = _RebalanceCalls(node)
    start_periodic_tasks(process_tasks(node, reporter), tasks)
    server = ProcessServer(ERRORS)
    server.register(SYNC, work.sync)
    server.register(HAND_OFF, work.adopt_connection)
    tasks.spawn(server.serve_forever(listener), "work")
    reporter.report_ready()
    try:
        while not stop.is_set() and not work.is_idle():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _POLL_INTERVAL)
    finally:
        await tasks.aclose()
        await work.aclose()
        listener.close()


class _RebalanceCalls:
    """Serves the calls to this process."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        rest = BackgroundThrottle(node.clock, metrics.rebalance_pause.set).yield_to_clients
        given, holder = sync_source(node, rest), partial(RemoteSyncPeer, node.peers)
        self._worker = LocalWorker(node.store, given, node.mesh, holder, rest, node.clock)
        gate = PeerAuthenticator(ClusterSecret(node.control).derive_key, node.clock)
        self._handoffs = HandoffServer(
            local_rebalance_routes(node, given), gate, node.clock, node.settings.http
        )
        self._syncs = 0
        self._last = node.clock.monotonic()

    def __repr__(self) -> str:
        return f"<_RebalanceCalls, {self._syncs} syncs, {self._handoffs!r}>"

    def is_idle(self) -> bool:
        """Whether there was no work for `_IDLE_TIMEOUT` seconds."""
        now = self._node.clock.monotonic()
        if self._syncs or self._handoffs.requests_in_flight:
            self._last = now
        return now - self._last > _IDLE_TIMEOUT

    async def aclose(self) -> None:
        await self._handoffs.aclose()
        await self._node.peers.aclose()

    async def sync(self, request: SyncRequest, call: ServerCall) -> SyncStats:
        self._syncs += 1
        try:
            return await self._worker.serve_sync(request, call)
        finally:
            self._syncs -= 1

    async def adopt_connection(self, handed: HandedConnection, call: ServerCall) -> None:
        self._last = self._node.clock.monotonic()
        await self._handoffs.adopt_connection(handed, call.fds)
