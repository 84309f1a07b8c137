"""The steward: what a node does once, not once a worker: assembling batches, and chores.

Law: workers reach it through its Unix socket only, so that it may live in a process of its own or in the lone
worker's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import uvloop

from meshd.assembly.assembler import Assembler
from meshd.assembly.serving import serve_assembler
from meshd.kit.tasks import Tasks
from meshd.runtime.backing import backing
from meshd.runtime.caching import cache_chores, cache_keeper
from meshd.runtime.carrying import mover_door
from meshd.runtime.chores import node_chores, process_chores, start_chores
from meshd.runtime.cluster import join
from meshd.runtime.data import data_services, node_catalog
from meshd.runtime.jobs import job_runner
from meshd.runtime.node import node_access, open_node, view_reader
from meshd.runtime.scrubbing import scrubber
from meshd.service.backed.planning import PlanHints
from meshd.telemetry import logs, verbosity
from meshd.transform.pool import TransformPool

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Coroutine

    from meshd.config import NodeSettings
    from meshd.runtime.children import Reporter
    from meshd.runtime.listening import Doors
    from meshd.runtime.node import Node

_log = logging.getLogger("meshd.steward")


def run_steward(settings: NodeSettings, doors: Doors, reporter: Reporter) -> None:
    """The steward as a process of its own, from start to end."""
    logs.configure(settings.log_format, settings.log_level, "steward")
    verbosity.follow(settings.log_level)
    with (
        open_node(settings, "s", mover_door(settings)) as node,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_until_told(node, doors.steward, reporter))


async def _until_told(node: Node, listener: socket.socket, reporter: Reporter) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    chores = Tasks("chores")
    async with steward(node, listener):
        start_chores(process_chores(node, reporter), chores)
        reporter.ready()
        await stop.wait()
    await chores.aclose()


@asynccontextmanager
async def steward(node: Node, listener: socket.socket) -> AsyncIterator[Assembler]:
    """The steward's work, running in this process for the length of the block; gives its assembler."""
    tasks, settings = Tasks("steward"), node.settings
    pool = TransformPool([settings.transform_socket(index) for index in range(settings.transform.processes)])
    pool.start()
    assembler = Assembler(
        node.store,
        pool,
        settings.transform,
        node.archives,
        node=settings.node_id,
        elsewhere=node.objects,
        catalog=node_catalog(node),
    )
    try:
        async with backing(node, None) as backed:
            tasks.spawn(scrubber(node, await join(node, tasks)).run(), "scrubber")
            tasks.spawn(_vital(serve_assembler(assembler, listener)), "assembler")
            keeper = cache_keeper(node)
            tasks.spawn(_vital(keeper.serve(settings.keeper_socket)), "keeper")
            hints = assembler.hints = PlanHints(keeper, node.buckets)
            start_chores([*node_chores(node), *cache_chores(node, keeper, backed)], tasks)
            access = node_access(node)
            views = view_reader(node, access, data_services(node, access, assembler))
            jobs = job_runner(node, access, views, backed)
            tasks.spawn(_vital(jobs.run()), "jobs")
            try:
                yield assembler
            finally:
                await tasks.aclose()
                await hints.aclose()
    finally:
        await tasks.aclose()
        await assembler.aclose()
        await pool.aclose()
        listener.close()


async def _vital(work: Coroutine[Any, Any, None]) -> None:
    """Work without which this process is of no use: when it fails, the process ends, and is replaced."""
    try:
        await work
    except Exception:
        _log.exception("work that must go on failed; restarting this process")
        os.kill(os.getpid(), signal.SIGTERM)
