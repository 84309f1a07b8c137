"""Guards of a data directory: process locks, and the marker of an index that could not be read.

Law: workers share the store lock and hold a lock of their own name; recovery, fsck and rebuild hold the
store lock exclusively. The kernel drops the locks of a dead process. The daemon does not open a store
that carries the marker; fsck removes it after reading the whole index, else the index must be rebuilt.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from meshd.store.errors import FormatError, StoreInUseError
from meshd.util.durable_directories import make_directory
from meshd.util.file_locks import lock_file

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.config import StoreSettings


_NAME = re.compile(r"[a-z0-9_-]{1,32}\Z")


def _hold(path: Path, kind: int, refusal: str, seconds: float = 0.0) -> int:
    make_directory(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    if lock_file(fd, kind, seconds):
        return fd
    os.close(fd)
    raise StoreInUseError(refusal)


class DataDirLock:
    """Holds file locks until `release`."""

    def __init__(self, *fds: int) -> None:
        self._fds = fds

    @classmethod
    def acquire_shared(cls, data_dir: Path, writer: str) -> DataDirLock:
        """Acquires the locks of a worker. Raises StoreInUseError."""
        if not _NAME.match(writer):
            raise ValueError(f"a writer name has 1–32 characters out of a-z, 0-9, _ and -; not {writer!r}")
        busy = f"{data_dir} is being recovered or checked; wait until that has ended"
        shared = _hold(data_dir / "locks" / "store", fcntl.LOCK_SH, busy)
        try:
            mine = _hold(
                data_dir / "locks" / f"writer-{writer}",
                fcntl.LOCK_EX,
                f"another process writes to {data_dir} as {writer}; stop it or choose another writer name",
            )
        except BaseException:
            os.close(shared)
            raise
        return cls(shared, mine)

    @classmethod
    def acquire_exclusive(cls, data_dir: Path, seconds: float = 0.0) -> DataDirLock:
        """Acquires the lock of recovery and checking, waiting so long for processes that end. Raises
        StoreInUseError."""
        return cls(
            _hold(
                data_dir / "locks" / "store",
                fcntl.LOCK_EX,
                f"{data_dir} is in use; stop its daemon first",
                seconds,
            )
        )

    def release(self) -> None:
        """Releases the locks. Idempotent."""
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> DataDirLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


_MARK: Final = "index-unreadable"


def recovery_advice(index: Path) -> str:
    """Returns the text that says what to do about an unreadable index."""
    return (
        f"the index at {index} cannot be read from its device (see the kernel log): move it to a healthy "
        "device and run meshd fsck --rebuild with all data disks or, in a mesh, start this node again with "
        "empty disks; if the device works again, run meshd fsck, then start the node"
    )


def require_readable_index(settings: StoreSettings) -> None:
    """Raises FormatError if the index is marked as unreadable."""
    if (settings.data_dir / _MARK).exists():
        raise FormatError(recovery_advice(settings.index_dir))


def mark_index_unreadable(settings: StoreSettings) -> None:
    """Marks the index as unreadable, if the data directory is writable (blocking)."""
    with suppress(OSError):
        (settings.data_dir / _MARK).write_text(recovery_advice(settings.index_dir) + "\n")


def clear_index_unreadable(settings: StoreSettings) -> None:
    """Removes the mark once the whole index was read or rebuilt (blocking)."""
    with suppress(OSError):
        (settings.data_dir / _MARK).unlink(missing_ok=True)
