"""Objects of the whole mesh: records by name, bytes by ETag, documents, frames and listings.

The caller gets what it asked for, or an error with the reason; a single node makes no calls. Code in
threads uses BlockingObjects, which waits for the event loop and must never run on the loop's own thread.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final, Protocol

from meshd.control.paged_kinds import PagedKindTable
from meshd.core import peer_messages
from meshd.core.api_errors import busy
from meshd.core.memory_frames import MemoryAccount
from meshd.core.peer_source import ObjectRange, ReadFailure
from meshd.errors import MeshdError
from meshd.peer_reads.changed_names import ChangedNames
from meshd.peer_reads.listing import ObjectListings
from meshd.peer_reads.peer_documents import PeerDocuments
from meshd.peer_reads.peer_fetcher import MAX_ORIGIN_READS, PeerFetcher
from meshd.peer_reads.peer_frames import PeerFrames, RendezvousFrameSource
from meshd.peer_reads.peer_snapshot_pages import PagedSnapshotSupport, PeerSnapshotPages
from meshd.peer_reads.replica_selection import (
    ReplicaSelector,
    gather_limited,
    missing_part_error,
    peer_refusal_error,
)
from meshd.peer_reads.resume_read import ReadResumer
from meshd.rpc.peer_client import PeerRefusedError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import BucketTable
    from meshd.core.frame_address import FrameSource
    from meshd.core.listing_columns import KeyFilter, ListingColumns
    from meshd.peer_reads.changed_names import MeshRevision
    from meshd.peer_reads.peer_fetcher import FetchedParts, NearCache, OriginReader
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import StoreReader
    from meshd.store.records import Page, Record, StoreChanges
    from meshwire.cluster import Node


class ObjectNames(Protocol):
    """Look-up and listing of objects by name: in one store, or in the whole mesh."""

    def get(self, bucket: str, key: str) -> Record | None: ...

    def list(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> Page: ...


class BlockingObjects:
    """Objects of the mesh for code in threads. Create it in the event loop. Its methods raise BatchError Busy
    if nodes do not answer."""

    def __init__(self, objects: RemoteObjects) -> None:
        self._objects, self._loop = objects, asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<BlockingObjects for {self._objects!r}>"

    def get(self, bucket: str, key: str) -> Record | None:
        """Return the current object's record, or None."""
        found: Record | None = self._wait(self._objects.find(bucket, key))
        return found

    def list(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> Page:
        """Return a page like a store's, without delimiters."""
        assert not delimiter
        page: Page = self._wait(self._objects.list_page(bucket, prefix, after, limit))
        return page

    def read_range(self, bucket: str, key: str, record: Record, offset: int, length: int) -> bytes:
        """Read bytes of an object, or of an archive's decompressed copy."""
        return self.read_part(ObjectRange(bucket, key, record.etag, record.size, offset, length))

    def read_part(self, part: ObjectRange) -> bytes:
        """Read bytes that are named by their object's ETag. Raises BatchError."""
        found: list[bytes] = self._wait(self._objects.read_parts([part]))
        return found[0]

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


_PATIENCE: Final = 1.0  # seconds for a newer map


class RemoteObjects:
    """The objects of the mesh. One instance per process. `store` is this node's own, which is asked first;
    `buckets` knows which buckets have origins; `origins` reads those, None if this process cannot;
    `near_cache` is this node's near cache, if it has one.

    `documents` are the shared documents of other nodes, `frames` their frames; `resumer` reads the rest of a
    response from another replica.
    """

    def __init__(
        self,
        store: StoreReader,
        mesh: ClusterView,
        peers: PeerClient,
        buckets: BucketTable | None = None,
        origins: OriginReader | None = None,
        near_cache: NearCache | None = None,
    ) -> None:
        self._store, self._mesh, self._buckets = store, mesh, buckets
        self._origins, self.near_cache = origins, near_cache
        self._memory = MemoryAccount()
        self._selector = ReplicaSelector(mesh, peers)
        self._listings = ObjectListings(store, self._selector)
        self._changed_names = ChangedNames(store, mesh, peers, self._listings)
        self._fetcher = PeerFetcher(store, self._selector, self.has_origin, origins, near_cache)
        self.documents = PeerDocuments(self._selector)
        self.frames = PeerFrames(self._selector, near_cache, self._memory)
        self.resumer = ReadResumer(self._selector)
        self.page_support, self.pages = (
            PagedSnapshotSupport(mesh, peers, PagedKindTable(mesh.control)),
            PeerSnapshotPages(self._selector),
        )

    def __repr__(self) -> str:
        return f"<RemoteObjects of {self._mesh.node_id}>"

    @property
    def single_node(self) -> bool:
        """Whether this node holds everything."""
        return self._mesh.single_node and (self._buckets is None or not self._buckets.has_backed_buckets())

    def has_origin(self, bucket: str) -> bool:
        """Whether the bucket has an origin."""
        return self._buckets is not None and bool(self._buckets.origin_write_mode(bucket))

    # --- objects by name --------------------------------------------------------------------------------

    def has_peer_copies(self, bucket: str, key: str) -> bool:
        """Whether other nodes have copies of an object; see `PeerSource.has_peer_copies`."""
        if self._mesh.single_node or self.has_origin(bucket):
            return False
        readers = self._mesh.route_for(bucket, key).read_set
        return any(node.node_id != self._mesh.node_id for node in readers)

    async def reaches_map_version(self, version: int) -> bool:
        """Whether this node uses map `version`; see `PeerSource.reaches_map_version`."""
        if self._mesh.current_map().version < version:
            await self._mesh.wait_for_newer_map(version - 1, _PATIENCE)
        return self._mesh.current_map().version == version

    def is_first_replica(self, bucket: str, key: str) -> bool:
        """Whether this node is asked first for an object; see `PeerSource.is_first_replica`."""
        readers = self._mesh.route_for(bucket, key).read_set
        return bool(readers) and readers[0].node_id == self._mesh.node_id

    def slots_read_here(self, bucket: str, *, first_only: bool) -> npt.NDArray[np.bool_] | None:
        """The slots of a bucket that this node reads; see `PeerSource.slots_read_here`."""
        return None if self._mesh.single_node else self._mesh.slots_read_here(bucket, first_only=first_only)

    async def find(self, bucket: str, key: str) -> Record | None:
        """Return the current object's record from the node that has it. Raises BatchError Busy."""
        return (await self.find_many([(bucket, key)]))[0]

    async def find_many(self, names: Sequence[tuple[str, str]]) -> list[Record | None]:
        """Return the records of many objects, in order, with one call per node. Raises BatchError Busy."""
        found: list[Record | None] = [None] * len(names)
        far, mine = list[int](), list[int]()
        for number, (bucket, key) in enumerate(names):
            if self.is_local(bucket, key):
                found[number] = self._store.get(bucket, key)
            else:
                (mine if self._fetcher.reads_from_origin(bucket, key) else far).append(number)
        if mine:
            records = await gather_limited(
                MAX_ORIGIN_READS, [self._fetcher.require_origins().find_record(*names[n]) for n in mine]
            )
            for number, record in zip(mine, records, strict=True):
                found[number] = record
        if far:
            await self._find_remote(names, far, found)
        return found

    def find_local(self, names: Sequence[tuple[str, str]]) -> list[Record | None]:
        """Return the records that this node's own store has (may be called in a thread)."""
        return [self._store.get(bucket, key) for bucket, key in names]

    async def _find_remote(
        self, names: Sequence[tuple[str, str]], far: Sequence[int], found: list[Record | None]
    ) -> None:
        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            request = peer_messages.FindRequest([names[number] for number in numbers])
            answer = await self._selector.peers.call_typed(node, peer_messages.FIND_RECORDS, request)
            unknown = set(answer.unknown)
            for place, (number, record) in enumerate(zip(numbers, answer.records, strict=True)):
                if place not in unknown:
                    found[number] = record
            return [numbers[place] for place in unknown]

        left = await self._selector.ask_replicas({number: names[number] for number in far}, ask)
        if left:
            number, why = next(iter(left.items()))
            raise busy(f"s3://{names[number][0]}/{names[number][1]} cannot be looked up now: {why}")

    async def list_entries(self, bucket: str, prefix: str) -> list[tuple[str, Record]]:
        """Return every object under a prefix, in order of UTF-8 bytes, from the primaries under one map or
        from the origin. Raises BatchError Busy instead of returning an incomplete list."""
        return (await self.list_revision(bucket, prefix))[0]

    async def list_revision(self, bucket: str, prefix: str) -> tuple[list[tuple[str, Record]], object | None]:
        """Return what `list_entries` does, and for a bucket with an origin which listing that is, as
        `listing_revision` returns it."""
        if self.has_origin(bucket):
            found, revision = await self._fetcher.require_origins().entries(bucket, prefix)
            assert isinstance(found, list)  # nothing was asked for in columns
            return found, revision
        return await self._listings.list_entries(bucket, prefix), None

    async def list_columns(
        self, bucket: str, prefix: str, plain: KeyFilter
    ) -> tuple[ListingColumns | list[tuple[str, Record]] | None, object | None]:
        """Return what `list_revision` does in columns, which take a tenth of the memory. If `plain` does not
        accept the keys of a page: the records of a bucket with an origin, which has been listed; else None.
        Raises BatchError Busy, and what `plain` raises."""
        if self.has_origin(bucket):
            return await self._fetcher.require_origins().entries(bucket, prefix, plain)
        return await self._listings.list_columns(bucket, prefix, plain), None

    async def list_page(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """Return a page of these objects: at most `limit`, after `after`. Raises BatchError Busy."""
        if self.has_origin(bucket):
            return await self._fetcher.require_origins().page(bucket, prefix, after, limit)
        return await self._listings.list_page(bucket, prefix, after, limit)

    # --- bytes by ETag ----------------------------------------------------------------------------------

    def blocking_names(self, bucket: str) -> ObjectNames:
        """Return what threads may use: this node's store, or all nodes through this event loop."""
        return (
            self._store if self._mesh.single_node and not self.has_origin(bucket) else BlockingObjects(self)
        )

    def revision(self, buckets: Sequence[str]) -> object:
        """Return a value that equals an earlier one only if every name in these buckets still stands for the
        same bytes. Where other nodes or clients of an origin write, it never does."""
        local_only = self._mesh.single_node and not any(map(self.has_origin, buckets))
        return self._store.revision() if local_only else object()

    async def listing_revision(self, bucket: str, prefix: str) -> object:
        """Return `revision` of a bucket; for one with an origin, a value that stays equal while the last
        listing of the prefix is current by the TTL of the bucket, and the mesh has not written to it."""
        known = None
        if self._origins is not None and self.has_origin(bucket):
            known = await self._origins.listing_revision(bucket, prefix)
        return self.revision([bucket]) if known is None else known

    async def changes_since(
        self, bucket: str, prefix: str, seen: MeshRevision | None
    ) -> tuple[MeshRevision, StoreChanges | None] | None:
        """Return what changed below a prefix, in a mesh of several nodes; see `ChangedNames.since`. None for
        a bucket with an origin, whose other clients nobody sees."""
        if self.has_origin(bucket):
            return None
        return await self._changed_names.since(bucket, prefix, seen)

    def bucket_creation_times(self, buckets: Sequence[str]) -> tuple[int, ...]:
        """Return when each of these buckets was created; empty if this process has no table of buckets."""
        return () if self._buckets is None else tuple(map(self._buckets.created_at_ms, buckets))

    def is_local(self, bucket: str, key: str) -> bool:
        """Whether this node's own store is authoritative for a name."""
        return not self.has_origin(bucket) and self._mesh.is_reader(bucket, key)

    def local_record(self, bucket: str, key: str, etag: str) -> Record | None:
        """Return the record with exactly this content if this node has it and knows of no damage, else
        None."""
        if self.has_origin(bucket):
            return None if self._origins is None else self._origins.cached_record(bucket, key, etag)
        record = self._store.get(bucket, key)
        if record is None or record.etag != etag or (record.broken and not self._mesh.single_node):
            return None  # damaged here: another owner has it
        return record

    async def read_range(self, bucket: str, key: str, etag: str, offset: int, length: int) -> bytes:
        """Read bytes of an object. Raises BatchError NoSuchKey, SnapshotChanged, CorruptData, Busy;
        StoreError."""
        return (await self.read_parts([ObjectRange(bucket, key, etag, -1, offset, length)]))[0]

    async def read_parts(self, parts: Sequence[ObjectRange]) -> list[bytes]:
        """Read many parts with one call per node. Raises as `read_range` does, for the first part that is
        lost."""
        found: list[bytes | None] = [None] * len(parts)
        far = []
        for number, part in enumerate(parts):
            record = self.local_record(part.bucket, part.key, part.etag)
            if record is None or part.size not in (-1, record.size):
                far.append(number)
            else:
                found[number] = await asyncio.to_thread(
                    self._store.read_range, record, part.offset, part.length
                )
        if far and self.single_node:
            raise missing_part_error(
                f"s3://{parts[far[0]].bucket}/{parts[far[0]].key}", ReadFailure("SnapshotChanged")
            )
        if far:
            fetched = await self.fetch_parts([parts[number] for number in far], self._memory)
            try:
                for number, place in zip(far, fetched.places, strict=True):
                    if isinstance(place, ReadFailure):
                        raise missing_part_error(f"s3://{parts[number].bucket}/{parts[number].key}", place)
                    found[number] = os.pread(fetched.fd, place.length, place.offset)
            finally:
                fetched.close()
        return [data for data in found if data is not None]

    async def fetch_parts(
        self, parts: Sequence[ObjectRange], memory: MemoryAccount, *, proven: bool = False
    ) -> FetchedParts:
        """Fetch these bytes; see `PeerFetcher.fetch_parts`."""
        return await self._fetcher.fetch_parts(parts, memory, proven=proven)

    async def load_parts(self, parts: Sequence[ObjectRange]) -> None:
        """Have other nodes load these bytes; see `PeerFetcher.load_parts`."""
        await self._fetcher.load_parts(parts)

    async def read_origin_part(self, part: ObjectRange) -> bytes:
        """Read a part of an object in a bucket with an origin, for another node. Raises BatchError."""
        data = await self._fetcher.require_origins().read_range(part)
        if isinstance(data, ReadFailure):
            raise missing_part_error(f"s3://{part.bucket}/{part.key}", data)
        return data

    async def fetch_whole(self, bucket: str, key: str, record: Record) -> None:
        """Fetch the whole object into the cache if its bucket has an origin and this node is in the read set
        of the name. Raises BatchError."""
        if self._fetcher.reads_from_origin(bucket, key):
            await self._fetcher.require_origins().fetch_into_cache(bucket, key, record.etag, record.size)

    async def hold_whole(self, bucket: str, key: str, record: Record) -> Record | None:
        """Return the record of an object that this node has whole: `record` itself if it is one of this node,
        or that of a copy in the cache, which is fetched if it may be. None: other nodes have the object.

        Raises BatchError.
        """
        if not isinstance(record, peer_messages.RemoteRecord):
            return record
        await self.fetch_whole(bucket, key, record)
        return self.local_record(bucket, key, record.etag)

    def record_use(self, bucket: str, key: str) -> None:
        """Record that this node's own copy is about to be read; see `PeerSource.record_use`."""
        if self._origins is not None and self.has_origin(bucket):
            self._origins.record_use(bucket, key)

    async def fetch_view_result(self, ask: peer_messages.ViewResultRequest) -> bytes | None:
        """Return a view's result from the node that reads the source from its origin. None if that is this
        node or no such node answers: then this node makes the result. Raises BatchError."""
        if self._mesh.single_node or not self.has_origin(ask.bucket):
            return None
        # The first of the read set, whichever node asks, so that one node makes each result.
        for node in self._mesh.route_for(ask.bucket, ask.key).read_set:
            if node.node_id == self._mesh.node_id:
                return None
            try:
                return await self._selector.peers.call_typed(node, peer_messages.MAKE_VIEW_RESULT, ask)
            except PeerRefusedError as error:
                if error.code != "NotHere":
                    raise peer_refusal_error(error) from error
            except MeshdError as error:
                self._selector.report_unreachable(node, error)
        return None

    def frame_source_for(self, buckets: Iterable[str], frames: FrameSource) -> FrameSource:
        """Return the source of frames made from these buckets: `frames`, or, if one of the buckets has an
        origin, the node that is assigned each frame."""
        if self._mesh.single_node or not any(map(self.has_origin, buckets)):
            return frames
        return RendezvousFrameSource(self.frames, frames)

    async def fetch_index(
        self,
        bucket: str,
        key: str,
        record: Record,
        *,
        lines: bool = False,
        rows: bool = False,
        features: Sequence[str] = (),
        table: bool = False,
        slices: int = 0,
    ) -> bytes:
        """Fetch the index document of an archive on other nodes, or of a file of lines, of Parquet rows, of
        (slices of) a table, or of TFRecords with these `features`. Raises BatchError BadSample and other
        codes of the node that has it; Busy."""
        asked = (lines, rows, list(features), table, slices)
        request = peer_messages.IndexRequest(bucket, key, record.etag, *asked)
        found: list[bytes] = []
        refused: list[PeerRefusedError] = []

        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            try:
                found.append(await self._selector.peers.call_typed(node, peer_messages.READ_INDEX, request))
            except PeerRefusedError as error:
                if error.code == "NotHere":
                    return list(numbers)
                refused.append(error)
            return []

        left = await self._selector.ask_replicas({0: (bucket, key)}, ask)
        if refused:
            raise peer_refusal_error(refused[0])
        if not found:
            raise busy(f"s3://{bucket}/{key} cannot be read now: {left.get(0, '')}")
        return found[0]
