"""The cache of buckets with origins in a node: its manager, and its periodic tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from meshd.origins.cache.cache_manager import CacheManager
from meshd.origins.client.origin_api import OriginError
from meshd.process.cache_recovery import stored_keys
from meshd.process.periodic_tasks import PeriodicTask
from meshd.process.wiring.node_context import node_cache_store
from meshd.store.errors import StoreError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket
    from meshd.origins.service import BackedService
    from meshd.process.wiring.node_context import NodeContext


_log = logging.getLogger("meshd.cache")
_CONCURRENCY = 8  # concurrent uploads of the write-back task


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
    """Write objects to their origins that are not there yet; return how many remain. A node of a mesh that
    is back at a checkpoint first learns from the others what was written there since."""
    if node.store.disk_health.is_set_back and not node.mesh.single_node:
        return 0
    left, slots = 0, asyncio.Semaphore(_CONCURRENCY)
    for bucket in node.buckets.list_all():
        if bucket.origin is None:
            continue
        for keys in stored_keys(node.store, bucket.name):
            own = [key for key in keys if node.mesh.is_primary(bucket.name, key)]
            wrong = [
                why
                for why in await asyncio.gather(*[_write_back(backed, bucket, k, slots) for k in own])
                if why
            ]
            if wrong:
                told = {"bucket": bucket.name, "objects": len(wrong), "why": wrong[0]}
                _log.warning("objects could not be written to their origin", extra=told)
            left += len(wrong)
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
