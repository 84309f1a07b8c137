"""The data directory and the disks of a daemon: created, checked, and locked for its lifetime.

Nothing in the data directory is touched before its lock is held, and no disk before its own. The kernel holds
the locks (flock) and releases them when the last process of the daemon has ended, for whatever reason.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from meshd.config import ConfigError
from meshd.errors import DirectoryInUseError
from meshd.store.disks.file_systems import file_system_of, require_index_file_system
from meshd.store.errors import FormatError
from meshd.util.durable_directories import make_directory, sync_directory
from meshd.util.file_locks import ENDING_SECONDS, lock_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshd.config import NodeSettings, StoreSettings

_log = logging.getLogger("meshd.disks")
_MIN_FREE_BYTES = 2 << 20  # bytes


class DaemonLock:
    """Holds `<data_dir>/lock` and the directories of the disks. Children inherit them, so they are held until
    the last of them has ended."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / "lock"
        self._disks: list[int] = []
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take()
        except BaseException:
            os.close(self._fd)
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def __repr__(self) -> str:
        return f"<DaemonLock {self._path}>"

    def _take(self) -> None:
        if not lock_file(self._fd, fcntl.LOCK_EX, ENDING_SECONDS, lambda: not _alive(self._holder())):
            raise DirectoryInUseError(
                f"the data directory {self._path.parent} is in use by another meshd "
                f"(process {self._holder() or '?'}); stop that process, or choose another --data-dir"
            )

    def _holder(self) -> int:
        written = os.pread(self._fd, 32, 0).strip()
        return int(written) if written.isdigit() else 0

    def lock_disks(self, disks: Iterable[Path]) -> None:
        """Lock the directories of the disks: an empty one must not be put into service by two daemons. One
        that cannot be opened, or whose file system has no locks, is left to recovery. Raises
        DirectoryInUseError."""
        for disk in dict.fromkeys(disks):
            with suppress(OSError):
                fd = os.open(disk, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                self._disks.append(fd)
                if not lock_file(fd, fcntl.LOCK_EX, ENDING_SECONDS):
                    raise DirectoryInUseError(
                        f"the disk {disk} is in use by another meshd; stop that one, or remove {disk} from "
                        "--disk of one of them"
                    )

    def release(self) -> None:
        """Release the locks; another daemon gets them once the children have ended too."""
        for fd in (*self._disks, self._fd):
            os.close(fd)


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which is dead but not yet reaped by its parent, does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def prepare_data_dir(settings: NodeSettings) -> DaemonLock:
    """Create missing directories and take the lock. Raises ConfigError, DirectoryInUseError."""
    store, cache = settings.store, settings.cache_store
    for directory in (store.data_dir, store.index_dir):
        _create(directory)
    for disk in store.disks:
        _create(disk, is_disk=True)
    try:
        lock = DaemonLock(store.data_dir)
    except OSError as error:
        raise ConfigError(f"cannot write in {store.data_dir}: {error.strerror}") from error
    try:
        lock.lock_disks(store.disks)
        _require_free_space(store.data_dir)
        _move_cache_index(settings)
        for directory in (cache.data_dir, cache.index_dir):
            _create(directory)
        _check_file_systems(store)
        _create(settings.origin_credentials, writes=False)  # in Kubernetes a Secret, mounted read-only
        for disk in cache.disks:
            _create(disk, is_disk=True)
    except (ConfigError, DirectoryInUseError):
        lock.release()
        raise
    return lock


def _move_cache_index(settings: NodeSettings) -> None:
    """Move the cache's index to its place from where earlier releases have it. If that fails, as from another
    file system, the cache starts empty, and a warning names what nobody uses any more."""
    earlier, now = settings.earlier_cache_index, settings.cache_store.index_dir
    if earlier == now or now.exists() or not (earlier / "data.mdb").exists():
        return
    try:
        earlier.rename(now)
    except OSError as error:
        message = "the cache of origins starts empty; delete the directory of its earlier index"
        _log.warning(message, extra={"directory": str(earlier), "why": error.strerror})
        return
    with suppress(OSError):
        for each in (earlier.parent, now.parent):
            sync_directory(each)


def _check_file_systems(store: StoreSettings) -> None:
    """Log what weakens the promises of the disks. Raises ConfigError for an index where it cannot be."""
    for directory in dict.fromkeys((store.data_dir, store.index_dir, *store.disks)):
        found = file_system_of(directory)
        for weakness in [] if found is None else found.weaknesses:
            _log.warning("a mount option weakens promises", extra={"disk": str(directory), "why": weakness})
    if store.any_index_file_system:
        return
    for directory in dict.fromkeys((store.index_dir, store.data_dir)):  # the control store is an index, too
        try:
            require_index_file_system(directory)
        except FormatError as error:
            raise ConfigError(str(error)) from error


def _create(directory: Path, *, is_disk: bool = False, writes: bool = True) -> None:
    """Create a directory. Raises ConfigError; not for a failed disk, since recovery decides about those."""
    rights, lacking = (os.R_OK | os.W_OK | os.X_OK, "writable") if writes else (os.R_OK | os.X_OK, "readable")
    try:
        make_directory(directory, 0o700)
        usable = os.access(directory, rights) or (is_disk and _is_read_only(directory))
    except OSError as error:
        if is_disk and not isinstance(error, PermissionError):
            return
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"cannot create the directory {directory}: {why}") from error
    if not usable:
        raise ConfigError(f"the directory {directory} is not {lacking} by this user")


def _require_free_space(directory: Path) -> None:
    """Require space for the counters: they are memory-mapped files, and on a full file system SIGBUS would
    kill a process that counts."""
    probe = directory / f"room.{os.getpid()}"
    try:
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _MIN_FREE_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"cannot write in {directory}: {error.strerror}") from error
        raise ConfigError(
            f"{directory} is on a full file system: a node needs {_MIN_FREE_BYTES >> 20} MiB there to start; "
            "remove other"
            " files from it, or enlarge it (stored objects can be deleted once the node runs)"
        ) from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


def _is_read_only(directory: Path) -> bool:
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)
