"""Pages of snapshots as this process has them: maps of the index documents in the store.

A page is the document of its shard's index, under the index's name; all workers map the same bytes. Before a
snapshot is used, pages that this node lacks are fetched from the node that made them, or else made.

Law: a page is used only if its bytes have the hash that the snapshot names, or the checksum that they had
when this node compared them with that hash. One that is damaged or missing is fetched, or made again from its
shard; if that gives another page, the error names the shard.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

import numpy as np
from awscrt.checksums import crc32c

from meshd.core.api_errors import BatchError, busy
from meshd.core.document_store import CHECKED_SNAPSHOT, MAPPED_BYTES, MARK, RESERVED_BUCKET
from meshd.core.peer_messages import PageRequest
from meshd.core.sample_locations import snapshot_changed
from meshd.datasets.mds import MdsSources
from meshd.datasets.open_pages import OpenPageCache
from meshd.datasets.parquet_row_copies import ParquetFiles
from meshd.datasets.record_files import LineIndexer, TfrecordIndexer
from meshd.datasets.shard_pages import DerivedPages, member_pages, record_pages
from meshd.datasets.token_files import TokenSources
from meshd.peer_reads.replica_selection import gather_limited
from meshd.store.errors import StoreError
from meshd.util.async_tasks import LongRunningCalls, StillRunningError
from meshd.util.page_cache import map_file
from meshwire.dataset.paged_snapshot import PagedSnapshot, PageParts, page_facts, read_snapshot
from meshwire.formats.page_formats import open_marked_page, open_page
from meshwire.frame.columns import ColumnError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from meshd.core.document_store import DocumentStore
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.datasets.shard_pages import PageMaker
    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshd.util.async_tasks import CallProgress
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.dataset.fields import Source
    from meshwire.dataset.paged_columns import Page
    from meshwire.dataset.paged_snapshot import PageFacts
    from meshwire.dataset.snapshot import SnapshotKind
    from meshwire.frame.tensor_frame import Buffer

_CHECKED: Final = 256
_CHECKED_SAMPLES: Final = 1 << 20
"""Pages of a snapshot, and samples of them, that are opened before it is used; further ones before the batch
that needs them. To open a page costs as much as it is large: a process that builds no batches need not."""
_OPENED_AT_ONCE: Final = 2  # threads that compare pages with their hashes, most of the time without the GIL
_AT_ONCE: Final = 8
_MADE_AT_ONCE: Final = 2
_ASKED_AT_ONCE: Final = 4  # of other nodes, which make them
_log = logging.getLogger("meshd.documents")


def _hash_of(document: bytes) -> bytes:
    return hashlib.sha256(document).digest()


class SnapshotPages:
    """The pages of snapshots, for a process. `lines`, `tfrecords`, `parquets`: index such files; `makers`: by
    kind of the source, what makes its pages."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        archives: ArchiveService,
        objects: RemoteObjects,
        capacity: SnapshotCapacity,
    ) -> None:
        self._store, self._catalog, self._objects = store, catalog, objects
        self.lines = LineIndexer(store, catalog, archives, objects, capacity)
        self.tfrecords = TfrecordIndexer(store, catalog, archives, objects)
        self.parquets = ParquetFiles(store, catalog, archives, objects)
        self.mds = MdsSources(store, archives, objects, capacity)
        self.tokens = TokenSources(objects, capacity)
        self.makers: Mapping[SnapshotKind, PageMaker] = {
            "lines": self.lines,
            "tar": member_pages(catalog, archives),
            "tfrecord": record_pages(catalog, "tfrecord", "TFRecord", self.tfrecords.index_file, capacity),
            "parquet": record_pages(catalog, "parquet", "Parquet", self.parquets.index_file, capacity),
            "mds": DerivedPages(catalog, "mds", "an MDS shard", self.mds.make_page),
            "tokens": DerivedPages(catalog, "tokens", "tokens", self.tokens.make_page),
        }
        self._for_peers: LongRunningCalls[None] = LongRunningCalls("pages", limit=_AT_ONCE)
        self._open_pages = OpenPageCache()
        self._gone: dict[bytes, str] = {}  # what became of the objects of pages that cannot be made
        self._damaged: set[bytes] = set()
        catalog.use_pages(self)

    def __repr__(self) -> str:
        return f"<SnapshotPages, {len(self._open_pages)} open>"

    async def read_snapshot(self, digest: str, read_document: Callable[[], Awaitable[bytes]]) -> Snapshot:
        """Decode a snapshot, and make those of its pages that this node lacks. `read_document`: is called
        for a document that cannot be mapped. Raises ColumnError, BatchError BadSample, Busy."""
        snapshot = await asyncio.to_thread(self._decode_mapped, digest)
        if snapshot is None:
            snapshot = await asyncio.to_thread(self._decode, digest, await read_document())
        if isinstance(snapshot, PagedSnapshot):
            runs = [range(first, len(snapshot.table), _OPENED_AT_ONCE) for first in range(_OPENED_AT_ONCE)]
            found = [asyncio.to_thread(self._unusable, snapshot, run) for run in runs]
            lacking = sorted(itertools.chain.from_iterable(await asyncio.gather(*found)))
            objects = snapshot.objects
            names = [(objects.bucket_of(number), objects.keys[number]) for number in lacking]
            records = await self._objects.find_many(names)
            made = [self._make(snapshot, *each) for each in zip(lacking, records, strict=True)]
            await gather_limited(_AT_ONCE, made)
        return snapshot

    async def read_facts(
        self,
        scanned: Sequence[tuple[str, Record]],
        source: Source,
        kind: SnapshotKind,
        parts: PageParts,
        last: bytes | None,
        progress: CallProgress,
        beside: Mapping[str, str],
    ) -> list[tuple[str, str, PageFacts]]:
        """Return key, ETag and page of each shard of a source, by (key, record). Pages that `last`, the
        document of an earlier snapshot of it, does not have are made. `beside`, by key: see `PageFacts`.
        Raises BatchError."""
        known = {} if last is None else await asyncio.to_thread(page_facts, last)
        pages = [known.get((key, record.etag, record.size)) for key, record in scanned]
        for number, page in enumerate(pages):
            if page is not None and page.beside != beside.get(scanned[number][0], ""):
                pages[number] = None
        if kind not in ("lines", "tar") and pages:  # its notes have the types that the others must have
            pages[0] = None
        progress.reached(len(scanned) - pages.count(None), len(scanned))

        async def page_of(key: str, record: Record) -> PageFacts:
            wanted = replace(parts.of_shard(key, source.prefix), beside=beside.get(key, ""))
            page = await self._read_page(kind, source.bucket, key, record, wanted)
            progress.advance()
            return page

        async def pages_of(numbers: Sequence[int], at_once: int) -> None:
            found = await gather_limited(at_once, [page_of(*scanned[number]) for number in numbers])
            for number, page in zip(numbers, found, strict=True):
                pages[number] = page

        new = [number for number, page in enumerate(pages) if page is None]
        alone = self._objects.single_node
        own = [n for n in new if alone or self._objects.is_first_replica(source.bucket, scanned[n][0])]
        asked = sorted(set(new).difference(own))
        await asyncio.gather(pages_of(own, _MADE_AT_ONCE), pages_of(asked, _ASKED_AT_ONCE))
        return [
            (key, record.etag, page)
            for (key, record), page in zip(scanned, pages, strict=True)
            if page is not None
        ]

    async def page_for_peer(self, request: PageRequest, record: Record) -> bytes | None:
        """Return the document of a page, made here if it has to be; None: it is not finished. Raises
        BatchError BadSample, BadRequest, Busy."""
        kind = cast("SnapshotKind", request.kind)
        if kind not in self.makers:
            raise BatchError("BadRequest", f"this node has no pages of kind {request.kind!r}")
        parts = PageParts(tuple(map(tuple, request.parts)), request.in_shards, request.beside)
        name = self.makers[kind].page_name(request.key, record.etag, record.size, parts)
        if request.finished:
            return self._catalog.read_intact(name)

        async def make(_: CallProgress) -> None:
            await self.makers[kind].read_page(request.bucket, request.key, record, parts)

        try:
            await self._for_peers.run_or_wait(name, make)
        except StillRunningError:
            return None
        self._for_peers.discard_result(name)
        return await self.document_made_here(kind, request.bucket, request.key, record, parts)

    async def document_made_here(
        self, kind: SnapshotKind, bucket: str, key: str, record: Record, parts: PageParts
    ) -> bytes:
        """Return the document of a page, made on this node if it has to be. Raises BatchError BadSample,
        Busy."""
        maker = self.makers[kind]
        name = maker.page_name(key, record.etag, record.size, parts)
        for again in (False, True):  # it may have been removed or damaged since it was last looked at
            facts = await maker.read_page(bucket, key, record, parts, again=again)
            document = self._catalog.read_intact(name)
            if document is not None and await asyncio.to_thread(_hash_of, document) == facts.digest:
                return document
        raise busy(f"the page of s3://{bucket}/{key} is being removed")

    async def _read_page(
        self,
        kind: SnapshotKind,
        bucket: str,
        key: str,
        record: Record,
        parts: PageParts,
        expected: PageFacts | None = None,
    ) -> PageFacts:
        """Return what a page says, which is afterwards on this node: fetched from another node, or made.
        `expected`: what the page must say, if that is known, since the one here is not so. Raises
        BatchError."""
        maker = self.makers[kind]
        if self._objects.single_node:
            return await maker.read_page(bucket, key, record, parts, again=expected is not None)

        def is_page(document: bytes) -> bool:
            try:
                facts = maker.facts_of(document, record, parts)
                if facts.samples:
                    open_page(document, kind, facts)
            except ColumnError:
                return False
            return expected is None or facts == expected

        async def fetch() -> bytes | None:
            chosen = [list(part) for part in parts.parts]
            asked = PageRequest(bucket, key, record.etag, kind, chosen, parts.in_shards, parts.beside)
            return await self._objects.pages.fetch_page(asked, is_page, anywhere=expected is not None)

        return await maker.read_page(bucket, key, record, parts, fetch, again=expected is not None)

    def open_pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[Page]:
        """Return pages. Raises BatchError Busy, SnapshotChanged, if this node no longer has one of them."""
        return self._open_pages.pages_of(snapshot, numbers, self._open_page)

    def _open_page(self, snapshot: PagedSnapshot, number: int) -> Page:
        """Open a page that is closed (blocking). Raises BatchError as `open_pages`."""
        try:
            return self._open_stored_page(snapshot, number)
        except (ColumnError, StoreError, OSError) as error:
            self._damaged.add(snapshot.table.hash_of(number))
            self._catalog.forget_snapshot(snapshot.hash)  # what reads it next makes the page again
            raise self._unavailable(snapshot, number, error) from error

    def closed_pages(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[int]:
        """Return those of some pages that are not open, without those that cannot be made."""
        hash_of, opened, gone = snapshot.table.hash_of, self._open_pages, self._gone
        found = [number for number in numbers if hash_of(number) not in opened]
        return [number for number in found if hash_of(number) not in gone] if gone else found

    def page_document(self, snapshot: PagedSnapshot, number: int) -> bytes:
        """Return the bytes of a page (blocking). Raises BatchError as `open_pages`."""
        self.open_pages(snapshot, (number,))
        try:
            return bytes(self._document(self._page_name(snapshot, number)))
        except (ColumnError, StoreError, OSError) as error:
            raise self._unavailable(snapshot, number, error) from error

    def _decode(self, digest: str, document: bytes) -> Snapshot:
        """Decode a snapshot (blocking): a large one that was fetched is on this node now."""
        mapped = self._decode_mapped(digest) if len(document) >= MAPPED_BYTES else None
        return read_snapshot(document, self.open_pages) if mapped is None else mapped

    def _decode_mapped(self, digest: str) -> Snapshot | None:
        """Decode a large snapshot from the map of its document (blocking); None if that is not on this node,
        or damaged."""
        record = self._store.get(RESERVED_BUCKET, f"snapshots/{digest}")
        if record is None or record.size < MAPPED_BYTES:
            return None
        with suppress(ColumnError, StoreError, OSError):
            document, mark, checksum = self._marked_document(f"snapshots/{digest}")
            # The checksum costs a quarter of the hash.
            known = mark == CHECKED_SNAPSHOT and crc32c(document) == checksum
            snapshot = read_snapshot(document, self.open_pages, digest if known else "")
            return snapshot if snapshot.hash == digest else None
        return None

    def _unusable(self, snapshot: PagedSnapshot, numbers: Sequence[int]) -> list[int]:
        """Return those of some pages that are missing, or damaged as far as they are looked at (blocking)."""
        found, few = [], int(np.searchsorted(snapshot.pages.starts, _CHECKED_SAMPLES, side="right")) - 1
        for number in numbers:
            if snapshot.table.hash_of(number) in self._open_pages:
                continue
            if number >= min(few, _CHECKED) and snapshot.table.hash_of(number) not in self._damaged:
                if self._store.get(RESERVED_BUCKET, self._page_name(snapshot, number)) is None:
                    found.append(number)
                continue
            try:
                self._open_stored_page(snapshot, number)
            except (ColumnError, StoreError, OSError):
                found.append(number)
        return found

    async def _make(self, snapshot: PagedSnapshot, number: int, record: Record | None) -> None:
        """Fetch or make a page, unless its object has changed: then the batches that need it say so."""
        objects, facts = snapshot.objects, snapshot.facts(number)
        bucket, key = objects.bucket_of(number), objects.keys[number]
        if record is None or record.etag != objects.etags[number] or record.size != facts.stored:
            self._gone[facts.digest] = "was deleted" if record is None else "was replaced"
            return
        self._gone.pop(facts.digest, None)
        parts = snapshot.parts_of(number)
        try:
            found = await self._read_page(snapshot.kind, bucket, key, record, parts, facts)
        except BatchError as error:
            if error.code != "SnapshotChanged":
                raise
            self._gone[facts.digest] = f"has no page here any more, and cannot get one: {error.message}"
            return
        if found != facts:
            raise BatchError(
                "BadSample",
                f"the snapshot {snapshot.hash} has a page for s3://{bucket}/{key} that is not the index of "
                f"that object: {found.samples} samples with the hash {found.digest.hex()}, not "
                f"{facts.samples} with {facts.digest.hex()}",
                help="open the source again: a snapshot made from its objects has the right pages",
                detail={"url": f"s3://{bucket}/{key}", "snapshot": snapshot.hash},
            )

    def _open_stored_page(self, snapshot: PagedSnapshot, number: int) -> Page:
        """Open and verify a page (blocking). Raises ColumnError, StoreError, OSError."""
        try:
            page, document = self._read_stored(snapshot, number)
        except FileNotFoundError:  # it was moved in the meantime
            page, document = self._read_stored(snapshot, number)
        digest = snapshot.table.hash_of(number)
        self._damaged.discard(digest)
        self._open_pages.add(digest, page, document)
        return page

    def _read_stored(self, snapshot: PagedSnapshot, number: int) -> tuple[Page, Buffer]:
        """Return a page that is in the store, and its document. One that was checked when it was written
        needs only the checksum of the store, which costs an eighth of all checks. Raises ColumnError,
        StoreError, OSError."""
        facts = snapshot.facts(number)
        document, mark, checksum = self._marked_document(self._page_name(snapshot, number))
        page = open_marked_page(document, snapshot.kind, facts, mark) if mark else None
        if page is None:
            page = open_page(document, snapshot.kind, facts)
        elif crc32c(document) != checksum:
            raise ColumnError("its bytes are damaged")
        return page, document

    def _document(self, name: str) -> Buffer:
        return self._marked_document(name)[0]

    def _marked_document(self, name: str) -> tuple[Buffer, str, int]:
        """Return a document and its mark, with the crc32c that its bytes have; no mark if that is not
        known."""
        record = self._store.get(RESERVED_BUCKET, name)
        if record is None:
            raise ColumnError("it is not on this node")
        places = self._store.locate(record)
        if len(places) != 1:
            return self._store.read_range(record, 0, record.size), "", 0
        [place] = places
        document = map_file(place.path, place.offset, place.length)
        return document, record.metadata.get(MARK, ""), place.crc32c

    def _unavailable(self, snapshot: PagedSnapshot, number: int, error: Exception) -> BatchError:
        objects = snapshot.objects
        bucket, key = objects.bucket_of(number), objects.keys[number]
        url = f"s3://{bucket}/{key}"
        what = self._gone.get(snapshot.table.hash_of(number))
        if what is not None:
            return snapshot_changed(snapshot, number, what)
        message = f"the page of {url} in the snapshot {snapshot.hash} is made again: {error}"
        _log.warning("%s", message)
        return busy(message)

    def _page_name(self, snapshot: PagedSnapshot, number: int) -> str:
        objects, stored = snapshot.objects, int(snapshot.table.stored[number])
        return self.makers[snapshot.kind].page_name(
            objects.keys[number], objects.etags[number], stored, snapshot.parts_of(number)
        )
