"""Objects of the whole mesh: records by name, bytes by ETag, documents, frames and listings.

The caller gets what it asked for or an error that says why not; a single node calls nobody. Code in
threads uses BlockingObjects, which waits for the event loop and must never run on the loop's own thread.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final, Protocol

from meshd.core import peer_messages
from meshd.core.api_errors import busy
from meshd.core.remote_source import ObjectRange, ReadFailure
from meshd.core.shared_memory import MemoryAccount
from meshd.errors import MeshdError
from meshd.peer_reads.fetch import MAX_ORIGIN_READS, PeerFetcher, PeerFrames, RendezvousFrameSource
from meshd.peer_reads.listing import ObjectListings
from meshd.peer_reads.remote_documents import PeerDocuments
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

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import BucketTable
    from meshd.core.frame_address import FrameSource
    from meshd.peer_reads.fetch import FetchedParts, NearCache, OriginReader
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import ObjectStore
    from meshd.store.records import Page, Record
    from meshwire.cluster import Node


class ObjectNames(Protocol):
    """What there is under names: a store, or the mesh."""

    def get(self, bucket: str, key: str) -> Record | None: ...

    def list(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> Page: ...


class BlockingObjects:
    """Made in the loop. Raises BatchError Busy where nodes do not answer."""

    def __init__(self, objects: RemoteObjects) -> None:
        self._objects, self._loop = objects, asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Waiting for {self._objects!r}>"

    def get(self, bucket: str, key: str) -> Record | None:
        """The current object."""
        found: Record | None = self._wait(self._objects.find(bucket, key))
        return found

    def list(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> Page:
        """As a store's; without delimiters."""
        assert not delimiter
        page: Page = self._wait(self._objects.page(bucket, prefix, after, limit))
        return page

    def read(self, bucket: str, key: str, record: Record, offset: int, length: int) -> bytes:
        """Bytes of an object, or of an archive's copy."""
        return self.read_part(ObjectRange(bucket, key, record.etag, record.size, offset, length))

    def read_part(self, part: ObjectRange) -> bytes:
        """The same of any bytes that are named by their object's ETag. Raises BatchError."""
        found: list[bytes] = self._wait(self._objects.read_many([part]))
        return found[0]

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


_PATIENCE: Final = 1.0  # seconds for a newer map


