"""Reserves on file systems that do not tell their size: a file in each directory, of bytes that nobody needs.

Law: puts leave room for deletes and for growth of the index. Where the free bytes are unknown, that room is
this file. It is removed when a write meets ENOSPC; while it is missing, nothing that needs space is accepted.
It is made again when there is room for it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from meshd.util.disk_space import measure_disk_space

if TYPE_CHECKING:
    from collections.abc import Iterable

RESERVE_BYTES: Final = 4 << 20
_NAME: Final = "reserve"
_PIECE: Final = 1 << 20


def has_reserve(directory: str) -> bool:
    """Returns True if the reserve of this directory was not used up."""
    return os.path.exists(f"{directory}/{_NAME}")


def release_reserves(directories: Iterable[str]) -> None:
    """Removes the reserves, because a file system is full. Those whose free bytes are known have none."""
    for directory in directories:
        with suppress(OSError):
            os.unlink(f"{directory}/{_NAME}")


def make_reserves(directories: Iterable[str]) -> bool:
    """Makes the reserves that are missing (blocking); returns False if one cannot be made, mostly because
    there is no room for it."""
    made = True
    for directory in directories:
        try:
            if not has_reserve(directory) and not measure_disk_space(directory).is_known:
                _make(directory)
        except OSError:
            made = False
    return made


def _make(directory: str) -> None:
    draft = Path(directory) / f"{_NAME}.new"
    try:
        with draft.open("wb") as file:
            for _ in range(RESERVE_BYTES // _PIECE):
                file.write(os.urandom(_PIECE))  # not zeros, which some file systems do not store
            file.flush()
            os.fdatasync(file.fileno())  # or a write that comes later is told that it is full
        draft.rename(draft.with_name(_NAME))
    except OSError:
        draft.unlink(missing_ok=True)
        raise
