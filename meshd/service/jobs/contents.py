"""Small files' bytes, for the expressions of a job's layout.

Law: read in a thread, from the paths the store names or from who holds them, only while the object is what
the job found. What is too large, or gone, has no content: expressions then say none.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from meshd.assembly.elsewhere import Part
from meshd.assembly.errors import BatchError
from meshd.service.remote.waiting import Waiting

if TYPE_CHECKING:
    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshwire.shardforms import SourceObject

_CONTENT: Final = 64 << 10


class Contents:
    """One a plan. `unpacked`: where the files of a compressed archive lie, by its key; `sizes`: of archives
    that other nodes hold, inflated if they must be. Made in the loop."""

    def __init__(self, store: ObjectStore, bucket: str, objects: RemoteObjects) -> None:
        self._store, self._bucket = store, bucket
        self._waiting = None if objects.alone else Waiting(objects)
        self.unpacked: dict[str, Record | None] = {}
        self.sizes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Contents of {self._bucket}>"

    def read(self, item: SourceObject) -> bytes | None:
        """See `meshwire.samples.Contents` (blocking)."""
        if item.size > _CONTENT:
            return None
        record = self.unpacked[item.key] if item.key in self.unpacked else self._present(item)
        if record is None and self._waiting is not None and item.key not in self.unpacked:
            return self._far(self._waiting, item)
        return None if record is None else self._read(record, item.offset, item.size)

    def _far(self, waiting: Waiting, item: SourceObject) -> bytes | None:
        size = self.sizes.get(item.key, -1)
        try:
            return waiting.read_part(Part(self._bucket, item.key, item.etag, size, item.offset, item.size))
        except BatchError as error:
            if error.code == "Busy":
                raise
            return None

    def _present(self, item: SourceObject) -> Record | None:
        record = self._store.get(self._bucket, item.key)
        return record if record is not None and record.etag == item.etag else None

    def _read(self, record: Record, offset: int, length: int) -> bytes | None:
        parts: list[bytes] = []
        for place in self._store.locate(record):
            taken = min(length, place.length - offset)
            if taken > 0:
                try:
                    fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:  # moved this moment
                    return None
                try:
                    parts.append(os.pread(fd, taken, place.offset + offset))
                finally:
                    os.close(fd)
                length -= taken
            offset = max(0, offset - place.length)
        return b"".join(parts)
