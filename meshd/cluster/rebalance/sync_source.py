"""Sync source: serves digests, inventories, metadata and data to nodes that compare with this one.

`SyncPeer` is the other side of a comparison; `RemoteSyncPeer` asks another node over the network.

Law: read-only. Index scans yield to the event loop after every slice; data is read in threads and
verified against its checksums before it is sent. A caller with a newer map waits until this node has that map
too, and from then on no process of this node writes under an older one: earlier writes appear in the
comparison, later ones reach the caller as a member of the write set.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np

from meshd.cluster.rebalance.disk_order import CHUNK_ITEMS, chunks_in_disk_order
from meshd.cluster.rebalance.sync_plan import INTERNAL_BUCKET, Item, Scope, ScopeFilter, SlotDigests  # noqa: TC001  msgspec reads annotations
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError, StaleMapError
from meshd.rpc.peer_rpc import PREFIX, BodyFramingError, PeerCall, ResponseStream, handler, stream_handler
from meshd.store.disks.page_loader import CHUNK_BYTES, PageLoader, places_by_disk
from meshd.store.errors import CorruptExtentError, StoreError
from meshd.store.integrity.verification import StreamVerifier, read_chunks, read_spans
from meshd.store.records import NULL, Record, Upload, UploadedPart  # noqa: TC001  likewise
from meshd.store.replica.changes import (
    part_without_local_fields,
    upload_without_local_fields,
    without_local_fields,
)
from meshd.store.replica.inventory import InventoryPage
from meshd.util.shared_counters import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.records import Location, Span
    from meshd.store.store import Store
    from meshwire.cluster import Node

Request = TypeVar("Request")
Response = TypeVar("Response")
_SLICE: Final = 100  # names read before yielding to the event loop: a millisecond
_MAX_LOOKUPS: Final = 40_000  # per call: the response must arrive before the caller's timeout
_SMALL: Final = 1 << 20
_BATCH: Final = 64
_PIECE: Final = 1 << 20
_CHUNKS_AHEAD: Final = 4
"""Chunks that are loaded while another one is sent, of different disks where there are several."""
_U64: Final = np.dtype("<u8")


class DigestsRequest(msgspec.Struct, frozen=True, array_like=True):
    """Requests digests of names after `after`, without removals up to `forgotten`."""

    scope: Scope
    forgotten: int
    after: bytes = b""


class DigestsResponse(msgspec.Struct, frozen=True, array_like=True):
    """`sums` and `sizes` (bytes held): uint64[slots], to be added over all responses; `since`: all removals
    with a higher stamp are still recorded; `after`: b"" if there are no more names."""

    sums: bytes
    names: int
    since: int
    after: bytes = b""
    sizes: bytes = b""

    def sum_array(self) -> Any:
        return np.frombuffer(self.sums, _U64)

    def size_array(self) -> Any:
        return np.frombuffer(self.sizes, _U64)


class InventoryRequest(msgspec.Struct, frozen=True, array_like=True):
    """Requests an inventory page of names after `after`."""

    scope: Scope
    after: bytes = b""
    limit: int = 1000


class DocumentsRequest(msgspec.Struct, frozen=True, array_like=True):
    """Requests names of shared documents that begin with `prefix`, after `after`."""

    prefix: str
    after: str = ""
    limit: int = 1000


class FetchRequest(msgspec.Struct, frozen=True, array_like=True):
    """Requests metadata and bytes of these items. `any_order`: the replies may come in the order of the
    disks; a node of an earlier release keeps the order of the request."""

    items: tuple[Item, ...]
    any_order: bool = False


class FetchFrame(msgspec.Struct, frozen=True, array_like=True):
    """The reply to item `number` of the request; `size` bytes follow. `lost`: why this node cannot supply
    it."""

    number: int
    size: int = 0
    record: Record | None = None
    upload: Upload | None = None
    part: UploadedPart | None = None
    lost: str = ""


def _move_call(what: str, request: type[Request], response: type[Response]) -> PeerCall[Request, Response]:
    """A call of a rebalance. These have connections of their own, which can be handed off."""
    return PeerCall(
        f"{PREFIX}moves/{what}",
        request=request,
        response=response,
        max_bytes=4 << 20,
        timeout=60.0,
        pool="moves",
        map_wait=5.0,
        malformed_code="InvalidRequest",
    )


READ_DIGESTS: Final = _move_call("digests", DigestsRequest, DigestsResponse)
READ_INVENTORY: Final = _move_call("inventory", InventoryRequest, InventoryPage)
LIST_DOCUMENTS: Final = _move_call("documents", DocumentsRequest, list[str])
FETCH_ITEMS: Final = _move_call("fetch", FetchRequest, ResponseStream)
encode: Final = msgspec.msgpack.Encoder().encode


async def _yield_to_loop(size: int) -> None:
    await asyncio.sleep(0)


class SyncSource:
    """Serves the comparison requests of other nodes. One per process. `damaged` is called with name and stamp
    of versions whose bytes fail their checksum; `rest` is awaited with the bytes of each piece of work."""

    def __init__(
        self,
        store: Store,
        copies_of: Callable[[str], int],
        damaged: Callable[[bytes, int], None] = lambda name, stamp: None,
        rest: Callable[[int], Awaitable[None]] = _yield_to_loop,
        loader: PageLoader | None = None,
    ) -> None:
        self._store, self._copies_of, self._damaged, self._rest = store, copies_of, damaged, rest
        self._loader = loader or PageLoader()

    def __repr__(self) -> str:
        return f"<SyncSource of {self._store!r}>"

    async def read_digests(self, wanted: DigestsRequest) -> DigestsResponse:
        """Returns digests; see DigestsResponse."""
        wants, after = ScopeFilter(wanted.scope, self._copies_of), wanted.after
        found = SlotDigests(wanted.scope.slots, wanted.forgotten)
        for _ in range(_MAX_LOOKUPS // _SLICE):
            page = self._store.inventory.read_page(wants, after, limit=_SLICE, max_visited=_SLICE)
            found.add_names(page.names)
            after = page.after
            if not after:
                break
            await self._rest(PIECE_BYTES)
        sums, sizes = (each.astype(_U64).tobytes() for each in (found.sums(), found.sizes()))
        return DigestsResponse(
            sums, found.names, self._store.inventory.tombstones_complete_since(), after, sizes
        )

    async def list_documents(self, wanted: DocumentsRequest) -> list[str]:
        """Returns the next names; fewer than the limit means that they are the last."""
        bucket, limit = INTERNAL_BUCKET.decode(), min(wanted.limit, _SLICE)
        page = self._store.list(bucket, prefix=wanted.prefix, after=wanted.after, limit=limit)
        return [key for key, _ in page.entries]

    async def fence_writes(self, version: int) -> None:
        """Fences off writes of this node under maps before `version`: those committed are in the responses
        from now on, all others fail."""
        await self._store.raise_fence(version)

    async def read_inventory(self, wanted: InventoryRequest) -> InventoryPage:
        """Returns the next names, perhaps none yet, and where to continue."""
        wants, after = ScopeFilter(wanted.scope, self._copies_of), wanted.after
        names: list[Any] = []
        for _ in range(_MAX_LOOKUPS // _SLICE):
            room = min(_SLICE, wanted.limit - len(names))
            page = self._store.inventory.read_page(wants, after, limit=room, max_visited=_SLICE)
            names += page.names
            after = page.after
            if not after or len(names) >= wanted.limit:
                break
            await self._rest(PIECE_BYTES)
        return InventoryPage(tuple(names), after, self._store.inventory.tombstones_complete_since())

    async def fetch_frames(self, wanted: FetchRequest) -> AsyncGenerator[bytes, None]:
        """Yields four bytes of length, the frame and the bytes of each item. A failure within a large item
        ends the stream. Raises CorruptExtentError, DiskFailedError."""
        loading: deque[asyncio.Task[list[_Found]]] = deque()
        queues: _Queues = defaultdict(asyncio.Lock)
        try:
            for chunk in await self._chunks(wanted):
                loading.append(asyncio.ensure_future(self._load_chunk(wanted, chunk, queues)))
                if len(loading) > _CHUNKS_AHEAD:
                    async for piece in self._frames(await loading.popleft()):
                        yield piece
            while loading:
                async for piece in self._frames(await loading.popleft()):
                    yield piece
        finally:
            for task in loading:
                task.cancel()
            await asyncio.gather(*loading, return_exceptions=True)

    async def _chunks(self, wanted: FetchRequest) -> Sequence[Sequence[int]]:
        """Returns the numbers of the items in the order of the reply, those that are loaded together at a
        time."""
        if not wanted.any_order:
            last = len(wanted.items)
            return [range(at, min(at + CHUNK_ITEMS, last)) for at in range(0, last, CHUNK_ITEMS)]
        places = []
        for number, item in enumerate(wanted.items):
            if number % _SLICE == 0:
                await self._rest(PIECE_BYTES)
            source = self._metadata(number, item)[1]
            places.append(None if source is None or not source.extents else source.extents[0])
        return await asyncio.to_thread(chunks_in_disk_order, places)

    async def _load_chunk(self, wanted: FetchRequest, chunk: Sequence[int], queues: _Queues) -> list[_Found]:
        """Looks up some items, and loads the bytes of small ones; `queues`: of the request, by disk."""
        found: list[_Found] = []
        places: dict[int, list[Location]] = defaultdict(list)
        for number in chunk:
            item = wanted.items[number]
            frame, source = self._metadata(number, item)
            found.append(_Found(item, frame, source or _EMPTY))
            if source is not None and source.size <= _SMALL:
                for disk, there in self._places(source, 0, source.size).items():
                    places[disk] += there
        for disk, there in places.items():
            async with queues[disk]:  # requests of several nodes take turns
                await self._loader.load(disk, there)
        return found

    def _places(self, source: Record, start: int, length: int) -> Mapping[int, list[Location]]:
        try:
            return places_by_disk(source, self._store.locate(source), start, length)
        except StoreError:  # the reader of these bytes reports it
            return {}

    async def _frames(self, found: Sequence[_Found]) -> AsyncIterator[bytes]:
        small: list[_Found] = []
        for each in found:
            if each.source.size > _SMALL:
                if small:
                    yield await self._small_frames(small)
                    small = []
                async for piece in self._large_frame(each.frame, each.source, each.item):
                    yield piece
                    await self._rest(len(piece))
                continue
            small.append(each)
            if len(small) == _BATCH or sum(one.source.size for one in small) > _SMALL:
                answer = await self._small_frames(small)
                yield answer
                small = []
                await self._rest(len(answer))
        if small:
            yield await self._small_frames(small)

    def _metadata(self, number: int, item: Item) -> tuple[FetchFrame, Record | None]:
        """Returns the frame and the record to read its bytes from."""
        bucket, key = split_name(item.name)
        if item.kind in ("version", "amendment"):
            record = self._store.get_version(bucket, key, item.what or NULL)
            if record is None or record.stamp != item.stamp:
                return FetchFrame(number, lost="gone"), None
            if item.kind == "amendment" or record.marker:
                return FetchFrame(number, record=without_local_fields(record)), None
            return FetchFrame(number, record.size, without_local_fields(record)), record
        upload = self._store.get_upload(bucket, key, item.what)
        if upload is None:
            return FetchFrame(number, lost="gone"), None
        if item.kind == "upload":
            return FetchFrame(number, upload=upload_without_local_fields(upload)), None
        page = self._store.list_parts(upload, item.number - 1, 1)
        if not page.parts or (page.parts[0].number, page.parts[0].stamp) != (item.number, item.stamp):
            return FetchFrame(number, lost="gone"), None
        part = page.parts[0]
        source = Record(part.size, part.etag, part.stamp, part.modified, part.extents)
        return FetchFrame(
            number,
            part.size,
            upload=upload_without_local_fields(upload),
            part=part_without_local_fields(part),
        ), source

    async def _small_frames(self, small: Sequence[_Found]) -> bytes:
        with self._store.open_spans_many([(source, 0, source.size) for *_, source in small]) as found:
            bodies = await asyncio.shield(asyncio.to_thread(_read_small, found))
        answer = []
        for (item, frame, _), body in zip(small, bodies, strict=True):
            if body is None:
                self._damaged(item.name, item.stamp)
            told = frame if body is not None else FetchFrame(frame.number, lost="damaged")
            head = encode(told)
            answer += [len(head).to_bytes(4, "big"), head, body or b""]
        return b"".join(answer)

    async def _large_frame(self, frame: FetchFrame, source: Record, item: Item) -> AsyncIterator[bytes]:
        try:
            with self._store.open_spans(source, 0, source.size) as spans:
                head = encode(frame)
                yield len(head).to_bytes(4, "big") + head
                sent = loaded = 0
                async with aclosing(read_chunks(spans, _PIECE)) as pieces:
                    while sent < source.size:
                        if sent + _PIECE > loaded:
                            for disk, there in self._places(source, loaded, CHUNK_BYTES).items():
                                await self._loader.load(disk, there)
                            loaded += CHUNK_BYTES
                        piece = await anext(pieces)
                        sent += len(piece)
                        yield piece
        except CorruptExtentError:
            self._damaged(item.name, item.stamp)
            raise


_EMPTY: Final = Record(0, "", 0, 0, ())


_Queues: TypeAlias = "defaultdict[int, asyncio.Lock]"


class _Found(NamedTuple):
    """An item as it was looked up: its frame and the record to read its bytes from."""

    item: Item
    frame: FetchFrame
    source: Record


def split_name(name: bytes) -> tuple[str, str]:
    bucket, _, key = name.partition(b"\0")
    return bucket.decode(), key.decode()


def _read_small(found: Sequence[Sequence[Span] | None]) -> list[bytes | None]:
    """Returns the bytes of each item; None if they cannot be read or are damaged (blocking)."""
    bodies: list[bytes | None] = []
    for spans in found:
        try:
            bodies.append(None if spans is None else read_spans(spans, StreamVerifier())[0])
        except (StoreError, OSError):
            bodies.append(None)
    return bodies


class SyncPeerLostError(Exception):
    """The peer does not answer or sent incomplete data: try again later."""


class SyncPeer(Protocol):
    """A node to compare with; see `SyncSource`. Raises SyncPeerLostError."""

    async def read_digests(self, wanted: DigestsRequest) -> DigestsResponse: ...

    async def read_inventory(self, wanted: InventoryRequest) -> InventoryPage: ...

    async def list_documents(self, wanted: DocumentsRequest) -> list[str]: ...

    def fetch_frames(self, wanted: FetchRequest) -> AsyncGenerator[bytes, None]: ...


class RemoteSyncPeer:
    """Compares with another node over the network."""

    def __init__(self, peers: PeerClient, node: Node) -> None:
        self._peers, self._node = peers, node

    def __repr__(self) -> str:
        return f"<RemoteSyncPeer {self._node.node_id}>"

    async def read_digests(self, wanted: DigestsRequest) -> DigestsResponse:
        return await self._call(READ_DIGESTS, wanted)

    async def read_inventory(self, wanted: InventoryRequest) -> InventoryPage:
        return await self._call(READ_INVENTORY, wanted)

    async def list_documents(self, wanted: DocumentsRequest) -> list[str]:
        return await self._call(LIST_DOCUMENTS, wanted)

    async def _call(self, call: PeerCall[Request, Response], wanted: Request) -> Response:
        try:
            return await self._peers.call_typed(self._node, call, wanted)
        except (PeerUnreachableError, PeerRefusedError, BodyFramingError) as error:
            raise SyncPeerLostError(str(error)) from error

    async def fetch_frames(self, wanted: FetchRequest) -> AsyncGenerator[bytes, None]:
        try:
            async with self._peers.open_typed(self._node, FETCH_ITEMS, wanted) as answer:
                async for piece in answer.iter_body():
                    yield piece
        except (PeerUnreachableError, PeerRefusedError, BodyFramingError) as error:
            raise SyncPeerLostError(str(error)) from error


class RebalanceHandlers:
    """`source` of this node's store."""

    def __init__(self, source: SyncSource, mesh: ClusterView) -> None:
        self._source, self._mesh = source, mesh

    @handler(READ_DIGESTS)
    async def read_digests(self, wanted: DigestsRequest, context: CallContext) -> DigestsResponse:
        self._require_map(context)
        if not wanted.after:
            await self._source.fence_writes(context.map_version)
        return await self._source.read_digests(wanted)

    @handler(READ_INVENTORY)
    async def read_inventory(self, wanted: InventoryRequest, context: CallContext) -> InventoryPage:
        self._require_map(context)
        return await self._source.read_inventory(wanted)

    @handler(LIST_DOCUMENTS)
    async def list_documents(self, wanted: DocumentsRequest, context: CallContext) -> list[str]:
        self._require_map(context)
        return await self._source.list_documents(wanted)

    @stream_handler(FETCH_ITEMS)
    def fetch_items(self, wanted: FetchRequest, context: CallContext) -> AsyncIterator[bytes]:
        self._require_map(context)
        return self._source.fetch_frames(wanted)

    def _require_map(self, context: CallContext) -> None:
        """Raises StaleMapError while this node has an older map than the caller."""
        version = self._mesh.current_map().version
        if version < context.map_version:
            raise StaleMapError(version)