class RemoteObjects:
    """One a process. `store` is this node's own: what it holds it is asked for first. `buckets` knows which
    have origins; `origins` reads those, while this process can; `near` has copies, on a node that keeps
    some."""

    def __init__(
        self, store: ObjectStore, mesh: ClusterView, peers: PeerClient, buckets: BucketTable | None = None
    ) -> None:
        self._store, self._mesh, self._buckets = store, mesh, buckets
        self._memory = MemoryAccount()
        self._asking = ReplicaSelector(mesh, peers)
        self._listings = ObjectListings(store, self._asking)
        self._fetching = PeerFetcher(store, self._asking, self.backs)
        documents = PeerDocuments(self._asking)
        frames = self._frames = PeerFrames(self._asking, self._fetching, self._memory)
        self.document, self.documents, self.spread = documents.document, documents.documents, documents.spread
        continuing = ReadResumer(self._asking)
        self.rest, self.of_others = continuing.rest, continuing.of_others
        self.kept = documents.kept
        self.met, self.kept_frame, self.keep_frame = frames.met, frames.kept_frame, frames.keep_frame

    def __repr__(self) -> str:
        return f"<RemoteObjects of {self._mesh.node_id}>"

    @property
    def alone(self) -> bool:
        """Whether this node holds everything."""
        return self._mesh.alone and (self._buckets is None or not self._buckets.any_backed())

    def backs(self, bucket: str) -> bool:
        """Whether what is in a bucket lies at an origin."""
        return self._buckets is not None and bool(self._buckets.writes(bucket))

    @property
    def origins(self) -> OriginReader | None:
        """Who reads of origins."""
        return self._fetching.origins

    @origins.setter
    def origins(self, origins: OriginReader | None) -> None:
        self._fetching.origins = origins

    @property
    def near(self) -> NearCache | None:
        """The copies that this node keeps of what others hold."""
        return self._fetching.near

    @near.setter
    def near(self, near: NearCache | None) -> None:
        self._fetching.near = near

    async def aclose(self) -> None:
        """End what runs in the background."""
        await self._asking.aclose()

    # --- objects by name --------------------------------------------------------------------------------

    def others_hold(self, bucket: str, key: str) -> bool:
        """See Elsewhere.others_hold."""
        if self._mesh.alone or self.backs(bucket):
            return False
        readers = self._mesh.route(bucket, key).readers
        return any(node.node_id != self._mesh.node_id for node in readers)

    async def goes_by(self, version: int) -> bool:
        """See Elsewhere.goes_by."""
        if self._mesh.map().version < version:
            await self._mesh.newer_than(version - 1, _PATIENCE)
        return self._mesh.map().version == version

    def is_first(self, bucket: str, key: str) -> bool:
        """See Elsewhere.is_first."""
        readers = self._mesh.route(bucket, key).readers
        return bool(readers) and readers[0].node_id == self._mesh.node_id

    async def find(self, bucket: str, key: str) -> Record | None:
        """The current object's record, wherever it is. Raises BatchError Busy."""
        return (await self.many([(bucket, key)]))[0]

    async def many(self, names: Sequence[tuple[str, str]]) -> list[Record | None]:
        """The same of many, in their order, by one call a node. Raises BatchError Busy."""
        found: list[Record | None] = [None] * len(names)
        far, mine = list[int](), list[int]()
        for number, (bucket, key) in enumerate(names):
            if self.holds(bucket, key):
                found[number] = self._store.get(bucket, key)
            else:
                (mine if self._fetching.is_mine(bucket, key) else far).append(number)
        if mine:
            records = await gather_limited(
                MAX_ORIGIN_READS, [self._fetching.from_origins().find(*names[n]) for n in mine]
            )
            for number, record in zip(mine, records, strict=True):
                found[number] = record
        if far:
            await self._find_far(names, far, found)
        return found

    def own(self, names: Sequence[tuple[str, str]]) -> list[Record | None]:
        """The same by this node's own store alone (may be called in a thread)."""
        return [self._store.get(bucket, key) for bucket, key in names]

    async def _find_far(
        self, names: Sequence[tuple[str, str]], far: Sequence[int], found: list[Record | None]
    ) -> None:
        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            body = peer_messages.encode(peer_messages.FindRequest([names[number] for number in numbers]))
            answer = peer_messages.decode_find_response(
                await self._asking.post(node, peer_messages.FIND_PATH, body)
            )
            unknown = set(answer.unknown)
            for place, (number, record) in enumerate(zip(numbers, answer.records, strict=True)):
                if place not in unknown:
                    found[number] = record
            return [numbers[place] for place in unknown]

        left = await self._asking.holders({number: names[number] for number in far}, ask)
        if left:
            number, why = next(iter(left.items()))
            raise busy(f"s3://{names[number][0]}/{names[number][1]} cannot be looked up now: {why}")

    async def entries(self, bucket: str, prefix: str) -> list[tuple[str, Record]]:
        """Every object under a prefix, in order of UTF-8 bytes, as the nodes that decide have it, under one
        map, or its origin. Raises BatchError Busy: never a shorter list."""
        if self.backs(bucket):
            return await self._fetching.from_origins().entries(bucket, prefix)
        return await self._listings.entries(bucket, prefix)

    async def page(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """A page of them: those after `after`, at most `limit`. Raises BatchError Busy."""
        if self.backs(bucket):
            return await self._fetching.from_origins().page(bucket, prefix, after, limit)
        return await self._listings.page(bucket, prefix, after, limit)

    # --- bytes by ETag ----------------------------------------------------------------------------------

    def names(self, bucket: str) -> ObjectNames:
        """What threads may ask: this node's store, or all nodes by way of this loop."""
        return self._store if self._mesh.alone and not self.backs(bucket) else BlockingObjects(self)

    def revision(self, buckets: Sequence[str]) -> object:
        """Equal to an earlier one only if every name in these still stands for the same bytes: never, where
        other nodes or whoever uses an origin write, too."""
        lone = self._mesh.alone and not any(map(self.backs, buckets))
        return self._store.revision() if lone else object()

    def births(self, buckets: Sequence[str]) -> tuple[int, ...]:
        """When each bucket of these names was made, as far as this process knows buckets."""
        return () if self._buckets is None else tuple(map(self._buckets.born, buckets))

    def holds(self, bucket: str, key: str) -> bool:
        """Whether this node's own store says what there is under a name."""
        return not self.backs(bucket) and self._mesh.is_reader(bucket, key)

    def here(self, bucket: str, key: str, etag: str) -> Record | None:
        """The record of exactly this content, where this node has it, sound as far as is known."""
        if self.backs(bucket):
            return None if self.origins is None else self.origins.here(bucket, key, etag)
        record = self._store.get(bucket, key)
        if record is None or record.etag != etag or (record.broken and not self._mesh.alone):
            return None  # what is damaged here another owner has
        return record

    async def read(self, bucket: str, key: str, etag: str, offset: int, length: int) -> bytes:
        """Bytes of an object. Raises BatchError NoSuchKey, SnapshotChanged, CorruptData, Busy; StoreError."""
        return (await self.read_many([ObjectRange(bucket, key, etag, -1, offset, length)]))[0]

    async def read_many(self, parts: Sequence[ObjectRange]) -> list[bytes]:
        """The same of many parts, by one call a node. Raises as `read`, for the first that cannot be had."""
        found: list[bytes | None] = [None] * len(parts)
        far = []
        for number, part in enumerate(parts):
            record = self.here(part.bucket, part.key, part.etag)
            if record is None or part.size not in (-1, record.size):
                far.append(number)
            else:
                found[number] = await asyncio.to_thread(self._store.read, record, part.offset, part.length)
        if far and self.alone:
            raise missing_part_error(
                f"s3://{parts[far[0]].bucket}/{parts[far[0]].key}", ReadFailure("SnapshotChanged")
            )
        if far:
            fetched = await self.fetch([parts[number] for number in far], self._memory)
            try:
                for number, place in zip(far, fetched.places, strict=True):
                    if isinstance(place, ReadFailure):
                        raise missing_part_error(f"s3://{parts[number].bucket}/{parts[number].key}", place)
                    found[number] = os.pread(fetched.fd, place.length, place.offset)
            finally:
                fetched.close()
        return [data for data in found if data is not None]

    async def fetch(
        self, parts: Sequence[ObjectRange], memory: MemoryAccount, *, proven: bool = False
    ) -> FetchedParts:
        """See Elsewhere.fetch, and Fetching.fetch of `proven`."""
        return await self._fetching.fetch(parts, memory, proven=proven)

    async def own_part(self, part: ObjectRange) -> bytes:
        """A part of a bucket with an origin, for another node. Raises BatchError."""
        data = await self._fetching.from_origins().read(part)
        if isinstance(data, ReadFailure):
            raise missing_part_error(f"s3://{part.bucket}/{part.key}", data)
        return data

    async def bring(self, bucket: str, key: str, record: Record) -> None:
        """Have all of an object of a bucket with an origin here, where this node is to have it. Raises
        BatchError."""
        if self._fetching.is_mine(bucket, key):
            await self._fetching.from_origins().bring(bucket, key, record.etag, record.size)

    def used(self, bucket: str, key: str) -> None:
        """See Elsewhere.used."""
        if self.origins is not None and self.backs(bucket):
            self.origins.used(bucket, key)

    async def made(self, ask: peer_messages.ViewResultRequest) -> bytes | None:
        """A result of a view as the node makes it that reads the source at its origin; None: this node is to
        make it, for it is that one, or the other does not answer. Raises BatchError."""
        if self._mesh.alone or not self.backs(ask.bucket):
            return None
        for node in self._mesh.route(ask.bucket, ask.key).readers:  # of several homes the first, whoever asks
            if node.node_id == self._mesh.node_id:
                return None
            try:
                return await self._asking.post(
                    node, peer_messages.VIEW_RESULT_PATH, peer_messages.encode(ask)
                )
            except PeerRefusedError as error:
                if error.code != "NotHere":
                    raise peer_refusal_error(error) from error
            except MeshdError as error:
                self._asking.note(node, error)
        return None

    def frames_of(self, buckets: Iterable[str], frames: FrameSource) -> FrameSource:
        """Who is asked for frames that are made of these buckets: `frames`, or, where their bytes come from
        origins, the nodes at which they meet."""
        if self._mesh.alone or not any(map(self.backs, buckets)):
            return frames
        return RendezvousFrameSource(self._frames, frames)

    async def archive_index(
        self,
        bucket: str,
        key: str,
        record: Record,
        *,
        lines: bool = False,
        rows: bool = False,
        features: Sequence[str] = (),
    ) -> bytes:
        """The document of the index of an archive (a file of lines, of Parquet's rows, or of TFRecords with
        these `features`) that other nodes hold. Raises BatchError BadSample and what else the holder says;
        Busy."""
        body = peer_messages.encode(
            peer_messages.IndexRequest(bucket, key, record.etag, lines, rows, list(features))
        )
        found: list[bytes] = []
        refused: list[PeerRefusedError] = []

        async def ask(node: Node, numbers: Sequence[int]) -> list[int]:
            try:
                found.append(await self._asking.post(node, peer_messages.INDEX_PATH, body))
            except PeerRefusedError as error:
                if error.code == "NotHere":
                    return list(numbers)
                refused.append(error)
            return []

        left = await self._asking.holders({0: (bucket, key)}, ask)
        if refused:
            raise peer_refusal_error(refused[0])
        if not found:
            raise busy(f"s3://{bucket}/{key} cannot be read now: {left.get(0, '')}")
        return found[0]
