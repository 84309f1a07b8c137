"""Wiring of the decoded cache: its size, which follows from the disk, and its periodic task."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Final

from meshd.process import memory_usage
from meshd.process.periodic_tasks import PeriodicTask
from meshd.store.disks.disk_type import RotationalDisks
from meshd.transform.decoded_cache.cache import DecodedCache
from meshd.transform.decoded_cache.segment_store import SegmentStore, free_spans, remove_file
from meshd.util.disk_space import measure_disk_space

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from meshd.config import NodeSettings
    from meshd.transform.decoded_cache.segment_store import Spans
    from meshd.util.clock import Clock

_log = logging.getLogger(__name__)
_SHARE_OF_DISK: Final = 4
_SHARE_OF_MEMORY: Final = 2
_FIT_SECONDS: Final = 2.0
_ROTATIONAL_RATE: Final = 150e6
"""Bytes a second that a rotational disk reads in sequence, on its average track."""


def default_bytes(directory: Path, *, rotational: bool) -> int:
    """Return how much is kept if no size is configured: a quarter of the free space, on a rotational disk at
    most half of the free memory (blocking).
    """
    size = measure_disk_space(directory).free_for_cache // _SHARE_OF_DISK
    memory = memory_usage.free_memory()
    return min(size, memory // _SHARE_OF_MEMORY) if rotational and memory is not None else size


def _is_rotational(settings: NodeSettings) -> bool:
    """Return whether decoded samples are on a rotational disk; `disk-type` says it of the store's disks."""
    own = settings.transform.decoded_cache_dir is None
    disks = RotationalDisks(settings.store.disk_type if own else "auto")
    return disks.any_of([settings.decoded_cache_dir])


async def open_decoded_cache(
    settings: NodeSettings, clock: Clock, quota: Callable[[str], int | None] = lambda bucket: None
) -> DecodedCache | None:
    """Return the node's empty decoded cache; None if it is switched off or has no directory.

    `quota`: returns that of a bucket; see `DecodedCache`.
    """
    loop = asyncio.get_running_loop()

    def remove(path: Path) -> None:
        loop.run_in_executor(None, remove_file, path)

    def free(spans: Spans) -> None:
        loop.run_in_executor(None, free_spans, spans)

    return await asyncio.to_thread(_open_cache, settings, clock, quota, remove, free)


def _open_cache(
    settings: NodeSettings,
    clock: Clock,
    quota: Callable[[str], int | None],
    remove: Callable[[Path], None],
    free: Callable[[Spans], None],
) -> DecodedCache | None:
    wanted, directory = settings.transform.decoded_cache_bytes, settings.decoded_cache_dir
    if wanted == 0:
        return None
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        rotational = _is_rotational(settings)
        limit = default_bytes(directory, rotational=rotational) if wanted is None else wanted
        segments = SegmentStore(directory, limit, remove, free)
        segments.clear()
        rate = _ROTATIONAL_RATE if rotational else math.inf
        cache = DecodedCache(segments, directory, clock.monotonic, rate, quota)
        for _ in cache.fit(*cache.measure_disk()):  # it is empty
            pass
    except OSError as error:
        _log.warning("cannot use the decoded cache: it is off", extra={"why": str(error)})
        return None
    return cache


def decoded_cache_tasks(cache: DecodedCache | None) -> list[PeriodicTask]:
    """Return the task that gives space back to the disk."""
    if cache is None:
        return []

    async def fit() -> None:
        for _ in cache.fit(*await asyncio.to_thread(cache.measure_disk)):
            await asyncio.sleep(0)  # others are served between the steps
        await cache.find_moved()

    return [PeriodicTask("decoded cache", _FIT_SECONDS, fit)]
