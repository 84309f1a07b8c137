"""Reads the statistics pages of loaders.

Law: the text of a page comes from another process, perhaps another user's: a file that is not a valid page
is skipped, and unprintable characters are replaced.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from meshsdk.loader.stats_page import (
    CHECKSUM,
    FIGURES,
    FIGURES_OFFSET,
    HEAD,
    MAGIC,
    PREFIX,
    SIZE,
    Figures,
    Job,
    directory,
    is_running,
    pid_of_page,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_ATTEMPTS: Final = 50
_MOST: Final = 4096  # pages of a directory


def read_pages(places: list[Path] | None = None) -> Iterator[tuple[Job, Figures]]:
    """Yields the page of every loader whose process runs: this user's, and other users' if they are
    readable."""
    for place in _places() if places is None else places:
        with contextlib.suppress(OSError):
            for path in sorted(place.glob(f"{PREFIX}*"))[:_MOST]:
                pid = pid_of_page(path)
                found = read_page(path) if pid is not None and is_running(pid) else None
                if found is not None:
                    yield found


def _places() -> list[Path]:
    own = directory()
    shared = [*Path(tempfile.gettempdir()).glob("shardmesh-*"), *Path("/run/user").glob("*/shardmesh")]
    return list(dict.fromkeys([own, *shared]))


def read_page(path: Path) -> tuple[Job, Figures] | None:
    """Returns the present content of a page; None if the file is not a valid page."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        for _ in range(_ATTEMPTS):
            data = os.pread(descriptor, SIZE, 0)
            if len(data) != SIZE or not data.startswith(MAGIC):
                return None
            figures = data[FIGURES_OFFSET : FIGURES_OFFSET + FIGURES.size]
            (checksum,) = CHECKSUM.unpack_from(data, FIGURES_OFFSET + FIGURES.size)
            if checksum == crc32(figures):  # else the writer was in the middle of an update
                values = FIGURES.unpack(figures)
                return _describe_page(data, Figures(*values)) if all(map(math.isfinite, values)) else None
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _describe_page(data: bytes, figures: Figures) -> tuple[Job, Figures] | None:
    _, length = HEAD.unpack_from(data)
    try:
        document: Any = json.loads(data[HEAD.size : HEAD.size + min(length, FIGURES_OFFSET - HEAD.size)])
        pid, rank, world, batch = (int(document[name]) for name in ("pid", "rank", "world", "batch"))
        source, plan, name, host = (_plain(document[key]) for key in ("source", "plan", "name", "host"))
        job = Job(pid, rank, world, source, plan, batch, name, host, float(document["started"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
    return job, figures


def _plain(text: Any) -> str:
    """Replaces what a terminal would interpret."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:300])
