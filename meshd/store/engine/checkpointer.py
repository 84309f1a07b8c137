"""Takes checkpoints of a store with `durability: relaxed`: what was acknowledged before one is on disk.

Law: data before the index. A snapshot of the index is taken first, then the data files that it names as not
synced are synced, then its own pages, then it becomes the checkpoint. Only then are the files forgotten that
it no longer uses.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshd.store.disks.layout import Disks
from meshd.store.errors import FormatError
from meshd.store.index.checkpoint import (
    Checkpoint,
    read_checkpoint,
    read_meta_page,
    remove_checkpoint,
    restore_checkpoint,
    write_checkpoint,
)
from meshd.store.index.index import Index
from meshd.telemetry import metrics
from meshd.util.durable_directories import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.config import StoreSettings
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.store")
_MARK: Final = "boot"
_CLEAN: Final = "clean"
_SCHEME: Final = "checkpoints "
_LOST: Final = "sync-failed"
"""In the place of a boot id: the next start goes back to the checkpoint, on the same boot, too."""
REBUILD_DIRECTORY: Final = "rebuild"
"""Below the index: a new one that is being made of the data files."""
REBUILD_COMPLETE: Final = "complete"
"""An empty file there once the new index is whole and on disk."""


class LostSyncError(OSError):
    """A sync failed. What it should have made durable may be gone, even if a later sync succeeds: the kernel
    reports the loss of a page once, and then takes the page for clean."""


class Checkpointer:
    """Takes checkpoints of one store; used by one process of the node, the coordinator. `needed`: whether
    commits are not synced. `synced_before`: every write acknowledged before it (monotonic) is on disk.
    `lost`: why no checkpoint can be taken any more, until the store is opened again; None while they can."""

    def __init__(
        self, index: Index, disks: Disks, clock: Clock, settings: StoreSettings, *, needed: bool = False
    ) -> None:
        self._index, self._disks, self._clock, self._settings = index, disks, clock, settings
        self.needed = needed or settings.durability == "relaxed"
        self.lost: LostSyncError | None = None
        self._last: Checkpoint | None = None
        self._pin: Any = None
        self._lock = threading.Lock()
        self.synced_before = clock.monotonic() if self.needed else math.inf

    def __repr__(self) -> str:
        return f"<Checkpointer {self._index.path} {self._last.number if self._last else 'none'}>"

    def take(self) -> bool:
        """Make everything that is committed now durable (blocking); return whether there was something to do.
        Raises OSError, after which the checkpoint before is still the last one; LostSyncError if it stays the
        last one for good: the next start goes back to it."""
        if not self.needed:
            return False
        with self._lock:
            if self.lost is not None:
                raise self.lost
            began = self._clock.monotonic()
            transaction, meta, pin = self._snapshot()
            try:
                is_new = self._last is None or self._last.transaction != transaction
                if is_new:
                    synced = self._make_durable(pin, transaction, meta)
                    self._pin, pin = pin, self._pin
                    if synced:
                        with self._index.write_transaction() as txn:
                            self._index.files.forget_unsynced(txn, synced, transaction)
            finally:
                if pin is not None:
                    pin.abort()
            if is_new:
                self._index.env.reader_check()
            self.synced_before = began
            return is_new

    def _snapshot(self) -> tuple[int, bytes, Any]:
        """Return the last committed transaction, its meta page, and a read transaction on it."""
        env = self._index.env
        lock = env.begin(write=True)  # nothing commits meanwhile
        try:
            pin = env.begin()
            try:
                return pin.id(), read_meta_page(self._index.path, pin.id(), env.stat()["psize"]), pin
            except BaseException:
                pin.abort()
                raise
        finally:
            lock.abort()

    def _make_durable(self, pin: Any, transaction: int, meta: bytes) -> list[int]:
        try:
            synced = self._sync(pin)
            self._save(transaction, meta)
        except LostSyncError as error:
            self.lost = error
            if read_checkpoint(self._index.path) is not None:
                _write_mark(self._settings, _SCHEME + _LOST)
            raise
        return synced

    def _sync(self, pin: Any) -> list[int]:
        """Sync what the snapshot refers to, then the index; return the files that were synced."""
        names = list(self._index.files.unsynced_files(pin))
        directories = set()
        for file, info in names:
            if info is not None and info.disk in self._disks.roots:
                path = self._disks.path(info.disk, file)
                _sync_file(path)
                directories.add(os.path.dirname(path))
        for directory in directories:
            with _loss_of(directory):
                sync_directory(directory)
        with _loss_of(str(self._index.path)):
            self._index.sync_pages()
        return [file for file, _ in names]

    def _save(self, transaction: int, meta: bytes) -> None:
        before = self._last or read_checkpoint(self._index.path)
        checkpoint = Checkpoint(before.number + 1 if before else 1, transaction, meta)
        write_checkpoint(self._index.path, checkpoint)
        self._last = checkpoint
        metrics.store_checkpoints.inc()

    def abandon(self) -> None:
        """Take no more checkpoints, and forget the last one: of a store whose contents may go, and that
        starts empty after this."""
        with self._lock:
            remove_checkpoint(self._index.path)
            self.needed, self.synced_before = False, math.inf
            self.close()

    def close(self) -> None:
        """Release the pin. The last checkpoint stays valid as long as no process commits."""
        if self._pin is not None:
            self._pin.abort()
            self._pin = None


def _sync_file(path: str) -> None:
    with suppress(FileNotFoundError):  # it was removed meanwhile: nothing uses it
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _loss_of(path):
                os.fdatasync(fd)
        finally:
            os.close(fd)


@contextmanager
def _loss_of(path: str) -> Iterator[None]:
    """Translates a failure to sync into LostSyncError."""
    try:
        yield
    except OSError as error:
        raise LostSyncError(error.errno, f"a sync failed: {error.strerror}", path) from error


# start and end --------------------------------------------------------------------------------------------


def restore_after_power_cut(settings: StoreSettings) -> bool:
    """Set the index back to its last checkpoint if the machine went down while a process had it open without
    syncs, or a sync of it failed; return whether that was so. Call it before anything opens the index. Raises
    FormatError."""
    adopt_rebuilt_index(settings)
    told = _read_mark(settings)
    if told in ("", _CLEAN, _boot_id(), _SCHEME + _boot_id()):
        return False
    checkpoint = restore_checkpoint(settings.index_dir) if told.startswith(_SCHEME) else None
    if checkpoint is None:
        raise FormatError(
            f"{_why(told)}, and the index at {settings.index_dir} has no checkpoint: run meshd fsck --rebuild"
        )
    _log.warning(
        "%s: the index is back at its last checkpoint",
        _why(told),
        extra={"index": str(settings.index_dir), "checkpoint": checkpoint.number},
    )
    return True


def _why(told: str) -> str:
    lost = told == _SCHEME + _LOST
    return "a sync failed before" if lost else "the machine went down without a clean stop"


def adopt_rebuilt_index(settings: StoreSettings) -> None:
    """Put a completed rebuild in the place of the index, which stays next to it as `data.mdb.before-rebuild`;
    do nothing without one. It may be interrupted anywhere: the next start calls it again."""
    index_dir, build_dir = settings.index_dir, settings.index_dir / REBUILD_DIRECTORY
    if not (build_dir / REBUILD_COMPLETE).exists():
        return
    remove_checkpoint(index_dir)  # it is of the index before
    new, present = build_dir / "data.mdb", index_dir / "data.mdb"
    if new.exists() and not (present.exists() and present.samefile(new)):
        with suppress(FileNotFoundError):
            _name_also(present, index_dir / "data.mdb.before-rebuild")
        (index_dir / "lock.mdb").unlink(missing_ok=True)
        _name_also(new, present)
        sync_directory(index_dir)
    mark_clean(settings)
    (build_dir / REBUILD_COMPLETE).unlink()
    sync_directory(build_dir)  # before anything opens the index, which is not clean from then on
    shutil.rmtree(build_dir)


def _name_also(path: Path, name: Path) -> None:
    """Give a file this name, too, in the place of another one; without hard links, only this one. A move
    between directories might leave neither name after a power cut."""
    draft = name.with_name(f"{name.name}.new")
    draft.unlink(missing_ok=True)
    try:
        draft.hardlink_to(path)
    except FileNotFoundError:
        raise
    except OSError:
        path.replace(name)
    else:
        draft.replace(name)
        draft.unlink(missing_ok=True)


def protect_index(index: Index, settings: StoreSettings, clock: Clock) -> Checkpointer:
    """Make the index as it is durable, before anything else is written to it, and note how the next start
    must treat it. With `durability: commit`, end what a time without syncs left behind. Close what is
    returned before the index. Raises OSError."""
    relaxed, told = settings.durability == "relaxed", _read_mark(settings)
    known = {number: Path(path) for number, path in (index.get_meta("disks") or {}).items()}
    checkpointer = Checkpointer(index, Disks(known), clock, settings, needed=bool(told))
    checkpointer.take()
    if relaxed:
        _write_mark(settings, _SCHEME + _boot_id())
    elif told:
        checkpointer.needed = False
        _remove_mark(settings)
        remove_checkpoint(settings.index_dir)
    return checkpointer


def close_relaxed(settings: StoreSettings, clock: Clock) -> None:
    """Make a store without syncs durable after its last process has ended."""
    if settings.durability == "commit" or has_lost_sync(settings):
        return
    with closing(Index.open(settings)) as index:
        protect_index(index, settings, clock).close()
    mark_clean(settings)


def has_lost_sync(settings: StoreSettings) -> bool:
    """Return True if a sync of this store failed, and the next start goes back to its checkpoint."""
    return _read_mark(settings) == _SCHEME + _LOST


def mark_clean(settings: StoreSettings) -> None:
    """Note that the index is whole on disk and no process has it open."""
    if _read_mark(settings):
        _write_mark(settings, _CLEAN)


def _read_mark(settings: StoreSettings) -> str:
    try:
        return (settings.data_dir / _MARK).read_text()
    except FileNotFoundError:
        return ""


def _write_mark(settings: StoreSettings, text: str) -> None:
    if _read_mark(settings) == text:
        return
    draft = settings.data_dir / f"{_MARK}.new"
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(settings.data_dir / _MARK)
    sync_directory(settings.data_dir)


def _remove_mark(settings: StoreSettings) -> None:
    (settings.data_dir / _MARK).unlink()
    sync_directory(settings.data_dir)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
