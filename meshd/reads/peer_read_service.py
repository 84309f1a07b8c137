"""Peer read service: answers other nodes' reads of objects, listings, archive indexes, documents, frames.

`PeerReadService` answers for what this node holds, says for which names it cannot answer, and never asks
further nodes; `FrameHandlers` has a frame built. The caller is a node of the mesh; the node that took the
client's request checked permissions.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from meshd.batches.blob_reader import Blob, stored_crc32c
from meshd.batches.sample_responses import samples_body
from meshd.core.api_errors import BatchError
from meshd.core.document_store import SHARED_PREFIXES
from meshd.core.peer_messages import (
    FIND_RECORDS,
    LIST_DOCUMENTS,
    LIST_RECORDS,
    LOAD_PARTS,
    READ_CHANGES,
    READ_DOCUMENT,
    READ_FRAME,
    READ_INDEX,
    READ_PAGE,
    READ_PAGED_KINDS,
    READ_PARTS,
    STORE_DOCUMENT,
    FindResponse,
    InventoryResponse,
    PagedKindsResponse,
    to_remote_record,
)
from meshd.core.peer_source import ObjectRange
from meshd.core.sample_locations import slice_locations
from meshd.peer_reads.changed_names import primary_changes
from meshd.peer_reads.listing import primary_page
from meshd.rpc.peer_rpc import NotHereError, handler, stream_handler
from meshd.store.disks.page_loader import PageLoader, places_by_disk
from meshd.store.errors import CorruptExtentError, StoreError
from meshwire.dataset.archive_paths import pinned_table
from meshwire.dataset.paged_snapshot import LINE_PARTS, READABLE
from meshwire.formats.json_lines import earlier_line_index
from meshwire.frame.tensor_frame import FRAME_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.batches.read_ahead.read_waits import ReadWaitClient
    from meshd.batches.sample_responses import StreamBody
    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.api_errors import Code
    from meshd.core.document_store import DocumentStore
    from meshd.core.frame_address import AnyFrameAddress, Frame, FrameSource
    from meshd.core.peer_messages import (
        ChangesRequest,
        ChangesResponse,
        DocumentName,
        FindRequest,
        IndexRequest,
        InventoryRequest,
        ListRequest,
        ListResponse,
        PagedKindsRequest,
        PageRequest,
        ReadRequest,
        RemoteRecord,
    )
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.datasets.snapshot_pages import SnapshotPages
    from meshd.datasets.tables import TableFiles
    from meshd.documents.inventory import DocumentInventory
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore
    from meshd.store.integrity.verification import ExpiringVerifiedExtents
    from meshd.store.records import Location, Record
    from meshd.transform.source_files import Piece

_AT_A_TIME = 500
_LOOKUPS = 50  # of parts to load, between two turns of requests
PEER_READABLE_PREFIXES = (*SHARED_PREFIXES, "bad/")
"""Documents other nodes may read."""


class _InQuarantineError(NotHereError):
    """This node has the object, in quarantine."""


class PeerReadService:
    """Handlers of other nodes' reads. One instance per worker."""

    def __init__(
        self,
        store: ObjectStore,
        mesh: ClusterView,
        archives: ArchiveService,
        catalog: DocumentStore,
        pages: SnapshotPages,
        tables: TableFiles,
        objects: RemoteObjects,
        census: DocumentInventory,
        proofs: ExpiringVerifiedExtents,
        read_waits: ReadWaitClient | None = None,
        loader: PageLoader | None = None,
    ) -> None:
        self._store, self._mesh, self._objects, self._census = store, mesh, objects, census
        self._archives, self._catalog, self._pages = archives, catalog, pages
        self._tables, self._proofs, self._read_waits = tables, proofs, read_waits
        self._loader = loader or PageLoader()

    def __repr__(self) -> str:
        return f"<PeerReadService of {self._mesh.node_id}>"

    @stream_handler(READ_PARTS)
    async def read_parts(self, request: ReadRequest, context: CallContext) -> StreamBody:
        """Return the bytes of these parts as a frame of samples."""
        errors: dict[str, tuple[str, str]] = {}
        quarantined: list[int] = []
        blobs = []
        for number, part in enumerate(request.parts):
            try:
                blob = await self._blob(*part)
                lost = await self._proven(blob) if request.proven else None
                if lost is not None:
                    errors[str(number)] = lost
                    blob = Blob("", 0)
                blobs.append(blob)
            except BatchError as error:
                errors[str(number)] = (error.code, error.message)
                blobs.append(Blob("", 0))
            except NotHereError as error:
                errors[str(number)] = ("NotHere", str(error))
                if isinstance(error, _InQuarantineError):
                    quarantined.append(number)
                blobs.append(Blob("", 0))
            if number % _AT_A_TIME == _AT_A_TIME - 1:
                await asyncio.sleep(0)
        if self._read_waits is not None and not request.proven:
            await self._read_waits.wait_for_pieces(list(self._pieces(blobs)))
        metadata = {"version": FRAME_VERSION, "errors": json.dumps(errors)}
        if quarantined:
            metadata["quarantined"] = json.dumps(quarantined)
        return samples_body(self._store, blobs, metadata, len(blobs), names=False, direct=not request.proven)

    @handler(LOAD_PARTS)
    async def load_parts(self, request: ReadRequest, context: CallContext) -> None:
        """Read the bytes of these parts into memory. Parts that are not here are left out."""
        found: dict[int, list[Location]] = defaultdict(list)
        for number, (bucket, key, etag, size, offset, length) in enumerate(request.parts):
            if number % _LOOKUPS == _LOOKUPS - 1:
                await asyncio.sleep(0)
            with suppress(BatchError, NotHereError, StoreError):  # the read of these parts reports it
                record = self._pinned_record(bucket, key, etag)
                if size in (-1, record.size):
                    places = places_by_disk(record, self._store.locate(record), offset, length)
                    for disk, there in places.items():
                        found[disk] += there
        await self._loader.load_window(found)

    def _pieces(self, blobs: Sequence[Blob]) -> Iterator[Piece]:
        """Yield the files that hold the bytes of these blobs."""
        for blob in blobs:
            if blob.record is not None:
                with suppress(StoreError):  # what sends them reports it
                    yield from slice_locations(self._store.locate(blob.record), blob.offset, blob.length)

    async def _proven(self, blob: Blob) -> tuple[str, str] | None:
        """Verify the extents that a blob is a part of; whole extents are verified while they are sent. Return
        the code and reason if the bytes cannot be sent, else None."""
        record = blob.record
        if record is None or stored_crc32c(record.extents, blob.offset, blob.length) is not None:
            return None
        try:
            with self._store.open_spans(record, blob.offset, blob.length) as spans:
                await self._proofs.current().require_verified([span.sub_span(0, 0) for span in spans])
        except CorruptExtentError:
            return "Unreadable", f"the copy on {self._mesh.node_id} is damaged"
        except StoreError as error:  # compaction is moving the extent, or its disk is lost
            return "Busy", f"{self._mesh.node_id}: {error}"
        return None

    async def _blob(self, bucket: str, key: str, etag: str, size: int, offset: int, length: int) -> Blob:
        if self._objects.has_origin(bucket):
            self._require_reader(bucket, key)
            data = await self._objects.read_origin_part(ObjectRange(bucket, key, etag, size, offset, length))
            return Blob(f"{bucket}/{key}", len(data), data=data)
        record = self._pinned_record(bucket, key, etag)
        if size not in (-1, record.size):
            record, size = await self._archives.decompressed(bucket, key, record, size), pinned_table(size)[1]
        if size not in (-1, record.size) or offset < 0 or offset + max(length, 0) > record.size:
            raise BatchError("SnapshotChanged", f"s3://{bucket}/{key} has no {length} bytes at {offset}")
        return Blob(f"{bucket}/{key}", record.size - offset if length < 0 else length, record, offset)

    def _require_reader(self, bucket: str, key: str) -> None:
        """Raise NotHereError unless this node is in the read set of the name."""
        if not self._is_replica(bucket, key):
            raise NotHereError(f"{self._mesh.node_id} does not hold s3://{bucket}/{key}")

    def _pinned_record(self, bucket: str, key: str, etag: str) -> Record:
        """Return the record with exactly this content. Raises BatchError NoSuchKey, SnapshotChanged;
        NotHereError."""
        record = self._store.get(bucket, key)
        if record is not None and record.broken:
            about = f"the copy of s3://{bucket}/{key} on {self._mesh.node_id} is damaged"
            raise _InQuarantineError(about) if record.etag == etag else NotHereError(about)
        if record is not None and record.etag == etag:
            return record
        self._require_reader(bucket, key)
        if record is None:
            raise BatchError("NoSuchKey", f"s3://{bucket}/{key} does not exist")
        raise BatchError("SnapshotChanged", f"s3://{bucket}/{key} was replaced")

    def _is_replica(self, bucket: str, key: str) -> bool:
        """Whether this node is in the read set of the name, under the map it knows: then an object that it
        does not have does not exist."""
        readers = self._mesh.route_for(bucket, key).read_set
        return any(node.node_id == self._mesh.node_id for node in readers)

    @handler(FIND_RECORDS)
    async def find_records(self, request: FindRequest, context: CallContext) -> FindResponse:
        """Return the current objects of these names, and which names this node cannot answer for."""
        records: list[RemoteRecord | None] = []
        unknown: list[int] = []
        names = request.names
        theirs = [name for name in names if self._objects.has_origin(name[0]) and self._is_replica(*name)]
        backed = dict(zip(theirs, await self._objects.find_many(theirs), strict=True)) if theirs else {}
        for number, (bucket, key) in enumerate(names):
            if not self._is_replica(bucket, key):
                unknown.append(number)
                records.append(None)
                continue
            known = (bucket, key) in backed
            records.append(to_remote_record(backed[bucket, key] if known else self._store.get(bucket, key)))
        return FindResponse(records, unknown)

    @handler(LIST_RECORDS)
    async def list_page(self, request: ListRequest, context: CallContext) -> ListResponse:
        """Return a page of the objects whose primary is this node. Raises StaleMapError."""
        return primary_page(self._store, self._mesh, request)

    @handler(READ_CHANGES)
    async def get_changes(self, request: ChangesRequest, context: CallContext) -> ChangesResponse:
        """Return which names of a bucket changed in this node's store. Raises StaleMapError."""
        return await asyncio.to_thread(primary_changes, self._store, self._mesh, request)

    @handler(READ_INDEX)
    async def get_index(self, request: IndexRequest, context: CallContext) -> bytes:
        """Return the document of an index. Raises BatchError BadSample, NoSuchKey, SnapshotChanged, Busy;
        NotHereError."""
        record = await self._indexable(request.bucket, request.key, request.etag)
        if request.lines:
            place = request.bucket, request.key, record
            document = await self._pages.document_made_here("lines", *place, LINE_PARTS)
            return await asyncio.to_thread(earlier_line_index, document)
        if request.rows:
            return (await self._pages.parquets.read_rows(request.bucket, request.key, record)).document
        if request.table:
            return (
                await self._tables.read_table(request.bucket, request.key, record, request.slices)
            ).document
        if request.features:
            indexed = self._pages.tfrecords.index_file(request.bucket, request.key, record, request.features)
            return await asyncio.to_thread((await indexed).to_bytes)
        index = await self._archives.get_index(request.bucket, request.key, record)
        return await asyncio.to_thread(index.to_bytes)

    @handler(READ_PAGE)
    async def get_page(self, request: PageRequest, context: CallContext) -> bytes:
        """Return the document of a page; no bytes while it is being made. Raises BatchError BadRequest,
        BadSample, NoSuchKey, SnapshotChanged, Busy; NotHereError."""
        record = await self._indexable(request.bucket, request.key, request.etag)
        document = await self._pages.page_for_peer(request, record)
        if document is None and request.finished:
            raise BatchError("NoSuchKey", f"{self._mesh.node_id} has not made this page")
        return document or b""

    @handler(READ_PAGED_KINDS)
    async def get_paged_kinds(self, request: PagedKindsRequest, context: CallContext) -> PagedKindsResponse:
        """Return the kinds of snapshots of which this node reads pages."""
        return PagedKindsResponse(list(READABLE))

    async def _indexable(self, bucket: str, key: str, etag: str) -> Record:
        """Return the record as `_pinned_record` does; in a bucket with an origin, fetch the whole object to
        this node."""
        if not self._objects.has_origin(bucket):
            return self._pinned_record(bucket, key, etag)
        self._require_reader(bucket, key)
        record = await self._objects.find(bucket, key)
        if record is None or record.etag != etag:
            code: Code = "NoSuchKey" if record is None else "SnapshotChanged"
            raise BatchError(code, f"s3://{bucket}/{key} does not exist, or was replaced")
        return record

    @handler(READ_DOCUMENT)
    async def get_document(self, name: DocumentName, context: CallContext) -> bytes:
        """Return a document of the reserved bucket that other nodes may read. Raises BatchError NoSuchKey."""
        found = self._catalog.read_document(name.key) if name.key.startswith(PEER_READABLE_PREFIXES) else None
        if found is None:
            raise BatchError("NoSuchKey", "it is not here")
        return found

    @handler(STORE_DOCUMENT)
    async def put_document(self, name: DocumentName, context: CallContext) -> None:
        """Store a document that nodes share. Raises BatchError BadRequest."""
        document = await context.read_body()
        if not name.key.startswith(SHARED_PREFIXES):
            raise BatchError("BadRequest", f"{name.key[:80]!r} is not a shared document")
        await self._catalog.write_document(name.key, document, once=not name.again)

    @handler(LIST_DOCUMENTS)
    async def list_documents(self, request: InventoryRequest, context: CallContext) -> InventoryResponse:
        """Return a page of the shared documents that this node has. Raises BatchError BadRequest."""
        if not request.prefix.startswith(SHARED_PREFIXES):
            raise BatchError("BadRequest", f"{request.prefix[:80]!r} is nothing that nodes share")
        rows, after = await asyncio.to_thread(
            self._census.local_page, request.prefix, request.after, request.limit
        )
        found = [(key, held.size, held.made, held.used) for key, held in rows.items()]
        return InventoryResponse(found, after)


class FrameHandlers:
    """Handles calls for frames, from wherever this node gets them."""

    def __init__(self, frames: FrameSource) -> None:
        self._frames = frames

    @stream_handler(READ_FRAME)
    async def read_frame(self, address: AnyFrameAddress, context: CallContext) -> Frame:
        return await self._frames.get_frame(address)
