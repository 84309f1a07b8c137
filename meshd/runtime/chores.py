"""Chores: small work done again and again while a node runs.

Law: a chore that fails is logged and tried again; it never ends its process. A chore that moves data
rests as long as it worked, so that clients keep at least half of the disk.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshd.cluster.clocks import compared
from meshd.cluster.surveying import survey
from meshd.control.interface import ControlError
from meshd.runtime import memory
from meshd.runtime.data import node_catalog
from meshd.runtime.node import naming, node_census
from meshd.runtime.scrubbing import examine, replace_disks, watch_disks
from meshd.service.archives.ingesting import Indexer
from meshd.service.buckets.lifecycle import Lifecycle
from meshd.service.documents.collecting import DocumentKeeper, leads
from meshd.service.documents.indexes import IndexKeeper
from meshd.service.views.keeping import ResultKeeper
from meshd.store.errors import StoreError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.kit.clock import Clock
    from meshd.kit.tasks import Tasks
    from meshd.runtime.children import Reporter
    from meshd.runtime.node import Node
    from meshd.store.store import Store

_log = logging.getLogger("meshd.chores")
_ROLES = ("supervisor", "worker", "steward", "transform", "mover")
_DEAD_SHARE = 0.5  # below this, rewriting a segment costs more than the room it wins


@dataclass(frozen=True, slots=True)
class Chore:
    """`run` is awaited, then again `every` so many seconds later."""

    name: str
    every: float
    run: Callable[[], Awaitable[object]]


def start_chores(chores: list[Chore], tasks: Tasks) -> None:
    """Run these until the tasks are closed."""
    for chore in chores:
        tasks.spawn(_repeat(chore), chore.name)


def process_chores(node: Node, reporter: Reporter) -> list[Chore]:
    """What every process with a store has to do."""

    async def tidy() -> None:
        node.store.tidy()

    async def beat() -> None:
        reporter.alive()

    async def look() -> None:
        node.mesh.map()  # the node waits for the slowest of its processes to go by a new map

    return [
        Chore("tidy", 10.0, tidy),
        Chore("heartbeat", node.settings.hang_timeout / 10, beat),
        Chore("map", 0.5, look),
        Chore("damage", 0.25, lambda: examine(node)),
    ]


def node_chores(node: Node) -> list[Chore]:
    """What is done once a node: the steward's."""
    settings = node.settings
    lifecycle = Lifecycle(
        node.shared, node.buckets, node.control, node.clock, settings.stale_upload_days, node.mesh
    )
    results = ResultKeeper(node.store, node.uses, settings.view_cache_bytes)
    indexer = Indexer(node.store, node.archives, lambda: _bucket_names(node), results.room, node.clock)
    documents = document_keeper(node)
    indexes = IndexKeeper(node.store, node.uses, node.clock)
    return [
        Chore("indexes of files", 6 * 3600.0, indexes.sweep),
        Chore("documents", 6 * 3600.0, documents.sweep),
        Chore("removed documents", 30.0, documents.clear),
        Chore("measure documents", 300.0, lambda: asyncio.to_thread(documents.measure)),
        Chore("archives", 1.0, indexer.work),
        Chore("archive indexes", 6 * 3600.0, indexer.tidy),
        Chore("view results", 60.0, results.sweep),
        Chore("lifecycle", settings.lifecycle_interval, lifecycle.sweep),
        Chore("measure", 15.0, lambda: asyncio.to_thread(measure, node)),
        Chore("memory", 15.0, lambda: asyncio.to_thread(measure_memory)),
        Chore("others", 30.0, lambda: look_at_others(node)),
        Chore("disks", 5.0, lambda: watch_disks(node)),
        Chore("gone disks", 0.5, lambda: replace_disks(node)),
        Chore("compact", 60.0, lambda: compact(node.store, node.clock)),
        Chore("removals", 3600.0, node.store.forget_graves),
    ]


def document_keeper(node: Node) -> DocumentKeeper:
    """Of plans, snapshots and what they name."""
    settings = node.settings
    return DocumentKeeper(
        node.store,
        node_catalog(node),
        node_census(node),
        node.removals,
        lambda: (text for _, text in naming(node)),
        node.clock,
        lambda: leads(node.mesh),
        days=settings.keep_documents_days,
        memory_ms=int(1000 * settings.remember_removals),
    )


def _bucket_names(node: Node) -> list[str]:
    return [bucket.name for bucket in node.buckets.list_all()]


async def _repeat(chore: Chore) -> None:
    while True:
        try:
            await chore.run()
        except ControlError as error:
            _log.warning("chore has to wait", extra={"chore": chore.name, "why": str(error)})
        except Exception:
            _log.exception("chore failed; it is tried again", extra={"chore": chore.name})
        await asyncio.sleep(chore.every)


def measure(node: Node) -> None:
    """Put the store's size into the gauges."""
    stats = node.store.stats()
    metrics.store_objects.set(stats.objects)
    metrics.store_versions.set(stats.versions)
    metrics.store_uploads.set(stats.uploads)
    metrics.store_quarantined.set(stats.quarantined)
    metrics.store_live_bytes.set(stats.live_bytes)
    metrics.store_dead_bytes.set(stats.dead_bytes)
    for disk in node.settings.store.disks:
        with suppress(OSError):  # it fails: the probes say so
            room = os.statvfs(disk)
            metrics.store_disk_free_bytes.labels(str(disk)).set(room.f_bavail * room.f_frsize)
            metrics.store_disk_bytes.labels(str(disk)).set(room.f_blocks * room.f_frsize)


def measure_memory() -> None:
    """Put what the machine and the node's processes have into the gauges; the parent is the supervisor."""
    found = memory.room()
    if found is not None:
        metrics.memory_free_bytes.set(found.free)
        metrics.memory_bytes.set(found.whole)
    sizes = memory.residents(os.getppid())
    for role in _ROLES:
        metrics.process_memory_bytes.labels(role).set(sizes.get(role, 0))


async def look_at_others(node: Node) -> None:
    """Put what this node sees of the others' certificates and clocks into the gauges. Connections that are
    open hide both until they end."""
    seen = await survey(node.mesh, node.peers, node.clock)
    metrics.cluster_refused.set(len(seen.refused))
    metrics.cluster_clock_ahead.set(compared(seen.ahead).of(node.mesh.node_id))


async def compact(store: Store, clock: Clock) -> int:
    """Rewrite segments that are mostly dead, one after the other, and remove those emptied earlier; how many
    were emptied now."""
    emptied = 0
    for file in store.compactable(_DEAD_SHARE):
        began = clock.monotonic()
        try:
            emptied += await store.compact(file)
        except StoreError as error:
            _log.warning("a segment cannot be compacted", extra={"file": file, "why": str(error)})
        await asyncio.sleep(clock.monotonic() - began)
    await store.purge()
    return emptied
