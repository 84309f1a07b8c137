"""Preloads what sendfile sends next: has threads read the pages, so that sending does not wait for a disk."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.server.direct_sender import is_resident
from meshd.store.errors import DiskFailedError
from meshd.store.integrity.verification import report_damage
from meshd.telemetry import tracing
from meshd.util.page_cache import is_absent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.store.disks.cold_reads import ColdRead, ColdReader
    from meshd.store.records import Span

WINDOW: Final = 1 << 20
"""Bytes per sendfile call and per read of a thread; other connections get their turn in between."""


async def load_first_window(spans: Sequence[Span], reader: ColdReader | None) -> ColdRead | None:
    """Load what the first call of sendfile sends of a body: a failing device is found before the head is
    sent. Returns what goes on reading the rest from a rotational disk, which the caller must close; None if
    nothing does. Raises DiskFailedError."""
    first = next((span for span in spans if span.length), None)
    if first is None:
        return None
    size = min(first.length, WINDOW)
    try:
        begun = None
        if reader is not None and is_absent(first.fd, first.offset):
            begun = reader.begin(spans)
        if begun is None:
            await load_into_page_cache((first.sub_span(0, size),))
            return None
        try:
            with tracing.stage("disk read"):
                await begun.until(size)
        except BaseException:
            begun.close()
            raise
    except OSError as error:
        raise _disk_error((first,), error) from error
    return begun


async def load_into_page_cache(spans: Sequence[Span]) -> None:
    """Have a thread read cold pages, so that reading `spans` next does not wait for a disk. Raises
    DiskFailedError."""
    loop = asyncio.get_running_loop()
    try:
        with tracing.stage("disk read"):
            for span in spans:
                if span.length and not is_resident(span.fd, span.offset, span.length):
                    await loop.run_in_executor(
                        None, read_pages, span.fd, span.offset, span.length, span.length
                    )
    except OSError as error:
        raise _disk_error(spans, error) from error


def _disk_error(spans: Sequence[Span], error: OSError) -> DiskFailedError:
    for span in spans:
        if span.extent is not None:
            report_damage(span.extent)
    return DiskFailedError(f"the disk failed: {error.strerror}")


def read_pages(fd: int, offset: int, length: int, advice: int) -> None:
    """Read `length` bytes into the page cache, and ask for `advice` bytes: never more than are sent, because
    what follows in the file belongs to other objects (blocking). Raises OSError."""
    with suppress(OSError):
        os.posix_fadvise(fd, offset, advice, os.POSIX_FADV_WILLNEED)
    os.pread(fd, length, offset)
