"""Coordinator process: work that a node does once, not once per worker (batches, periodic tasks).

Workers reach it only through its Unix socket, so it can run in a process of its own or inside the only
worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import uvloop

from meshd.batches.assembly.assembler import Assembler
from meshd.batches.assembly.assembler_client import serve_assembler
from meshd.batches.read_ahead.read_waits import ReadWaits
from meshd.batches.warm_up.node_task import warm_ups
from meshd.jobs.relayout.node_task import relayouts
from meshd.origins.access_hints import PlanReadHints
from meshd.process.periodic_tasks import coordinator_tasks, process_tasks, start_periodic_tasks
from meshd.process.rebalance_process import rebalance_socket
from meshd.process.wiring.cache import cache_manager, cache_tasks
from meshd.process.wiring.cluster import join_and_maintain, scrub_scheduler
from meshd.process.wiring.data_services import (
    data_services,
    job_runner,
    node_catalog,
    read_scheduler,
    relayout_context,
    stored_sequences,
    warm_up_context,
)
from meshd.process.wiring.decoded_cache import decoded_cache_tasks, open_decoded_cache
from meshd.process.wiring.node_context import node_access, node_origins, open_node
from meshd.process.wiring.services import view_reader
from meshd.telemetry import logs
from meshd.telemetry.span_export import start_tracing, stop_tracing
from meshd.transform.pool import TransformPool
from meshd.transform.resource_limits import keep_heap
from meshd.util.async_tasks import BackgroundTasks

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Coroutine

    from meshd.config import NodeSettings
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.process.child_process import ChildReporter
    from meshd.process.listen_sockets import ListenSockets
    from meshd.process.wiring.node_context import NodeContext

_log = logging.getLogger("meshd.coordinator")
_MEMORY: Final = 64 << 20
"""Bytes, of which malloc keeps an eighth: the arrays of a batch are as large as those of the one before."""


def run_coordinator(settings: NodeSettings, sockets: ListenSockets, reporter: ChildReporter) -> None:
    """Run the coordinator as a process of its own, from start to end."""
    logs.configure(settings.log_format, settings.log_level, "coordinator")
    logs.follow_runtime_level(settings.log_level)
    start_tracing(settings.tracing, settings.node_id, "coordinator")
    keep_heap(_MEMORY)
    with (
        open_node(settings, "s", rebalance_socket(settings)) as node,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_run_until_stopped(node, sockets.coordinator, reporter))
    stop_tracing()


async def _run_until_stopped(node: NodeContext, listener: socket.socket, reporter: ChildReporter) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    background = BackgroundTasks("periodic tasks")
    async with node_origins(node).run() as backed, start_coordinator(node, backed, listener):
        start_periodic_tasks(process_tasks(node, reporter), background)
        reporter.report_ready()
        await stop.wait()
    await background.aclose()


@asynccontextmanager
async def start_coordinator(
    node: NodeContext, backed: BackedBucketService, listener: socket.socket
) -> AsyncIterator[Assembler]:
    """Run the coordinator's work in this process for the length of the block; yields its assembler."""
    tasks, settings = BackgroundTasks("coordinator"), node.settings
    decoded = await open_decoded_cache(settings, node.clock, node.buckets.decoded_quota)
    sockets = [settings.transform_socket(index) for index in range(settings.transform.processes)]
    pool = TransformPool(sockets, decoded)
    pool.start()
    try:
        tasks.spawn(scrub_scheduler(node, await join_and_maintain(node, tasks)).run(), "scrubber")
        manager = cache_manager(node)
        tasks.spawn(_vital(manager.serve(settings.cache_manager_socket)), "cache manager")
        hints = PlanReadHints(manager, node.buckets)
        read_ahead = read_scheduler(node, decoded)
        assembler = Assembler(
            node.store,
            pool,
            settings.transform,
            node.archives,
            node=settings.node_id,
            remote=node.objects,
            catalog=node_catalog(node),
            hints=[hints],
            read_ahead=read_ahead,
            stored=stored_sequences(node),
        )
        warm_up = warm_ups(warm_up_context(node, pool, decoded, read_ahead))
        relayout = relayouts(relayout_context(node))
        others = [warm_up.register, relayout.register]
        if read_ahead is not None:
            others.append(ReadWaits(read_ahead).register)
        tasks.spawn(_vital(serve_assembler(assembler, listener, others)), "assembler")
        periodic = [*coordinator_tasks(node), *cache_tasks(node, manager, backed)]
        start_periodic_tasks([*periodic, *decoded_cache_tasks(decoded)], tasks)
        access = node_access(node)
        views = view_reader(node, access, data_services(node, access, assembler))
        jobs = job_runner(node, access, views, backed, warm_up, relayout)
        tasks.spawn(_vital(jobs.run()), "jobs")
        try:
            yield assembler
        finally:
            await tasks.aclose()
            await warm_up.aclose()
            await relayout.aclose()
            await hints.aclose()
            if read_ahead is not None:
                await read_ahead.aclose()
            await assembler.aclose()
    finally:
        await tasks.aclose()
        await pool.aclose()
        listener.close()


async def _vital(work: Coroutine[Any, Any, None]) -> None:
    """Run work that this process cannot do without: if it fails, the process exits and is replaced."""
    try:
        await work
    except Exception:
        _log.exception("an essential task failed; restarting this process")
        os.kill(os.getpid(), signal.SIGTERM)
