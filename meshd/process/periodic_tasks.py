"""Periodic tasks: small jobs that run repeatedly while a node runs.

A task that fails is logged and retried; it never ends its process. A task that moves data rests as long as
it worked, so that clients keep at least half of the disk bandwidth.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from meshd.cluster.clock_skew import compare_clocks
from meshd.cluster.peer_checks import survey_peers
from meshd.config.options import cores
from meshd.control.control_api import ControlError
from meshd.datasets.archives.background_indexer import BackgroundIndexer
from meshd.documents.garbage_collector import (
    DamagedDocuments,
    DocumentCollector,
    IndexCollector,
    is_collector_leader,
)
from meshd.objects.buckets.lifecycle_runner import LifecycleRunner
from meshd.objects.buckets.service import ChangeBroadcast
from meshd.process import memory_usage
from meshd.process.wiring.cluster import (
    quarantine_damaged,
    replace_disks,
    stop_after_lost_sync,
    watch_disks,
)
from meshd.process.wiring.data_services import node_catalog
from meshd.process.wiring.services import document_inventory, document_references
from meshd.store.disks.disk_type import RotationalDisks
from meshd.store.disks.layout import has_free_space, is_on_disk
from meshd.store.disks.reserve_files import make_reserves
from meshd.store.engine.checkpointer import LostSyncError
from meshd.store.errors import ExhaustedError, StoreError, is_exhausted
from meshd.telemetry import metrics
from meshd.telemetry.activity import INTERVAL, ActivityHistory, collect_history
from meshd.transform.parquet.reader_template import take_unused_template
from meshd.util import shared_counters
from meshd.util.async_tasks import sleep_to_tick
from meshd.util.clock_jumps import SETTLE_SECONDS, ClockWatch
from meshd.util.disk_space import measure_disk_space
from meshd.views.transform_results import ResultEvictor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.cluster.clock_skew import ClockComparison
    from meshd.config import StoreSettings
    from meshd.process.child_process import ChildReporter
    from meshd.process.wiring.node_context import NodeContext
    from meshd.store.store import Store
    from meshd.util.async_tasks import BackgroundTasks
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.periodic_tasks")
_ROLES = ("supervisor", "worker", "coordinator", "transform", "rebalancer")
_SURVEYED = 64  # peers at a time: all of 10,000 nodes would make 3 million connections a second
_CHECKPOINTS_PER_INTERVAL = 2  # so that one that takes long is still in time
_SAY_AGAIN = 60.0  # seconds until a failure that goes on is logged again: some tasks run four times a second
_COMPACTION_SHARE = 0.5  # below this share of dead bytes, a rewrite costs more than it frees
_COMPACTION_SHARE_WHEN_FULL = 0.2  # costs do not matter then


class PeriodicTask(msgspec.Struct, frozen=True):
    """A task that is run, and run again `every` so many seconds after it ended, or up to a tick earlier."""

    name: str
    every: float
    run: Callable[[], Awaitable[object]]


def start_periodic_tasks(periodic: list[PeriodicTask], tasks: BackgroundTasks) -> None:
    """Run these tasks until `tasks` is closed."""
    for task in periodic:
        tasks.spawn(_repeat(task), task.name)


def process_tasks(node: NodeContext, reporter: ChildReporter) -> list[PeriodicTask]:
    """Return the tasks of every process that has a store."""

    async def tidy() -> None:
        node.store.close_deleted_files()

    async def beat() -> None:
        reporter.report_alive()

    async def look() -> None:
        node.mesh.current_map()  # the node waits until its slowest process has adopted a new map

    async def end_unused_template() -> None:
        if (template := take_unused_template()) is not None:
            await asyncio.to_thread(template.close)

    return [
        PeriodicTask("tidy", 10.0, tidy),
        PeriodicTask("parquet", 30.0, end_unused_template),
        PeriodicTask("index", 1.0, lambda: leave_unusable_index(node.store)),
        PeriodicTask("heartbeat", node.settings.hang_timeout / 10, beat),
        PeriodicTask("map", 0.5, look),
        PeriodicTask("damage", 0.25, lambda: quarantine_damaged(node)),
    ]


async def leave_unusable_index(store: Store) -> None:
    """End this process if it cannot use the index any more, after a failed sync of a meta page. Its successor
    can."""
    if not store.disk_health.index_is_usable:
        _log.critical("this process can no longer use the index and is replaced: see the kernel log")
        os.kill(os.getpid(), signal.SIGKILL)


def coordinator_tasks(node: NodeContext) -> list[PeriodicTask]:
    """Return the tasks that run once per node, in the coordinator."""
    settings = node.settings
    watch = ClockWatch(node.clock, settings.clock_file)

    async def look_at_clock() -> None:
        watch.is_settling()

    def unless_settling(remove: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
        async def run() -> None:
            if not watch.is_settling():
                await remove()

        return run

    lifecycle = LifecycleRunner(
        node.store,
        node.replicated_store,
        node.buckets,
        node.control,
        node.clock,
        settings.stale_upload_days,
        node.mesh,
        settle_seconds=SETTLE_SECONDS,
        watch=watch,
    )
    results = ResultEvictor(node.store, node.last_used, settings.view_cache_bytes)
    indexer = BackgroundIndexer(
        node.store, node.archives, lambda: _bucket_names(node), results.free_bytes, node.clock
    )
    node.store.compactor.first_copies = lambda bucket: _first_copies(node, bucket)
    documents, history = document_collector(node, watch), ActivityHistory(settings.activity_file)
    indexes = IndexCollector(node.store, node.last_used, node.clock)
    return [
        PeriodicTask("clock", 60.0, look_at_clock),
        PeriodicTask("indexes of files", 6 * 3600.0, unless_settling(indexes.sweep)),
        PeriodicTask("documents", 6 * 3600.0, documents.sweep),
        PeriodicTask("damaged documents", 0.5, DamagedDocuments(node.store).remove),
        PeriodicTask("removed documents", 30.0, documents.remove_local_copies),
        PeriodicTask("measure documents", 300.0, lambda: asyncio.to_thread(documents.update_gauges)),
        PeriodicTask("archives", 1.0, indexer.index_queued),
        PeriodicTask("archive indexes", 6 * 3600.0, indexer.remove_orphans),
        PeriodicTask("view results", 60.0, results.evict_results),
        PeriodicTask("lifecycle", settings.lifecycle_interval, lifecycle.sweep),
        PeriodicTask("activity", INTERVAL, lambda: asyncio.to_thread(record_activity, history, node.clock)),
        PeriodicTask("measure", 15.0, lambda: asyncio.to_thread(measure_store, node)),
        PeriodicTask("memory", 15.0, lambda: asyncio.to_thread(measure_memory)),
        PeriodicTask("others", 30.0, PeerMeasurement(node).measure),
        PeriodicTask("disks", 5.0, lambda: watch_disks(node)),
        PeriodicTask("gone disks", 0.5, lambda: replace_disks(node)),
        PeriodicTask("reserves", 15.0, lambda: asyncio.to_thread(make_reserves, _store_directories(node))),
        PeriodicTask("compact", 60.0, lambda: compact(node.store, node.clock)),
        PeriodicTask("removals", 3600.0, unless_settling(node.store.compactor.prune_tombstones)),
        *checkpoint_tasks(node),
    ]


def checkpoint_tasks(node: NodeContext) -> list[PeriodicTask]:
    """Return the tasks that bound what a power cut takes from stores without syncs."""
    stores = [(node.store, node.settings.store)]
    if node.cache_store is not None:
        stores.append((node.cache_store.cache, node.settings.cache_store))

    def take(store: Store, family: int) -> Callable[[], Awaitable[object]]:
        async def run() -> None:
            try:
                await asyncio.to_thread(store.checkpointer.take)
            except LostSyncError as error:
                if store is node.store:
                    await stop_after_lost_sync(node, error)
                else:
                    _log.error(
                        "a sync of the cache failed: it is empty after a restart",
                        extra={"why": str(error)},
                    )
                    await asyncio.to_thread(store.checkpointer.abandon)
            else:
                shared_counters.record_checkpoint(family, store.checkpointer.synced_before)

        return run

    return [
        PeriodicTask(
            "checkpoint", settings.sync_seconds / _CHECKPOINTS_PER_INTERVAL, take(store, settings.family)
        )
        for store, settings in stores
        if store.checkpointer.needed
    ]


def document_collector(node: NodeContext, watch: ClockWatch | None = None) -> DocumentCollector:
    """Return the collector of unused plans, snapshots and the documents that they name."""
    settings = node.settings
    return DocumentCollector(
        node.store,
        node_catalog(node),
        document_inventory(node),
        node.removals,
        lambda: (text for _, text in document_references(node)),
        node.clock,
        lambda: is_collector_leader(node.mesh),
        announce=ChangeBroadcast(node.control, node.mesh, node.peers, settings.workers).broadcast,
        days=settings.keep_documents_days,
        tombstone_ttl_ms=int(1000 * settings.tombstone_ttl),
        settle_seconds=SETTLE_SECONDS,
        watch=watch,
    )


def _store_directories(node: NodeContext) -> list[str]:
    stores = [node.settings.store] + ([] if node.cache_store is None else [node.settings.cache_store])
    return [str(each) for settings in stores for each in (settings.index_dir, *settings.disks)]


def _bucket_names(node: NodeContext) -> list[str]:
    return [bucket.name for bucket in node.buckets.list_all()]


async def _repeat(task: PeriodicTask) -> None:
    clock = asyncio.get_running_loop().time
    known, said_at = "", 0.0
    while True:
        try:
            await task.run()
            known = ""
        except Exception as error:
            if repr(error) != known or clock() - said_at >= _SAY_AGAIN:
                known, said_at = repr(error), clock()
                _report_failure(task.name, error)
        await sleep_to_tick(task.every)


def _report_failure(name: str, error: Exception) -> None:
    fields = {"task": name, "why": str(error)}
    if isinstance(error, ControlError):
        _log.warning("a periodic task is postponed: the control store cannot be used", extra=fields)
    elif _lacks_resources(error):
        _log.warning("a periodic task is postponed: out of file descriptors or memory", extra=fields)
    else:
        _log.error("a periodic task failed; it will be retried", extra={"task": name}, exc_info=error)


def _lacks_resources(error: Exception) -> bool:
    return isinstance(error, ExhaustedError) or (isinstance(error, OSError) and is_exhausted(error))


def measure_store(node: NodeContext) -> None:
    """Publish the store's size as metrics."""
    stats, checkpointer = node.store.stats(), node.store.checkpointer
    if checkpointer.needed:
        metrics.store_unsynced_seconds.set(node.clock.monotonic() - checkpointer.synced_before)
    metrics.store_objects.set(stats.objects)
    metrics.store_versions.set(stats.versions)
    metrics.store_uploads.set(stats.uploads)
    metrics.store_quarantined.set(stats.quarantined)
    metrics.store_live_bytes.set(stats.live_bytes)
    metrics.store_dead_bytes.set(stats.dead_bytes)
    metrics.store_index_map_bytes.set(stats.index_map_bytes)
    metrics.store_index_map_free_bytes.set(max(0, stats.index_map_free_bytes))
    for disk in node.settings.store.disks:
        with suppress(OSError):  # the disk fails: the health probes report it
            space = measure_disk_space(disk)
            if space.is_known:
                metrics.store_disk_free_bytes.labels(str(disk)).set(space.free)
                metrics.store_disk_bytes.labels(str(disk)).set(space.usable)
                metrics.store_disk_refuses_writes.labels(str(disk)).set(not has_free_space(str(disk), 0))
                turns = RotationalDisks(node.settings.store.disk_type).any_of([disk])
                metrics.store_disk_rotational.labels(str(disk)).set(turns)
    with suppress(OSError):
        _measure_index(node.settings.store)
    metrics.frame_cache_limit.set(node.settings.transform.frame_cache_bytes)


