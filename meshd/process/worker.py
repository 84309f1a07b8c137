"""HTTP worker process: serves the port until SIGTERM, then finishes running requests.

It reports ready only when it accepts connections. After SIGTERM it accepts nothing new, lets requests
finish within the grace period, closes idle connections and exits with code 0. Local frame handover (shared
memory for jobs on the same host) is optional: where its socket cannot be opened, the node serves those jobs
over TCP.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from meshd.batches.assembly.assembler_client import AssemblerClient
from meshd.process.coordinator import start_coordinator
from meshd.process.periodic_tasks import PeriodicTask, process_tasks, start_periodic_tasks
from meshd.process.rebalance_process import rebalance_socket
from meshd.process.wiring.data_services import data_services
from meshd.process.wiring.node_context import node_access, node_origins, open_node
from meshd.process.wiring.routes import admin_routes, native_routes
from meshd.process.wiring.services import peer_services, server_services
from meshd.server.accept_balancer import Acceptor
from meshd.server.api.health import health_routes
from meshd.server.api.openapi import openapi_route
from meshd.server.http_server import build_server, drain_server
from meshd.server.local_handover import LocalFrameService
from meshd.server.request import flush_request_counters
from meshd.server.tls import tls_listen_options
from meshd.telemetry import logs
from meshd.telemetry.audit_log import AuditLog, Rotation
from meshd.telemetry.span_export import start_tracing, stop_tracing
from meshd.util.async_tasks import BackgroundTasks
from meshd.util.shared_counters import measure_loop_delay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from meshd.config import NodeSettings
    from meshd.core.frame_address import FrameSource
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.process.child_process import ChildReporter
    from meshd.process.listen_sockets import ListenSockets
    from meshd.process.wiring.node_context import NodeContext
    from meshd.server.http_route import HttpRoute
    from meshd.server.services import ServerServices
    from meshd.server.tls import ServerTls


_log = logging.getLogger(__name__)


@asynccontextmanager
async def local_handover(settings: NodeSettings, index: int) -> AsyncIterator[LocalFrameService | None]:
    """Serve the local handover of worker `index`; yields None if it is disabled or cannot be opened."""
    frame_service = _open_handover(settings, index)
    if frame_service is None:
        yield None
        return
    tasks = BackgroundTasks("local-handover")
    tasks.spawn(frame_service.serve_forever(), "frame handover")
    try:
        yield frame_service
    finally:
        await tasks.aclose()


def _open_handover(settings: NodeSettings, index: int) -> LocalFrameService | None:
    directory = settings.local_handover_dir
    if directory is None:
        return None
    most = max(1, settings.transform.frame_cache_bytes // settings.workers)
    try:
        return LocalFrameService(directory, f"{settings.node_id}-{index}", most)
    except OSError as error:
        _log.warning("local frame handover is off, and jobs on this host use TCP: %s", error)
        return None


_AUDIT_TIMEOUT = 2.0  # seconds for the last audit lines


def run_worker(
    settings: NodeSettings,
    index: int,
    sockets: ListenSockets,
    trouble: Callable[[], str],
    reporter: ChildReporter,
) -> None:
    """Run worker `index` from start to end. A worker without others also runs the coordinator's work."""
    logs.configure(settings.log_format, settings.log_level, f"worker-{index}")
    logs.follow_runtime_level(settings.log_level)
    start_tracing(settings.tracing, settings.node_id, f"worker-{index}")
    with (
        open_node(settings, f"w{index}", rebalance_socket(settings)) as node,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve_node(node, index, sockets, trouble, reporter))
    stop_tracing()


async def _serve_node(
    node: NodeContext, index: int, sockets: ListenSockets, trouble: Callable[[], str], reporter: ChildReporter
) -> None:
    background = BackgroundTasks("periodic tasks")
    async with (
        node_origins(node).run() as backed,
        _frame_source(node, backed, sockets) as frames,
        _audit_log(node.settings) as audit,
        local_handover(node.settings, index) as frame_service,
    ):
        access = node_access(node)
        data = data_services(node, access, frames)
        mesh = peer_services(node, backed)
        deps = server_services(node, access, data, mesh, audit, backed)
        start_periodic_tasks(
            [*process_tasks(node, reporter), PeriodicTask("keyuse", 60.0, lambda: _save_key_usage(node))],
            background,
        )
        if node.rebalance_socket is not None:
            background.spawn(measure_loop_delay(node.clock, index + 1), "waits")
        native = native_routes(
            node, access, data, mesh.broadcast.broadcast, backed.cache_manager, frame_service
        )
        routes = health_routes(
            trouble,
            lambda: node.mesh.current_map().version,
            node.clock,
            legacy_metric_names=node.settings.legacy_metric_names,
            exemplars=node.settings.tracing is not None,
        )
        routes += native + admin_routes(node, deps.sessions) + mesh.routes()
        routes.append(openapi_route(routes, node.clock))
        if sockets.tls is not None:
            start_periodic_tasks([_tls_refresh_task(sockets.tls)], background)
        _handle_sighup(audit, sockets.tls)
        await _serve(deps, routes, sockets, index, reporter)
        await background.aclose()
        if deps.web_identity is not None:
            await deps.web_identity.aclose()
        if deps.cold_reader is not None:
            await deps.cold_reader.aclose()
        await _save_key_usage(node)


async def _save_key_usage(node: NodeContext) -> None:
    await node.key_usage.save(node.clock.now_ms(), node.identities.principal_names())


@asynccontextmanager
async def _frame_source(
    node: NodeContext, backed: BackedBucketService, sockets: ListenSockets
) -> AsyncIterator[FrameSource]:
    if node.settings.workers == 1:
        async with start_coordinator(node, backed, sockets.coordinator) as assembler:
            yield assembler
        return
    remote = AssemblerClient(node.settings.coordinator_socket)
    try:
        yield remote
    finally:
        await remote.aclose()


@asynccontextmanager
async def _audit_log(settings: NodeSettings) -> AsyncIterator[AuditLog | None]:
    """Open the audit log, if it is configured."""
    if settings.audit_log is None:
        yield None
        return
    audit = AuditLog(settings.audit_log, rotation=Rotation(settings.audit_bytes, settings.audit_files))
    try:
        yield audit
    finally:
        audit.close(_AUDIT_TIMEOUT)


def _handle_sighup(audit: AuditLog | None, tls: ServerTls | None) -> None:
    """Reopen the audit log and reload the TLS pair on SIGHUP."""
    loop = asyncio.get_running_loop()

    def again() -> None:
        if audit is not None:
            audit.reopen()
        if tls is not None:
            loop.run_in_executor(None, partial(tls.reload_if_changed, anyway=True))

    loop.add_signal_handler(signal.SIGHUP, again)


def _tls_refresh_task(tls: ServerTls) -> PeriodicTask:
    return PeriodicTask("tls", 1.0, lambda: asyncio.to_thread(tls.reload_if_changed))


async def _serve(
    deps: ServerServices, routes: list[HttpRoute], sockets: ListenSockets, index: int, reporter: ChildReporter
) -> None:
    http = deps.http
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = build_server(deps, routes)
    options = tls_listen_options(sockets.tls, http.head_timeout)
    acceptor = Acceptor(sockets.http, server, sockets.tally, index, options)
    reporter.report_ready()
    await stop.wait()
    acceptor.close()
    await acceptor.wait_for_handshakes()
    await drain_server(server, deps.clock, http.drain_timeout)
    flush_request_counters()
