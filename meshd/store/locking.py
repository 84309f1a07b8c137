"""Who may touch a data directory.

Law: workers share the store's lock and hold one of their own name; recovery, fsck and rebuild hold it alone.
The kernel drops a lock with the process that held it: a crash leaves none behind.
"""

from __future__ import annotations

import fcntl
import os
import re
from typing import TYPE_CHECKING

from meshd.store.errors import StoreInUseError

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"[a-z0-9_-]{1,32}\Z")


def _hold(path: Path, kind: int, refusal: str) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise StoreInUseError(refusal) from None
    return fd


class Locks:
    """Held locks; `release` lets them go."""

    def __init__(self, *fds: int) -> None:
        self._fds = fds

    @classmethod
    def share(cls, data_dir: Path, writer: str) -> Locks:
        """A worker's locks. Raises StoreInUseError."""
        if not _NAME.match(writer):
            raise ValueError(f"a writer is called by 1–32 of a-z, 0-9, _ and -; not {writer!r}")
        busy = f"{data_dir} is being recovered or checked; wait until that has ended"
        shared = _hold(data_dir / "locks" / "store", fcntl.LOCK_SH, busy)
        try:
            mine = _hold(
                data_dir / "locks" / f"writer-{writer}",
                fcntl.LOCK_EX,
                f"another process writes to {data_dir} as {writer}; stop it or choose another name",
            )
        except BaseException:
            os.close(shared)
            raise
        return cls(shared, mine)

    @classmethod
    def alone(cls, data_dir: Path) -> Locks:
        """The lock of recovery and checking. Raises StoreInUseError."""
        return cls(
            _hold(
                data_dir / "locks" / "store",
                fcntl.LOCK_EX,
                f"{data_dir} is in use; stop the daemon on it first",
            )
        )

    def release(self) -> None:
        """Idempotent."""
        fds, self._fds = self._fds, ()
        for fd in fds:
            os.close(fd)

    def __enter__(self) -> Locks:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
