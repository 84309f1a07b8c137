"""Directories whose names survive a power cut.

A file that was synced is there after a power cut, but its name only if its directory was synced, too.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def sync_directory(path: Path | str) -> None:
    """Make creations and removals of names in this directory durable (blocking). Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Create a directory and those above it that are missing, durably (blocking). Does nothing if it exists.
    Raises OSError, FileExistsError if it is a file."""
    if path.is_dir():
        return
    missing = [each for each in path.parents if not each.exists()]
    for each in (*reversed(missing), path):
        each.mkdir(mode, exist_ok=True)
        try:
            with suppress(PermissionError):  # a directory above that this user may not read
                sync_directory(each.parent)
        except OSError:
            with suppress(OSError):  # else the next call would find it, and not sync
                each.rmdir()
            raise
