"""Takes checkpoints of a store with `durability: relaxed`: what was acknowledged before one is on disk.

Law: data before the index. A snapshot of the index is taken first, then the data files that it names as not
synced are synced, then its own pages, then it becomes the checkpoint. Only then are the files forgotten that
it no longer uses.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from meshd.store.disks.layout import Disks, sync_directory
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

if TYPE_CHECKING:
    from meshd.config import StoreSettings
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.store")
_MARK: Final = "boot"
_CLEAN: Final = "clean"
_SCHEME: Final = "checkpoints "


class Checkpointer:
    """Takes checkpoints of one store; used by one process of the node, the coordinator. `needed`: whether
    commits are not synced. `synced_before`: every write acknowledged before it (monotonic) is on disk."""

    def __init__(self, index: Index, disks: Disks, clock: Clock, *, needed: bool) -> None:
        self._index, self._disks, self._clock = index, disks, clock
        self.needed = needed
        self._last: Checkpoint | None = None
        self._pin: Any = None
        self._lock = threading.Lock()
        self.synced_before = clock.monotonic() if self.needed else math.inf

    def __repr__(self) -> str:
        return f"<Checkpointer {self._index.path} {self._last.number if self._last else 'none'}>"

    def take(self) -> bool:
        """Make everything that is committed now durable (blocking); return whether there was something to do.
        Raises OSError, after which the checkpoint before is still the last one."""
        if not self.needed:
            return False
        with self._lock:
            began = self._clock.monotonic()
            transaction, meta, pin = self._snapshot()
            try:
                is_new = self._last is None or self._last.transaction != transaction
                if is_new:
                    synced = self._sync(pin)
                    self._save(transaction, meta)
                    self._pin, pin = pin, self._pin
                    if synced:
                        with self._index.write_transaction() as txn:
                            self._index.forget_unsynced(txn, synced, transaction)
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

    def _sync(self, pin: Any) -> list[int]:
        """Sync what the snapshot refers to, then the index; return the files that were synced."""
        names = list(self._index.unsynced_files(pin))
        directories = set()
        for file, info in names:
            if info is not None and info.disk in self._disks.roots:
                path = self._disks.path(info.disk, file)
                _sync_file(path)
                directories.add(os.path.dirname(path))
        for directory in directories:
            sync_directory(directory)
        self._index.env.sync(True)
        return [file for file, _ in names]

    def _save(self, transaction: int, meta: bytes) -> None:
        before = self._last or read_checkpoint(self._index.path)
        checkpoint = Checkpoint(before.number + 1 if before else 1, transaction, meta)
        write_checkpoint(self._index.path, checkpoint)
        self._last = checkpoint
        metrics.store_checkpoints.inc()

    def close(self) -> None:
        """Release the pin. The last checkpoint stays valid as long as no process commits."""
        if self._pin is not None:
            self._pin.abort()
            self._pin = None


def _sync_file(path: str) -> None:
    with suppress(FileNotFoundError):  # it was removed meanwhile: nothing uses it
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


# start and end --------------------------------------------------------------------------------------------


def restore_after_power_cut(settings: StoreSettings) -> None:
    """Set the index back to its last checkpoint if the machine went down while a process had it open without
    syncs. Call it before anything opens the index. Raises FormatError."""
    told = _read_mark(settings)
    if told in ("", _CLEAN, _boot_id(), _SCHEME + _boot_id()):
        return
    checkpoint = restore_checkpoint(settings.index_dir) if told.startswith(_SCHEME) else None
    if checkpoint is None:
        raise FormatError(
            "the machine went down without a clean stop, and the index at "
            f"{settings.index_dir} has no checkpoint: run meshd fsck --rebuild"
        )
    _log.warning(
        "the machine went down without a clean stop: the index is back at its last checkpoint",
        extra={"index": str(settings.index_dir), "checkpoint": checkpoint.number},
    )


def protect_index(index: Index, settings: StoreSettings, clock: Clock) -> Checkpointer:
    """Make the index as it is durable, before anything else is written to it, and note how the next start
    must treat it. With `durability: commit`, end what a time without syncs left behind. Close what is
    returned before the index. Raises OSError."""
    relaxed, told = settings.durability == "relaxed", _read_mark(settings)
    known = {number: Path(path) for number, path in (index.get_meta("disks") or {}).items()}
    checkpointer = Checkpointer(index, Disks(known), clock, needed=relaxed or bool(told))
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
    if settings.durability == "commit":
        return
    with closing(Index.open(settings)) as index:
        protect_index(index, settings, clock).close()
    mark_clean(settings)


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
