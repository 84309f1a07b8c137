"""The cache of buckets with origins in a node: its recovery, its manager, and its periodic tasks.

It never holds the only copy of anything, so a cache that cannot be read starts empty.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import closing, suppress
from itertools import chain
from typing import TYPE_CHECKING

from meshd.control.buckets import BucketTable
from meshd.control.factory import open_control
from meshd.origins.cache.cache_manager import CacheManager
from meshd.origins.client.origin_api import OriginError
from meshd.process.periodic_tasks import PeriodicTask
from meshd.process.wiring.node_context import node_cache_store
from meshd.store.disks.startup_recovery import is_set_back, recover
from meshd.store.engine.checkpointer import mark_clean
from meshd.store.errors import FormatError, StoreError
from meshd.store.replica.changes import VersionGone
from meshd.store.store import Store
from meshd.telemetry import metrics
from meshd.util.clock import SystemClock
from meshd.util.durable_directories import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from meshd.config import NodeSettings, StoreSettings
    from meshd.control.buckets import Bucket
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.process.wiring.node_context import NodeContext


_log = logging.getLogger("meshd.cache")
_CONCURRENCY = 8  # concurrent uploads of the write-back task
_PAGE = 1000


def recover_cache(settings: StoreSettings) -> None:
    """Clean up after a crash; start with an empty cache if its index cannot be trusted."""
    try:
        recover(settings, _skip_lost_disk)
    except FormatError as error:
        _log.warning("cannot read the cache: it starts empty", extra={"why": str(error)})
        _remove_all(settings)
        recover(settings, _skip_lost_disk)


def _skip_lost_disk(disk: Path, how: str) -> None:
    """Continue without the disk: the origins have everything that was cached on it."""
    _log.warning("the cache runs without a disk", extra={"disk": str(disk), "why": how})


def forget_writes_through(settings: NodeSettings) -> None:
    """Remove writes that were on their way through to an origin when the power failed, before anything serves
    or pushes them. Those that were acknowledged are at the origin, or it has what replaced them: the index,
    which is back at a checkpoint, no longer knows."""
    if not is_set_back(settings.store):
        return
    clock = SystemClock()
    with closing(open_control(settings, clock)) as control:
        backed = [bucket.name for bucket in BucketTable(control).list_all() if bucket.origin is not None]
    with closing(Store.open(settings.store, writer="s", clock=clock)) as store:
        number = asyncio.run(_forget_writes_through(store, backed))
    if number:
        _log.info("removed unfinished writes through to an origin", extra={"number": number})


async def _forget_writes_through(store: Store, buckets: Iterable[str]) -> int:
    number = 0
    for bucket in buckets:
        for key in chain.from_iterable(_stored_keys(store, bucket)):
            record = store.get_stored(bucket, key)
            if record is not None and record.through:
                await store.apply_change(VersionGone(bucket, key, "", record.stamp + 1))
                number += 1
    return number


def _stored_keys(store: Store, bucket: str) -> Iterator[list[str]]:
    """Return the keys of the objects of a bucket that are stored here permanently, page by page."""
    after, truncated = "", True
    while truncated:
        page = store.list_stored_entries(bucket, "", after, _PAGE)
        yield [entry.key for entry in page.entries]
        after, truncated = page.next_after, page.truncated


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


def cache_tasks(node: NodeContext, manager: CacheManager, backed: BackedBucketService) -> list[PeriodicTask]:
    """Return the coordinator's tasks for buckets with origins."""
    return [
        PeriodicTask("cache", 2.0, manager.sweep),
        PeriodicTask("write-back", 5.0, lambda: write_back_dirty(node, backed)),
    ]


async def write_back_dirty(node: NodeContext, backed: BackedBucketService) -> int:
    """Write objects to their origins that are not there yet; return how many remain. A node of a mesh that
    is back at a checkpoint first learns from the others what was written there since."""
    if node.store.disk_health.is_set_back and not node.mesh.single_node:
        return 0
    left, slots = 0, asyncio.Semaphore(_CONCURRENCY)
    for bucket in node.buckets.list_all():
        if bucket.origin is None:
            continue
        for keys in _stored_keys(node.store, bucket.name):
            own = [key for key in keys if node.mesh.is_primary(bucket.name, key)]
            wrong = [
                why
                for why in await asyncio.gather(*[_write_back(backed, bucket, k, slots) for k in own])
                if why
            ]
            if wrong:
                fields = {"bucket": bucket.name, "objects": len(wrong), "why": wrong[0]}
                _log.warning("objects could not be written to their origin", extra=fields)
            left += len(wrong)
    metrics.origin_dirty.set(left)
    return left


async def _write_back(backed: BackedBucketService, bucket: Bucket, key: str, slots: asyncio.Semaphore) -> str:
    """Write one object back; return why it failed, or "" on success."""
    async with slots:
        try:
            await backed.write_back(bucket, key)
        except (OriginError, StoreError) as error:
            return str(error)
    return ""
