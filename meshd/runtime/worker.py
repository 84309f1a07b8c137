"""The body of an HTTP worker: serve the port until SIGTERM, then finish what runs.

Law: reports ready only when it accepts. After SIGTERM it accepts nothing new, lets requests finish within the
grace period, closes idle connections and ends with code 0.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from meshd.assembly.remote import RemoteAssembler
from meshd.kit.tasks import Tasks
from meshd.kit.yielding import tell_waits
from meshd.runtime.backing import backing
from meshd.runtime.carrying import mover_door
from meshd.runtime.chores import Chore, process_chores, start_chores
from meshd.runtime.data import data_services
from meshd.runtime.handing import handing
from meshd.runtime.node import admin_routes, meshing, native_routes, node_access, open_node, web_deps
from meshd.runtime.steward import steward
from meshd.telemetry import logs, verbosity
from meshd.telemetry.audit import AuditLog, Rotation
from meshd.web.accepting import Porter
from meshd.web.draining import drain
from meshd.web.ops import ops_routes
from meshd.web.server import build_server
from meshd.web.settling import count_now
from meshd.web.tls import listening_options

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from meshd.assembly.addressing import FrameSource
    from meshd.config import NodeSettings
    from meshd.runtime.children import Reporter
    from meshd.runtime.listening import Doors
    from meshd.runtime.node import Node
    from meshd.web.server import NativeRoute, WebDeps
    from meshd.web.tls import Tls

_AUDIT_PATIENCE = 2.0  # seconds for the last audit lines


def run_worker(
    settings: NodeSettings, index: int, doors: Doors, trouble: Callable[[], str], reporter: Reporter
) -> None:
    """Worker `index` from start to end. A lone worker is the steward too."""
    logs.configure(settings.log_format, settings.log_level, f"worker-{index}")
    verbosity.follow(settings.log_level)
    with (
        open_node(settings, f"w{index}", mover_door(settings)) as node,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_work(node, index, doors, trouble, reporter))


async def _work(node: Node, index: int, doors: Doors, trouble: Callable[[], str], reporter: Reporter) -> None:
    chores = Tasks("chores")
    async with (
        _frame_source(node, doors) as frames,
        _audit_log(node.settings) as audit,
        backing(node, index) as backed,
        handing(node.settings, index) as desk,
    ):
        access = node_access(node)
        data = data_services(node, access, frames)
        deps = web_deps(node, access, data, audit, backed)
        start_chores(
            [*process_chores(node, reporter), Chore("keyuse", 60.0, lambda: _save_use(node))], chores
        )
        if node.mover is not None:
            chores.spawn(tell_waits(node.clock, index + 1), "waits")
        native = native_routes(node, access, data, backed.keeper, desk)
        routes = [*ops_routes(trouble, lambda: node.mesh.map().version, node.clock), *native]
        routes += admin_routes(node, deps.sessions) + meshing(node, backed).routes()
        if doors.tls is not None:
            start_chores([_tls_chore(doors.tls)], chores)
        _heed_hangups(audit, doors.tls)
        await _serve(deps, routes, doors, index, reporter)
        await chores.aclose()
        await _save_use(node)


async def _save_use(node: Node) -> None:
    await node.use.save(node.clock.now_ms(), node.identities.keys())


@asynccontextmanager
async def _frame_source(node: Node, doors: Doors) -> AsyncIterator[FrameSource]:
    if node.settings.workers == 1:
        async with steward(node, doors.steward) as assembler:
            yield assembler
        return
    remote = RemoteAssembler(node.settings.steward_socket)
    try:
        yield remote
    finally:
        await remote.aclose()


@asynccontextmanager
async def _audit_log(settings: NodeSettings) -> AsyncIterator[AuditLog | None]:
    """The audit log, if there is to be one."""
    if settings.audit_log is None:
        yield None
        return
    audit = AuditLog(settings.audit_log, rotation=Rotation(settings.audit_bytes, settings.audit_files))
    try:
        yield audit
    finally:
        audit.close(_AUDIT_PATIENCE)


def _heed_hangups(audit: AuditLog | None, tls: Tls | None) -> None:
    """On SIGHUP, open the audit log and read the TLS pair anew."""
    loop = asyncio.get_running_loop()

    def again() -> None:
        if audit is not None:
            audit.reopen()
        if tls is not None:
            loop.run_in_executor(None, partial(tls.refresh, anyway=True))

    loop.add_signal_handler(signal.SIGHUP, again)


def _tls_chore(tls: Tls) -> Chore:
    return Chore("tls", 1.0, lambda: asyncio.to_thread(tls.refresh))


async def _serve(
    deps: WebDeps, routes: list[NativeRoute], doors: Doors, index: int, reporter: Reporter
) -> None:
    http = deps.http
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    server = build_server(deps, routes)
    options = listening_options(doors.tls, http.head_timeout)
    porter = Porter(doors.http, server, doors.tally, index, options)
    reporter.ready()
    await stop.wait()
    porter.close()
    await porter.settled()
    await drain(server, deps.clock, http.drain_timeout)
    count_now()
