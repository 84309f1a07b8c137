"""A worker's desk for jobs on the same host.

Law: where it cannot be, the node serves as ever: over TCP.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from meshd.kit.tasks import Tasks
from meshd.web.handing import Desk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.config import NodeSettings

_log = logging.getLogger(__name__)


@asynccontextmanager
async def handing(settings: NodeSettings, index: int) -> AsyncIterator[Desk | None]:
    """The desk of worker `index`; None where it is switched off, or cannot be opened."""
    desk = _opened(settings, index)
    if desk is None:
        yield None
        return
    tasks = Tasks("handing")
    tasks.spawn(desk.run(), "desk")
    try:
        yield desk
    finally:
        await tasks.aclose()


def _opened(settings: NodeSettings, index: int) -> Desk | None:
    directory = settings.local_dir
    if directory is None:
        return None
    most = max(1, settings.transform.frame_cache_bytes // settings.workers)
    try:
        return Desk(directory, f"{settings.node_id}-{index}", most)
    except OSError as error:
        _log.warning("frames are not handed to jobs on this host: %s", error)
        return None
