"""Indexes archives in the background: each write queues a note, and the coordinator processes the queue.

Law: a note is durable and records only which object to examine. It is removed once the current version of the
object has an index or has been rejected. A restarted node resumes with the remaining notes. If a note is
lost, the first reader builds the index, and waits for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.datasets.archives.archive_service import COPIES_PREFIX, INDEXES_PREFIX, NOTES_PREFIX, index_names
from meshd.store.errors import ConditionFailedError, ConditionMissingError, ExtentGoneError, StoreError
from meshd.util import failpoints
from meshwire.dataset.archive_paths import archive_kind
from meshwire.http_values.conditional_requests import Conditions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshd.util.clock import Clock

_log = logging.getLogger("meshd.archives")
_PAGE: Final = 1000
_YOUNG: Final = 3_600_000  # ms; younger indexes are kept: their object may have been written after the scan


class IndexNote(msgspec.Struct, frozen=True):
    """A note that there is an archive under this key. With the ETag, another archive gives another note."""

    bucket: str
    key: str
    etag: str


class IndexQueue:
    """Queues notes, for a worker."""

    def __init__(self, store: ObjectStore) -> None:
        self._catalog = DocumentStore(store)

    def enqueue(self, bucket: str, key: str, record: Record) -> Awaitable[None] | None:
        """Queue an object that was stored; None if it is no archive. Never fails: without a note, it is
        indexed on first use."""
        return None if archive_kind(key) is None else self._write_note(bucket, key, record)

    async def _write_note(self, bucket: str, key: str, record: Record) -> None:
        name = hashlib.blake2b(f"{bucket}\0{key}".encode(), digest_size=16).hexdigest()
        try:
            await self._catalog.write_document(
                NOTES_PREFIX + name, msgspec.json.encode(IndexNote(bucket, key, record.etag))
            )
        except StoreError as error:
            _log.warning("an archive is not indexed in advance", extra={"key": key, "why": str(error)})


class BackgroundIndexer:
    """Indexes queued archives. One instance per node, in the coordinator. `buckets` returns the names of all
    buckets; `room` the bytes of copies that fit without evicting another result, None while unknown."""

    def __init__(
        self,
        store: ObjectStore,
        archives: ArchiveService,
        buckets: Callable[[], Iterable[str]],
        room: Callable[[], int | None],
        clock: Clock,
    ) -> None:
        self._store, self._archives, self._buckets, self._clock = store, archives, buckets, clock
        self._room, self._measured, self._spent = room, -1, 0
        self._seen = -1  # the store's revision when no notes were left

    def __repr__(self) -> str:
        return f"<BackgroundIndexer, idle since revision {self._seen}>"

    async def index_queued(self) -> int:
        """Index the archives of all notes, one by one. Returns how many notes were removed."""
        revision = self._store.revision()
        if revision == self._seen or self._room() is None:
            return 0
        done = found = 0
        after, more = "", True
        while more:
            page = self._store.list(RESERVED_BUCKET, prefix=NOTES_PREFIX, after=after, limit=_PAGE)
            found += len(page.entries)
            for key, record in page.entries:
                done += await self._settle(key, record)
            after, more = page.next_after, page.truncated
        if not found:
            self._seen = revision
        return done

    async def _settle(self, key: str, note: Record) -> bool:
        """Work off a note. Returns whether it was removed."""
        try:
            where = msgspec.json.decode(self._store.read_range(note, 0, note.size), type=IndexNote)
            record = self._store.get(where.bucket, where.key)
            if record is not None:
                began = self._clock.monotonic()
                await self._index(where, record)
                await asyncio.sleep(self._clock.monotonic() - began)  # leave clients half of the disk
            failpoints.hit("archives.note.settled")
            # A note that was queued again in the meantime stays: it may be for another archive.
            unchanged = Conditions(if_match=(note.etag,))
            await self._store.delete(RESERVED_BUCKET, key, conditions=unchanged)
        except (ConditionFailedError, ConditionMissingError, ExtentGoneError):
            return True
        except (StoreError, BatchError) as error:
            _log.warning("an archive cannot be indexed now", extra={"note": key, "why": str(error)})
            return False
        return True

    async def _index(self, where: IndexNote, record: Record) -> None:
        try:
            index = await self._archives.get_index(where.bucket, where.key, record, spare=self._spare())
        except BatchError as error:
            if error.code == "Busy":
                raise
            _log.warning("an archive is refused: %s", error.message)
            return
        self._spent += index.size if index.inflated else 0

    def _spare(self) -> int:
        """Return the remaining room, less what was used since it was last measured."""
        room = self._room() or 0
        if room != self._measured:
            self._measured, self._spent = room, 0
        return max(0, room - self._spent)

    # --- orphaned indexes -------------------------------------------------------------------------------

    async def remove_orphans(self) -> int:
        """Remove indexes, refusals and copies that no object or version refers to. Returns how many."""
        orphans = await asyncio.to_thread(self._orphans)
        for start in range(0, len(orphans), _PAGE):
            await self._store.delete_many(RESERVED_BUCKET, orphans[start : start + _PAGE])
            await asyncio.sleep(0)
        return len(orphans)

    def _versions(self, bucket: str) -> Iterator[tuple[str, Record]]:
        key, version, more = "", "", True
        while more:
            page = self._store.list_versions(bucket, key_marker=key, version_marker=version, limit=_PAGE)
            yield from page.entries
            key, version, more = page.next_key, page.next_version, page.truncated

    def _orphans(self) -> list[str]:
        """Return the keys that no object would use. Holds only the stored keys in memory, not the objects."""
        found = set(self._kept_names(self._clock.now_ms() - _YOUNG))
        slices: dict[str, set[str]] = {}
        for name in found:
            slices.setdefault(name.partition(".table-")[0], set()).add(name)
        for bucket in self._buckets() if found else ():
            for key, record in self._versions(bucket):
                for name in index_names(key, record):
                    found.discard(name)
                    found -= (
                        slices.get(name.removesuffix(".table"), set()) if name.endswith(".table") else set()
                    )
        return sorted(found)

    def _kept_names(self, before: int) -> Iterator[str]:
        """Yield the keys of indexes, refusals and copies that were created before that time."""
        for prefix in (INDEXES_PREFIX, COPIES_PREFIX):
            after, more = "", True
            while more:
                page = self._store.list(RESERVED_BUCKET, prefix=prefix, after=after, limit=_PAGE)
                old = (key for key, record in page.entries if record.modified < before)
                yield from (key for key in old if not key.startswith(NOTES_PREFIX))
                after, more = page.next_after, page.truncated
