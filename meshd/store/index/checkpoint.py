"""Checkpoints of an index that is not synced at each commit: what of it survives a power cut.

With `durability: relaxed` LMDB writes its pages without any sync, and a power cut leaves an arbitrary mixture
of them. A checkpoint makes one committed snapshot durable: its data files are synced, then the pages of the
index, then a copy of the snapshot's meta page in a file of its own. Until the next checkpoint a read
transaction pins the snapshot, so that LMDB reuses none of its pages. After a power cut the copy is written
back over both meta pages of LMDB, and the index is the snapshot again, whatever else has reached the disk.

Law: the pin of the last checkpoint is released only after the next one is durable. Reader slots of killed
processes are freed only right after a checkpoint, because one of them may be such a pin.
"""

from __future__ import annotations

import os
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from awscrt.checksums import crc32c

from meshd.store.errors import FormatError
from meshd.util.durable_directories import sync_directory

if TYPE_CHECKING:
    from pathlib import Path

CHECKPOINT_FILE: Final = "checkpoint"
_DATA_FILE: Final = "data.mdb"
_SLOT_BYTES: Final = 4096
_MAGIC: Final = b"meshckp1"
_HEAD: Final = struct.Struct("<8sQQI")  # magic, number, transaction, crc32c of the meta page
_PAGE_HEADER: Final = 16
_META_BYTES: Final = _PAGE_HEADER + 136
"""A meta page of LMDB 0.9 on a 64-bit machine (lmdb's mdb.c, `MDB_meta`), without the unused rest."""
_LMDB_MAGIC: Final = struct.pack("<II", 0xBEEFC0DE, 1)
_PAGE_SIZE: Final = struct.Struct("<I")
_PAGE_SIZE_AT: Final = _PAGE_HEADER + 24
_LAST_PAGE_AND_TRANSACTION: Final = struct.Struct("<QQ")
_LAST_PAGE_AT: Final = _PAGE_HEADER + 24 + 96
_POLL_SECONDS: Final = 0.2


class Checkpoint(msgspec.Struct, frozen=True):
    """A durable snapshot. `number` rises with each one; `transaction` is the last one that it contains."""

    number: int
    transaction: int
    meta: bytes

    @property
    def page_size(self) -> int:
        """Bytes of a page of the index."""
        return int(_PAGE_SIZE.unpack_from(self.meta, _PAGE_SIZE_AT)[0])

    @property
    def index_bytes(self) -> int:
        """Bytes that the index has at least."""
        last: int = _LAST_PAGE_AND_TRANSACTION.unpack_from(self.meta, _LAST_PAGE_AT)[0]
        return (last + 1) * self.page_size


def _is_meta_of(meta: bytes, transaction: int) -> bool:
    """Whether this is LMDB's meta page of that transaction."""
    return (
        len(meta) == _META_BYTES
        and meta[_PAGE_HEADER : _PAGE_HEADER + 8] == _LMDB_MAGIC
        and _LAST_PAGE_AND_TRANSACTION.unpack_from(meta, _LAST_PAGE_AT)[1] == transaction
    )


def read_meta_page(index_dir: Path, transaction: int, page_size: int) -> bytes:
    """Return LMDB's meta page of the last committed transaction. Call it while no other can commit. Raises
    OSError, FormatError."""
    with (index_dir / _DATA_FILE).open("rb") as file:
        meta = os.pread(file.fileno(), _META_BYTES, (transaction & 1) * page_size)
    if not _is_meta_of(meta, transaction):
        raise FormatError(f"the index at {index_dir} has no meta page of its transaction {transaction}")
    return meta


def read_checkpoint(index_dir: Path) -> Checkpoint | None:
    """Return the last checkpoint of an index; None if it has none that can be read."""
    try:
        raw = (index_dir / CHECKPOINT_FILE).read_bytes()
    except FileNotFoundError:
        return None
    found = [_decode(raw[at : at + _SLOT_BYTES]) for at in (0, _SLOT_BYTES)]
    return max((each for each in found if each is not None), key=lambda each: each.number, default=None)


def _decode(slot: bytes) -> Checkpoint | None:
    if len(slot) < _HEAD.size + _META_BYTES:
        return None
    magic, number, transaction, crc = _HEAD.unpack_from(slot)
    meta = slot[_HEAD.size : _HEAD.size + _META_BYTES]
    sound = magic == _MAGIC and crc == crc32c(meta) and _is_meta_of(meta, transaction)
    return Checkpoint(number, transaction, meta) if sound else None


def write_checkpoint(index_dir: Path, checkpoint: Checkpoint) -> None:
    """Make a checkpoint durable, in the place of the last but one (blocking). Raises OSError."""
    path = index_dir / CHECKPOINT_FILE
    head = _HEAD.pack(_MAGIC, checkpoint.number, checkpoint.transaction, crc32c(checkpoint.meta))
    is_new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(
            fd, (head + checkpoint.meta).ljust(_SLOT_BYTES, b"\0"), (checkpoint.number & 1) * _SLOT_BYTES
        )
        os.fdatasync(fd)
    finally:
        os.close(fd)
    if is_new:
        sync_directory(index_dir)


def remove_checkpoint(index_dir: Path) -> None:
    """Forget the checkpoints of an index that has changed without them (blocking)."""
    path = index_dir / CHECKPOINT_FILE
    if path.exists():
        path.unlink()
        sync_directory(index_dir)


def restore_checkpoint(index_dir: Path) -> Checkpoint | None:
    """Set an index back to its last checkpoint; return it, or None if there is none. Call it before anything
    opens the index (blocking).

    Raises OSError, and FormatError if the index is shorter than its checkpoint, or missing.
    """
    checkpoint = read_checkpoint(index_dir)
    if checkpoint is None:
        return None
    if not (index_dir / _DATA_FILE).exists():
        raise FormatError(f"the index at {index_dir} is missing: run meshd fsck --rebuild")
    with (index_dir / _DATA_FILE).open("r+b") as file:
        if os.fstat(file.fileno()).st_size < checkpoint.index_bytes:
            raise FormatError(
                f"the index at {index_dir} is shorter than its checkpoint: run meshd fsck --rebuild"
            )
        for page in (0, 1):
            header = page.to_bytes(8, "little") + checkpoint.meta[8:_PAGE_HEADER]
            os.pwrite(file.fileno(), header + checkpoint.meta[_PAGE_HEADER:], page * checkpoint.page_size)
        os.fdatasync(file.fileno())
    return checkpoint


class OpeningPin:
    """Pins the snapshot that an index had when this process opened it, until another checkpoint is taken.

    The pin of the last checkpoint has ended with the processes before, or may end when slots of killed
    processes are freed. What the first process finds that opens the index is at least as old as what is
    committed later, so its own pin protects that checkpoint, too.
    """

    def __init__(self, env: Any, index_dir: Path) -> None:
        self._index_dir = index_dir
        self._transaction = env.begin()
        self._number = self._newest()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshd-index-pin", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<OpeningPin {self._index_dir} alive={self._thread.is_alive()}>"

    def _newest(self) -> int:
        checkpoint = read_checkpoint(self._index_dir)
        return 0 if checkpoint is None else checkpoint.number

    def _run(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            with suppress(OSError):  # e.g. no descriptor is free: a pin that stays keeps the index growing
                if self._newest() > self._number:
                    break
        self._transaction.abort()

    def close(self) -> None:
        """Release it; call this before the environment is closed."""
        self._closed.set()
        self._thread.join(5)
