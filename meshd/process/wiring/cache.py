"""The cache of buckets with origins in a node: its recovery, its manager, and its periodic tasks.

It never holds the only copy of anything, so a cache that cannot be read starts empty.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from meshd.origins.cache.cache_manager import CacheManager
from meshd.origins.client.origin_api import OriginError
from meshd.process.periodic_tasks import PeriodicTask
from meshd.process.wiring.node_context import node_cache_store
from meshd.store.disks.startup_recovery import recover
from meshd.store.engine.checkpointer import mark_clean
from meshd.store.errors import FormatError, StoreError
from meshd.telemetry import metrics
from meshd.util.directories import sync_directory

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.config import StoreSettings
    from meshd.control.buckets import Bucket
    from meshd.origins.service import BackedService
    from meshd.process.wiring.node_context import NodeContext


_log = logging.getLogger("meshd.cache")
_CONCURRENCY = 8  # concurrent uploads of the write-back task
_PAGE = 1000


def recover_cache(settings: StoreSettings) -> None:
    """Clean up after a crash; start with an empty cache if its index cannot be trusted."""
    try:
        recover(settings, _skip_lost_disk)
    except FormatError as error:
        _log.warning("the cache cannot be read: it starts empty", extra={"why": str(error)})
        _remove_all(settings)
        recover(settings, _skip_lost_disk)


def _skip_lost_disk(disk: Path, how: str) -> None:
    """Continue without the disk: the origins have everything that was cached on it."""
    _log.warning("the cache runs without a disk", extra={"disk": str(disk), "why": how})


def _remove_all(settings: StoreSettings) -> None:
    gone = [settings.index_dir, *(disk / "extents" for disk in settings.disks)]
    for directory in gone:
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # a lost disk
            sync_directory(directory.parent)
    settings.index_dir.mkdir(parents=True, exist_ok=True)
    mark_clean(settings)  # only now: a power cut before it repeats all this


def cache_manager(node: NodeContext) -> CacheManager:
    """Return the node's cache manager; one process runs it."""
    settings = node.settings
    return CacheManager(
        node_cache_store(node), node.buckets, settings.cache_bytes, settings.store.segment_bytes
    )


def cache_tasks(node: NodeContext, manager: CacheManager, backed: BackedService) -> list[PeriodicTask]:
    """Return the coordinator's tasks for buckets with origins."""
    return [
        PeriodicTask("cache", 2.0, manager.sweep),
        PeriodicTask("write-back", 5.0, lambda: write_back_dirty(node, backed)),
    ]


async def write_back_dirty(node: NodeContext, backed: BackedService) -> int:
    """Write objects to their origins that are not there yet; return how many remain."""
    left, slots = 0, asyncio.Semaphore(_CONCURRENCY)
    for bucket in node.buckets.list_all():
        if bucket.origin is None:
            continue
        after = ""
        while True:
            page = node.store.list_stored_entries(bucket.name, "", after, _PAGE)
            own = [entry.key for entry in page.entries if node.mesh.is_primary(bucket.name, entry.key)]
            wrong = [
                why
                for why in await asyncio.gather(*[_write_back(backed, bucket, k, slots) for k in own])
                if why
            ]
            if wrong:
                told = {"bucket": bucket.name, "objects": len(wrong), "why": wrong[0]}
                _log.warning("objects could not be written to their origin", extra=told)
            left += len(wrong)
            if not page.truncated:
                break
            after = page.next_after
    metrics.origin_dirty.set(left)
    return left


async def _write_back(backed: BackedService, bucket: Bucket, key: str, slots: asyncio.Semaphore) -> str:
    """Write one object back; return why it failed, or "" on success."""
    async with slots:
        try:
            await backed.write_back(bucket, key)
        except (OriginError, StoreError) as error:
            return str(error)
    return ""
