"""An index that could not be read: a mark in the data directory, until somebody has looked at it.

Law: a store so marked is not opened by a daemon. Reading the whole index takes the mark away; where that
cannot be done, the index has to be made anew.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.store.errors import FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.config import StoreSettings

_MARK: Final = "index-unreadable"


def advice(index: Path) -> str:
    """What to do about it."""
    return (
        f"the index at {index} cannot be read from its device (see the kernel log): put it on a sound one "
        "and run meshd fsck --rebuild with all data disks, or, in a mesh, begin this node anew with empty "
        "ones; if the device is in order again, run meshd fsck, and start the node"
    )


def check_readable(settings: StoreSettings) -> None:
    """Raises FormatError where the mark is."""
    if (settings.data_dir / _MARK).exists():
        raise FormatError(advice(settings.index_dir))


def mark_unreadable(settings: StoreSettings) -> None:
    """As far as the data directory can be written (blocking)."""
    with suppress(OSError):
        (settings.data_dir / _MARK).write_text(advice(settings.index_dir) + "\n")


def mark_readable(settings: StoreSettings) -> None:
    """All of it was read, or made anew (blocking)."""
    with suppress(OSError):
        (settings.data_dir / _MARK).unlink(missing_ok=True)
