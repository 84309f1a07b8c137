"""Data files in the index: the state of each file, its bytes in use, and which files are not synced yet.

Law: every method takes an LMDB transaction; no file is opened here. Files that are synced at each commit are
never among the unsynced ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.records import DataFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_encode = msgspec.msgpack.Encoder().encode
_file = msgspec.msgpack.Decoder(DataFile).decode


def _number(value: int) -> bytes:
    return value.to_bytes(8, "big")


class DataFileTable:
    """The table of data files of an index, and that of the `unsynced` ones (None in a read-only index)."""

    def __init__(self, files: Any, unsynced: Any) -> None:
        self._files, self._unsynced = files, unsynced

    def get_file(self, txn: Any, file: int) -> DataFile | None:
        raw = txn.get(_number(file), db=self._files)
        return None if raw is None else _file(raw)

    def put_file(self, txn: Any, file: int, info: DataFile) -> None:
        txn.put(_number(file), _encode(info), db=self._files)

    def delete_file(self, txn: Any, file: int) -> None:
        txn.delete(_number(file), db=self._files)

    def open_files(self, txn: Any, writer: str) -> Iterator[tuple[int, DataFile]]:
        """Yields (file, info) of files that this writer has open. Decodes only candidates, because there may
        be many other files."""
        encoded = _encode("open") + _encode(writer)  # adjacent fields
        with txn.cursor(self._files) as cursor:
            for name, raw in cursor:
                if encoded in bytes(raw) and (info := _file(raw)).writer == writer:
                    yield int.from_bytes(name, "big"), info

    def files_after(self, txn: Any, file: int) -> Iterator[tuple[int, DataFile]]:
        """Yields (file, info) of data files with higher numbers."""
        with txn.cursor(self._files) as cursor:
            found = cursor.set_range(_number(file + 1))
            while found:
                yield int.from_bytes(cursor.key(), "big"), _file(cursor.value())
                found = cursor.next()

    def all_files(self, txn: Any) -> Iterator[tuple[int, DataFile]]:
        """Yields (file, info) of every data file."""
        with txn.cursor(self._files) as cursor:
            for name, raw in cursor:
                yield int.from_bytes(name, "big"), _file(raw)

    def mark_unsynced(self, txn: Any, file: int) -> None:
        """Notes that this transaction wrote to a file without a sync."""
        txn.put(_number(file), _number(txn.id()), db=self._unsynced)

    def unsynced_files(self, txn: Any) -> Iterator[tuple[int, DataFile | None]]:
        """Yields (file, info) of files written to since they were synced; None for one that is gone."""
        with txn.cursor(self._unsynced) as cursor:
            for name, _ in cursor:
                file = int.from_bytes(name, "big")
                yield file, self.get_file(txn, file)

    def forget_unsynced(self, txn: Any, files: Iterable[int], transaction: int) -> None:
        """Forgets these files, those excepted that a transaction after this one wrote to."""
        for file in files:
            written = txn.get(_number(file), db=self._unsynced)
            if written is not None and int.from_bytes(written, "big") <= transaction:
                txn.delete(_number(file), db=self._unsynced)
