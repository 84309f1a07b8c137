"""Shard pages: the indexes of the samples of shards, stored on this node, and built once for all snapshots.

Law: a page is named after the content of its shard and the parts of samples that it indexes, so it is valid
for exactly these.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from meshd.core.document_store import PAGES_PREFIX
from meshd.datasets.index_documents import IndexDocuments
from meshd.telemetry import metrics
from meshd.util.async_tasks import SingleFlight
from meshwire.dataset.archive_paths import archive_kind, compression_kind
from meshwire.dataset.member_pages import write_member_page
from meshwire.dataset.page_document import page_document_facts
from meshwire.formats.page_formats import mark_page
from meshwire.formats.record_index import write_record_page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.store.records import Record
    from meshwire.dataset.paged_snapshot import PageFacts, PageParts
    from meshwire.dataset.snapshot import SnapshotKind
    from meshwire.formats.record_index import RecordIndex

    MakePage = Callable[[str, str, Record, PageParts], Awaitable[bytes]]
    FetchPage = Callable[[], Awaitable[bytes | None]]
    IndexRecords = Callable[[str, str, Record, Sequence[str]], Awaitable[RecordIndex]]

_REMEMBERED: Final = 1 << 16


def content_name(key: str, etag: str, size: int) -> str:
    """Return a name for the content of a file as its extension says that it is read."""
    kind = compression_kind(key) or archive_kind(key)
    return f"{etag}-{size}" + (f".{kind}" if kind not in (None, "tar") else "")


class PageMaker(Protocol):
    """Makes the pages of the shards of one kind of source."""

    def page_name(self, key: str, etag: str, size: int, parts: PageParts) -> str:
        """Return the name of the document of a page."""
        ...

    def facts_of(self, document: bytes, record: Record, parts: PageParts) -> PageFacts:
        """Return what snapshots say of a page, given its document and its object. Raises ColumnError."""
        ...

    async def read_page(
        self,
        bucket: str,
        key: str,
        record: Record,
        parts: PageParts,
        fetch: FetchPage | None = None,
        *,
        again: bool = False,
    ) -> PageFacts:
        """Return what snapshots say of a page, which is afterwards on this node: the one that is here, or
        that `fetch` gets from elsewhere, else made. `again`: not the one that is here. Raises BatchError
        BadSample."""
        ...


class ShardPages:
    """Reads and builds the pages of one kind, for a worker. `what`: what error messages call a shard;
    `facts_of`: reads the facts of a page from its document, given the size of its object; may raise
    ColumnError."""

    def __init__(
        self,
        catalog: DocumentStore,
        kind: SnapshotKind,
        what: str,
        facts_of: Callable[[bytes, int], PageFacts],
    ) -> None:
        self._documents: IndexDocuments[PageFacts] = IndexDocuments(
            catalog, what, partial(_facts, facts_of), partial(_mark, kind)
        )
        self._fetching: SingleFlight[str, PageFacts] = SingleFlight()
        self._read: OrderedDict[str, PageFacts] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ShardPages {self._documents}, {len(self._read)} read>"

    async def read(
        self,
        name: str,
        url: str,
        record: Record,
        make: Callable[[], Awaitable[bytes]],
        fetch: FetchPage | None,
        *,
        again: bool,
    ) -> PageFacts:
        """Return what a page says; without a document of it, or `again`, `fetch` one or else `make` it, once
        for all who ask. Raises BatchError BadSample and what `make` raises."""
        if not again and name in self._read:
            return self._read[name]

        async def counted() -> bytes:
            metrics.snapshot_pages.labels("made").inc()
            return await make()

        if fetch is None:
            read = self._documents.make_again if again else self._documents.read
            found = await read(name, url, counted)
        else:  # apart from what is made, or two nodes that ask each other would wait for each other
            look_up = partial(self._read_or_make, name, url, counted, fetch, again=again)
            found, _ = await self._fetching.run(name, look_up)
        facts = self._read[name] = _of_object(found, record)
        if len(self._read) > _REMEMBERED:
            self._read.popitem(last=False)
        return facts

    async def _read_or_make(
        self, name: str, url: str, make: Callable[[], Awaitable[bytes]], fetch: FetchPage, *, again: bool
    ) -> PageFacts:
        found = None if again else await self._documents.find(name)
        if found is None:
            document = await fetch()
            if document is None:
                return await self._documents.make_again(name, url, make)
            found = await self._documents.add(name, url, document)
        return found


def _of_object(facts: PageFacts, record: Record) -> PageFacts:
    return replace(facts, size=facts.size or record.size, stored=record.size)


def _facts(facts_of: Callable[[bytes, int], PageFacts], document: bytes) -> PageFacts:
    return facts_of(document, 0)


def _mark(kind: SnapshotKind, document: bytes, facts: PageFacts) -> str:
    return mark_page(document, kind, facts) if facts.samples else ""


class DerivedPages:
    """Makes the pages of shards of a kind from their indexes, for a worker. `make`: returns a page."""

    def __init__(self, catalog: DocumentStore, kind: SnapshotKind, what: str, make: MakePage) -> None:
        self._kind, self._make = kind, make
        self._pages = ShardPages(catalog, kind, what, page_document_facts)

    def __repr__(self) -> str:
        return f"<DerivedPages {self._pages}>"

    def page_name(self, key: str, etag: str, size: int, parts: PageParts) -> str:
        """See `PageMaker`."""
        chosen = (self._kind, parts.parts, parts.in_shards, *([parts.beside] if parts.beside else ()))
        digest = hashlib.sha256(repr(chosen).encode()).hexdigest()[:32]
        return f"{PAGES_PREFIX}{content_name(key, etag, size)}-{digest}"

    def facts_of(self, document: bytes, record: Record, parts: PageParts) -> PageFacts:
        """See `PageMaker`."""
        return replace(page_document_facts(document, record.size), beside=parts.beside)

    async def read_page(
        self,
        bucket: str,
        key: str,
        record: Record,
        parts: PageParts,
        fetch: FetchPage | None = None,
        *,
        again: bool = False,
    ) -> PageFacts:
        """See `PageMaker`."""
        name = self.page_name(key, record.etag, record.size, parts)
        make = partial(self._make, bucket, key, record, parts)
        found = await self._pages.read(name, f"s3://{bucket}/{key}", record, make, fetch, again=again)
        return replace(found, beside=parts.beside)


def member_pages(catalog: DocumentStore, archives: ArchiveService) -> DerivedPages:
    """Return what makes the pages of archives."""

    async def make(bucket: str, key: str, record: Record, parts: PageParts) -> bytes:
        index = await archives.get_index(bucket, key, record)
        return await asyncio.to_thread(write_member_page, index.files, index.size, parts)

    return DerivedPages(catalog, "tar", "an archive", make)


def record_pages(
    catalog: DocumentStore, kind: SnapshotKind, what: str, index_of: IndexRecords, capacity: SnapshotCapacity
) -> DerivedPages:
    """Return what makes the pages of files of records. `index_of`: returns the positions of some parts."""

    async def make(bucket: str, key: str, record: Record, parts: PageParts) -> bytes:
        index = await index_of(bucket, key, record, [name for name, *_ in parts.parts])
        capacity.require_room(index.numbers.size, len(parts.parts), f"s3://{bucket}/{key}")
        return await asyncio.to_thread(write_record_page, index, parts)

    return DerivedPages(catalog, kind, what, make)
