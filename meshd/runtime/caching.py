"""The cache's store before and after the processes that use it, and the steward's work on it.

Law: relaxed writes may leave an index that a power cut has torn: after another boot without a clean stop the
cache begins empty. Nothing in it is the only copy.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from meshd.origin.errors import OriginError
from meshd.runtime.chores import Chore
from meshd.runtime.node import node_shelf
from meshd.service.caching.keeping import CacheKeeper
from meshd.store.errors import FormatError, StoreError
from meshd.store.preparing import recover
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from meshd.config import StoreSettings
    from meshd.control.buckets import Bucket
    from meshd.runtime.node import Node
    from meshd.service.backed.service import BackedService

_log = logging.getLogger("meshd.cache")
_AT_ONCE = 8  # uploads of write-back under way
_PAGE = 1000


def recover_cache(settings: StoreSettings) -> None:
    """Clean up after a crash; begin anew where that cannot be trusted."""
    mark, boot = settings.data_dir / "boot", _boot()
    told = mark.read_text() if mark.exists() else ""
    if told not in ("", "clean", boot):
        _log.warning("the machine went down without warning: the cache begins empty")
        _empty(settings)
    try:
        recover(settings, _do_without)
    except FormatError as error:
        _log.warning("the cache cannot be read and begins empty", extra={"why": str(error)})
        _empty(settings)
        recover(settings, _do_without)
    mark.write_text(boot)


def _do_without(disk: Path, how: str) -> None:
    """Whatever was cached on a disk that is gone, its origin has."""
    _log.warning("the cache does without a disk", extra={"disk": str(disk), "why": how})


def close_cache(settings: StoreSettings) -> None:
    """After the last process that used it has ended in order: it may be trusted after another boot."""
    from meshd.store.index import Index

    index = Index.open(settings)
    index.env.sync(True)
    index.close()
    (settings.data_dir / "boot").write_text("clean")


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _empty(settings: StoreSettings) -> None:
    shutil.rmtree(settings.index_dir, ignore_errors=True)
    for disk in settings.disks:
        shutil.rmtree(disk / "extents", ignore_errors=True)
    settings.index_dir.mkdir(parents=True, exist_ok=True)


def cache_keeper(node: Node) -> CacheKeeper:
    """The node's keeper: one process's."""
    settings = node.settings
    return CacheKeeper(node_shelf(node), node.buckets, settings.cache_bytes, settings.store.segment_bytes)


def cache_chores(node: Node, keeper: CacheKeeper, backed: BackedService) -> list[Chore]:
    """What the steward does for buckets with origins."""
    return [
        Chore("cache", 2.0, keeper.sweep),
        Chore("write-back", 5.0, lambda: push_dirty(node, backed)),
    ]


async def push_dirty(node: Node, backed: BackedService) -> int:
    """Bring to their origins what is not there yet; how many are left."""
    left, slots = 0, asyncio.Semaphore(_AT_ONCE)
    for bucket in node.buckets.list_all():
        if bucket.origin is None:
            continue
        after = ""
        while True:
            page = node.store.own_entries(bucket.name, "", after, _PAGE)
            own = [entry.key for entry in page.entries if node.mesh.is_decider(bucket.name, entry.key)]
            wrong = [
                why for why in await asyncio.gather(*[_push(backed, bucket, k, slots) for k in own]) if why
            ]
            if wrong:
                told = {"bucket": bucket.name, "objects": len(wrong), "why": wrong[0]}
                _log.warning("not at their origin", extra=told)
            left += len(wrong)
            if not page.truncated:
                break
            after = page.next_after
    metrics.origin_dirty.set(left)
    return left


async def _push(backed: BackedService, bucket: Bucket, key: str, slots: asyncio.Semaphore) -> str:
    """Why it is not there; "" when it is."""
    async with slots:
        try:
            await backed.push(bucket, key)
        except (OriginError, StoreError) as error:
            return str(error)
    return ""