def _measure_index(settings: StoreSettings) -> None:
    path = settings.index_dir
    if not is_on_disk(path, settings.disks) and (space := measure_disk_space(path)).is_known:
        metrics.store_index_free_bytes.labels(str(path)).set(space.free)
        metrics.store_index_file_system_bytes.labels(str(path)).set(space.usable)


def measure_memory() -> None:
    """Publish the memory and the processors of the machine, and the memory of the node's processes.

    The parent is the supervisor.
    """
    found = memory_usage.memory_room()
    if found is not None:
        metrics.memory_free_bytes.set(found.free)
        metrics.memory_bytes.set(found.whole)
    metrics.cores.set(cores())
    sizes = memory_usage.resident_by_role(os.getppid())
    for role in _ROLES:
        metrics.process_memory_bytes.labels(role).set(sizes.get(role, 0))


def record_activity(history: ActivityHistory, clock: Clock) -> None:
    """Append what the node has counted to its history."""
    history.append(clock.now_ms(), collect_history())


class PeerMeasurement:
    """Publishes the number of peers whose certificates this node refuses, and this node's clock skew. Neither
    shows on connections that are already open. In a large mesh, it looks at others each time.

    Clocks that make nodes refuse each other's requests are logged when they are first seen to differ."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        self._logged: frozenset[str] = frozenset()

    async def measure(self) -> None:
        """Measure once."""
        node = self._node
        seen = await survey_peers(node.mesh, node.peers, node.clock, most=_SURVEYED)
        clocks = compare_clocks(seen.ahead)
        metrics.cluster_refused.set(len(seen.refused))
        metrics.cluster_clock_ahead.set(clocks.skew_of(node.mesh.node_id))
        self._log_skew(clocks)

    def _log_skew(self, clocks: ClockComparison) -> None:
        """Log each clock once for as long as it is wrong. One that was not looked at this time is kept."""
        wrong = clocks.refused()
        compared_with = "those of most nodes" if clocks.agree else f"that of {self._node.mesh.node_id}"
        for node_id, ahead in wrong.items():
            if node_id not in self._logged:
                _log.warning(
                    "the clock of node %s is %d s %s %s, so nodes refuse each other's requests",
                    node_id,
                    abs(ahead),
                    "ahead of" if ahead > 0 else "behind",
                    compared_with,
                )
        self._logged = (self._logged - clocks.ahead.keys()) | wrong.keys()


def _first_copies(node: NodeContext, bucket: str) -> bytes | None:
    """Return the slots of a bucket for which this node is the first to be asked; None: all."""
    slots = node.objects.slots_read_here(bucket, first_only=True)
    return None if slots is None else slots.tobytes()


async def compact(store: Store, clock: Clock) -> int:
    """Rewrite segments that are mostly dead, one after the other, and remove those emptied earlier. Returns
    how many were emptied now."""
    emptied = 0
    short = await asyncio.to_thread(store.compactor.is_short_of_space)
    for file in store.compactor.candidates(_COMPACTION_SHARE_WHEN_FULL if short else _COMPACTION_SHARE):
        began = clock.monotonic()
        try:
            emptied += await store.compactor.compact(file)
        except StoreError as error:
            _log.warning("a segment cannot be compacted", extra={"file": file, "why": str(error)})
        await asyncio.sleep(clock.monotonic() - began)
    await store.compactor.purge(store.checkpointer.synced_before)
    return emptied
