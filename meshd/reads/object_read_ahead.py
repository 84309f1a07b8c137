"""Read-ahead of small objects that a client reads next: loaded into the page cache in the order of the disks.

Law: a hint. It changes what a read costs, never what it returns. Only who may read an object can have it
loaded; what cannot be found or loaded is left to its reader. A window is bounded in bytes, objects and time.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct

from meshd.core.api_errors import BatchError
from meshd.core.peer_messages import to_remote_record
from meshd.peer_reads.load_window import LoadWindow
from meshd.util.timeouts import timeout

if TYPE_CHECKING:
    from meshd.auth.dataset_access import DatasetAccess
    from meshd.auth.identity import Caller
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.disks.page_loader import PageLoader
    from meshd.store.records import Record

MAX_KEYS: Final = 4096
SMALL_BYTES: Final = 1 << 20
"""Larger objects are read sequentially by their own requests."""
SECONDS: Final = 10.0
"""After which the caller is answered; the rest of the window is left to the reads."""
_SLICE: Final = 256


class LoadRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Objects in the order in which they will be read."""

    bucket: Annotated[str, Meta(max_length=255)]
    keys: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(min_length=1, max_length=MAX_KEYS)]


_decoder: Final = msgspec.json.Decoder(LoadRequest)


class ObjectReadAhead:
    """Loads objects on request of clients. One per worker. `window_bytes`: of one request; 0 if this node has
    no rotational disk."""

    def __init__(
        self,
        store: ObjectStore,
        objects: RemoteObjects,
        access: DatasetAccess,
        pages: PageLoader,
        window_bytes: int,
    ) -> None:
        self._store, self._objects, self._access = store, objects, access
        self._pages, self._window_bytes = pages, window_bytes

    def __repr__(self) -> str:
        return f"<ObjectReadAhead, windows of {self._window_bytes} bytes>"

    async def load(self, caller: Caller, body: bytes) -> int:
        """Return how many of the first keys need no seek of their own any more; 0 if loading is of no use, so
        that the caller need not ask again.

        Raises BatchError BadRequest, NoSuchBucket, AccessDenied, Busy.
        """
        try:
            request = _decoder.decode(body)
        except ValueError as error:  # all errors of msgspec are
            raise BatchError("BadRequest", f"not a list of keys: {str(error)[:200]}") from error
        await self._access.require_keys(caller, request.bucket, request.keys)
        if not self._window_bytes or self._objects.has_origin(request.bucket):
            return 0
        window = LoadWindow(self._store)
        count = await self._fill(window, request.bucket, request.keys)
        if count:
            with suppress(TimeoutError):
                async with timeout(SECONDS):
                    await window.load(self._pages, self._objects)
        return count

    async def _fill(self, window: LoadWindow, bucket: str, keys: list[str]) -> int:
        """Add the objects that fit, and return after how many keys the window is full; 0 if none is stored,
        as in a view."""
        size = found = 0
        for start in range(0, len(keys), _SLICE):
            some = keys[start : start + _SLICE]
            records = await self._objects.find_many([(bucket, key) for key in some])
            for number, (key, record) in enumerate(zip(some, records, strict=True), start):
                if record is None or record.size > SMALL_BYTES:
                    continue
                if found and size + record.size > self._window_bytes:
                    return number
                found, size = found + 1, size + record.size
                window.add_range(bucket, key, self._read_from(bucket, key, record), 0, record.size)
        return len(keys) if found else 0

    def _read_from(self, bucket: str, key: str, record: Record) -> Record:
        """Return the record as the node that clients read the object from has it."""
        if self._objects.single_node or self._objects.is_first_replica(bucket, key):
            return record
        return to_remote_record(record) or record
