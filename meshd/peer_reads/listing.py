"""Listings over all nodes: each primary lists its own names, and the pages are merged.

A listing fails when a node cannot be asked; it is never shorter. All pages of one listing use one
version of the cluster map, under which every slot has exactly one primary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from meshd.core import peer_messages
from meshd.core.api_errors import busy, store_errors
from meshd.core.listing_columns import ListingColumns
from meshd.errors import MeshdError
from meshd.peer_reads import listing_merge
from meshd.rpc.http_connection import PeerUnreachableError
from meshd.rpc.peer_client import PeerClockError, PeerRefusedError, StaleMapError
from meshd.rpc.peer_rpc import PREFIX, PeerCall, encode_message, handler
from meshd.store.records import EntryPage, Page, UploadPage, VersionPage
from meshwire.cluster import routes, slot_of
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.listing_columns import KeyFilter
    from meshd.peer_reads.listing_merge import Item, Marker, PageSource
    from meshd.peer_reads.replica_selection import ReplicaSelector
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import StoreReader
    from meshd.store.records import Record
    from meshd.util.clock import Clock
    from meshwire.cluster import ClusterMap, Node, Routes


_T = TypeVar("_T")
_ATTEMPTS: Final = 5
_NEWER_MAP_WAIT_S: Final = 2.0
"""Seconds to wait for a newer map when another node has one."""


class ObjectListings:
    """Listings of buckets without an origin, for batches, jobs and views. One instance per process."""

    def __init__(self, store: StoreReader, selector: ReplicaSelector) -> None:
        self._store, self._selector, self._mesh = store, selector, selector.mesh

    def __repr__(self) -> str:
        return f"<ObjectListings from {self._mesh.node_id}>"

    async def list_entries(self, bucket: str, prefix: str) -> list[tuple[str, Record]]:
        """Return every object under a prefix; see `RemoteObjects.list_entries`."""
        pages = await self._all(bucket, lambda node, version: self._list_node(node, bucket, prefix, version))
        found = [entry for page in pages for entry in page]
        found.sort(key=lambda entry: entry[0].encode())
        return found

    async def list_columns(self, bucket: str, prefix: str, plain: KeyFilter) -> ListingColumns | None:
        """Return the objects under a prefix in columns; None if `plain` does not accept a page."""
        if self._mesh.single_node:
            return await self._own_columns(bucket, prefix, plain)
        nodes = await self._all(
            bucket,
            lambda node, version: self._listed_columns(node, bucket, prefix, version, plain),
            plain.begin,
        )
        columns = [each for each in nodes if each is not None]
        return None if len(columns) < len(nodes) else await asyncio.to_thread(ListingColumns.merged, columns)

    async def _own_columns(self, bucket: str, prefix: str, plain: KeyFilter) -> ListingColumns | None:
        async def ask(after: str) -> EntryPage:
            page = self._store.list_entries(bucket, prefix=prefix, after=after)
            await asyncio.sleep(0)  # let other requests run between pages
            return page

        plain.begin()
        return await _in_columns(ask, plain)

    async def _listed_columns(
        self, node: Node, bucket: str, prefix: str, version: int, plain: KeyFilter
    ) -> ListingColumns | None:
        slots = self._mesh.bucket_routes(bucket).primary_slots(node.node_id).tobytes()

        async def ask(after: str) -> EntryPage:
            self._require_map(version)
            if node.node_id == self._mesh.node_id:
                page = self._store.list_entries(bucket, prefix=prefix, after=after, slots=slots)
                await asyncio.sleep(0)
            else:
                asked = ListingRequest("entries", bucket, prefix, "", (after, ""), _LIMIT)
                page = await self._selector.peers.call_typed(node, LIST_PAGE.returning(EntryPage), asked)
            self._require_map(version)  # the one that the request told, too
            return page

        return await _in_columns(ask, plain)

    def _require_map(self, version: int) -> None:
        current = self._mesh.current_map().version
        if current != version:
            raise StaleMapError(current)

    async def list_page(self, bucket: str, prefix: str, after: str, limit: int) -> Page:
        """Return one page of objects; see `RemoteObjects.list_page`."""

        def ask(node: Node, version: int) -> Awaitable[peer_messages.ListResponse]:
            return self._one_page(node, peer_messages.ListRequest(bucket, prefix, after, version, limit))

        return _page_of(await self._all(bucket, ask), limit)

    async def _all(
        self, bucket: str, ask: Callable[[Node, int], Awaitable[_T]], begin: Callable[[], None] = lambda: None
    ) -> list[_T]:
        """Return the responses of all primaries, under one map. `begin` is called before each attempt. Raises
        BatchError Busy."""
        for _ in range(_ATTEMPTS):
            begin()
            cluster = self._mesh.current_map()
            asked = [ask(node, cluster.version) for node in self.primaries(cluster, bucket)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            wrong = [answer for answer in answers if isinstance(answer, BaseException)]
            if any(isinstance(error, StaleMapError) for error in wrong):
                await self._mesh.wait_for_newer_map(cluster.version, _NEWER_MAP_WAIT_S)
                continue
            if wrong and isinstance(wrong[0], MeshdError):
                raise busy(f"{bucket} cannot be listed now: {wrong[0]}") from wrong[0]
            if wrong:
                raise wrong[0]
            return [answer for answer in answers if not isinstance(answer, BaseException)]
        raise busy(f"{bucket} cannot be listed now: the nodes do not agree on the map yet")

    async def _one_page(self, node: Node, ask: peer_messages.ListRequest) -> peer_messages.ListResponse:
        if node.node_id == self._mesh.node_id:
            return primary_page(self._store, self._mesh, ask)
        return await self._selector.peers.call_typed(node, peer_messages.LIST_RECORDS, ask)

    def primaries(self, cluster: ClusterMap, bucket: str) -> list[Node]:
        """Return the primaries of the bucket's slots. Raises BatchError Busy while a slot has none."""
        # Routes of this map, even if a newer one has arrived.
        table = routes(cluster, self._mesh.replica_count(bucket))
        primaries = table.primary_counts
        if sum(primaries.values()) < cluster.slots:
            raise busy(f"{bucket} cannot be listed now: all owners of a part of it are away")
        return [node for node in cluster.nodes if node.node_id in primaries]

    async def _list_node(
        self, node: Node, bucket: str, prefix: str, version: int
    ) -> list[tuple[str, Record]]:
        found: list[tuple[str, Record]] = []
        after, here = "", node.node_id == self._mesh.node_id
        while True:
            ask = peer_messages.ListRequest(bucket, prefix, after, version)
            page = await self._one_page(node, ask)
            if here:
                await asyncio.sleep(0)  # let other requests run between pages
            found += page.entries
            if not page.after:
                return found
            after = page.after


async def _in_columns(ask: Callable[[str], Awaitable[EntryPage]], plain: KeyFilter) -> ListingColumns | None:
    """Read all pages, each of which begins after the last key of the one before."""
    found, after, more = ListingColumns(), "", True
    while more:
        page = await ask(after)
        if not plain.accepts([entry.key for entry in page.entries]):
            return None
        found.extend([(entry.key, entry.etag, entry.size) for entry in page.entries])
        after, more = page.next_after, page.truncated
    return found


def primary_page(
    store: StoreReader, mesh: ClusterView, ask: peer_messages.ListRequest
) -> peer_messages.ListResponse:
    """Return a page of the objects whose primary is this node. Raises StaleMapError if this node uses another
    map than the caller."""
    cluster = mesh.current_map()
    if cluster.version != ask.version:
        raise StaleMapError(cluster.version)
    decided = routes(cluster, mesh.replica_count(ask.bucket)).primary_slots(mesh.node_id)
    page = store.list(ask.bucket, prefix=ask.prefix, after=ask.after, limit=ask.limit)
    entries = [
        (key, record)
        for key, found in page.entries
        if decided[slot_of(ask.bucket, key, cluster.slots)]
        and (record := peer_messages.to_remote_record(found)) is not None
    ]
    return peer_messages.ListResponse(entries, page.next_after if page.truncated else "")


def _page_of(pages: Sequence[peer_messages.ListResponse], limit: int) -> Page:
    """Merge the pages of all primaries into one that ends where the first of them ends."""
    ends = [page.after.encode() for page in pages if page.after]
    found = sorted((entry for page in pages for entry in page.entries), key=lambda entry: entry[0].encode())
    if ends:
        found = [entry for entry in found if entry[0].encode() <= min(ends)]
    kept = tuple(found[:limit])
    if len(found) > limit:
        return Page(kept, (), truncated=True, next_after=kept[-1][0])
    return Page(kept, (), truncated=bool(ends), next_after=min(ends).decode() if ends else "")


_LISTING_TIMEOUT_S: Final = 15.0
_INCOMPLETE: Final = "The listing is not complete at present"
_LIMIT: Final = 1000

P = TypeVar("P", EntryPage, VersionPage, UploadPage)
OwnEntries = Callable[[str, str, str, int, bytes | None], EntryPage]
"""The signature of `Store.own_entries`."""


class ListingRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for a page of the names whose primary is the node. `kind`: `entries`, `versions`, `uploads`,
    or `own` (objects of a bucket with an origin that are not at the origin yet)."""

    kind: str
    bucket: str
    prefix: str
    delimiter: str
    marker: tuple[str, str]
    limit: int


LIST_PAGE: Final = PeerCall(
    f"{PREFIX}listings",
    request=ListingRequest,
    response=bytes,
    timeout=20.0,
    map_wait=1.0,
    malformed_code="BadRequest",
)
"""The response is a page of the requested kind, encoded: EntryPage, VersionPage or UploadPage."""


class LocalListings:
    """Pages of the names whose primary is this node."""

    def __init__(self, store: StoreReader, mesh: ClusterView, own: OwnEntries) -> None:
        self._store, self._mesh, self._own = store, mesh, own
        self._masks: dict[tuple[int, int], bytes] = {}

    def __repr__(self) -> str:
        return f"<LocalListings of {self._mesh.node_id}>"

    @handler(LIST_PAGE)
    async def answer_page(self, request: ListingRequest, context: CallContext) -> bytes:
        """Return the encoded page to another node."""
        return encode_message(self.list_page(request, context.map_version))

    def list_page(self, request: ListingRequest, version: int) -> EntryPage | VersionPage | UploadPage:
        """Return the page under map `version`. Raises StaleMapError if this node uses another map;
        StoreError."""
        cluster = self._mesh.current_map()
        if cluster.version != version:
            raise StaleMapError(cluster.version)
        slots = self._mask(self._mesh.bucket_routes(request.bucket), self._mesh.replica_count(request.bucket))
        store, (key, mark) = self._store, request.marker
        if request.kind == "own":
            return self._own(request.bucket, request.prefix, key, request.limit, slots)
        if request.kind == "entries":
            return store.list_entries(
                request.bucket,
                prefix=request.prefix,
                delimiter=request.delimiter,
                after=key,
                limit=request.limit,
                slots=slots,
            )
        if request.kind == "versions":
            return store.list_versions(
                request.bucket,
                prefix=request.prefix,
                delimiter=request.delimiter,
                key_marker=key,
                version_marker=mark,
                limit=request.limit,
                slots=slots,
            )
        return store.list_uploads(
            request.bucket,
            prefix=request.prefix,
            delimiter=request.delimiter,
            key_marker=key,
            id_marker=mark,
            limit=request.limit,
            slots=slots,
        )

    def _mask(self, routes: Routes, copies: int) -> bytes:
        found = self._masks.get((routes.version, copies))
        if found is None:
            if len(self._masks) > 8:
                self._masks.clear()
            found = routes.primary_slots(self._mesh.node_id).tobytes()
            self._masks[routes.version, copies] = found
        return found


class MergedListings:
    """Pages of the whole mesh, for S3 listings. One instance per process."""

    def __init__(self, local: LocalListings, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._local, self._mesh, self._peers, self._clock = local, mesh, peers, clock

    def __repr__(self) -> str:
        return f"<MergedListings of {self._mesh!r}>"

    @property
    def single_node(self) -> bool:
        """Whether there are no other nodes."""
        return self._mesh.single_node

    async def list_entries(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = _LIMIT
    ) -> EntryPage:
        """Return a page like `StoreReader.list_entries`, of all nodes. Raises S3Error SlowDown."""
        asked = ListingRequest("entries", bucket, prefix, delimiter, (after, ""), limit)
        items, truncated = await self._merge_pages(asked, EntryPage, listing_merge.read_entries)
        return listing_merge.entry_page(items, truncated=truncated)

    async def list_own_entries(self, bucket: str, prefix: str, after: str, limit: int = _LIMIT) -> EntryPage:
        """Return a page like `Store.own_entries`, of all nodes. Raises S3Error SlowDown."""
        asked = ListingRequest("own", bucket, prefix, "", (after, ""), limit)
        items, truncated = await self._merge_pages(asked, EntryPage, listing_merge.read_entries)
        return listing_merge.entry_page(items, truncated=truncated)

    async def list_versions(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        version_marker: str = "",
        limit: int = _LIMIT,
    ) -> VersionPage:
        """Return a page like `StoreReader.list_versions`, of all nodes. Raises S3Error SlowDown."""
        asked = ListingRequest("versions", bucket, prefix, delimiter, (key_marker, version_marker), limit)
        items, truncated = await self._merge_pages(asked, VersionPage, listing_merge.read_versions)
        return listing_merge.version_page(items, truncated=truncated)

    async def list_uploads(
        self,
        bucket: str,
        *,
        prefix: str = "",
        delimiter: str = "",
        key_marker: str = "",
        id_marker: str = "",
        limit: int = _LIMIT,
    ) -> UploadPage:
        """Return a page like `StoreReader.list_uploads`, of all nodes. Raises S3Error SlowDown."""
        asked = ListingRequest("uploads", bucket, prefix, delimiter, (key_marker, id_marker), limit)
        items, truncated = await self._merge_pages(asked, UploadPage, listing_merge.read_uploads)
        return listing_merge.upload_page(items, truncated=truncated)

    async def _merge_pages(
        self, request: ListingRequest, kind: type[P], read: Callable[[P], tuple[list[Item], bool, Marker]]
    ) -> tuple[list[Item], bool]:
        if request.limit <= 0:
            return [], False
        deadline, skewed = self._clock.monotonic() + _LISTING_TIMEOUT_S, False
        while True:
            version = self._mesh.current_map().version
            try:
                return await self._attempt(request, version, kind, read)
            except StaleMapError as error:
                wanted, what = max(error.version, version), "the nodes do not agree on a map"
                await self._mesh.wait_for_newer_map(wanted - 1, min(2.0, _LISTING_TIMEOUT_S))
                await asyncio.sleep(0.02)
            except _NoAnswerError as error:
                what = str(error)
                if error.skewed and skewed:
                    raise S3Error("SlowDown", f"{_INCOMPLETE}: {what}.") from error
                skewed = error.skewed
                if error.node_id:
                    await self._mesh.report_suspect(error.node_id, version)
                await self._mesh.wait_for_newer_map(version, 0.5)
            if self._clock.monotonic() > deadline:
                raise S3Error("SlowDown", f"{_INCOMPLETE}: {what}. Try again.")

    async def _attempt(
        self,
        request: ListingRequest,
        version: int,
        kind: type[P],
        read: Callable[[P], tuple[list[Item], bool, Marker]],
    ) -> tuple[list[Item], bool]:
        nodes = self._primaries(request.bucket)
        sources = [self._source(node, request, version, kind) for node in nodes]
        share = listing_merge.page_share(request.limit + 1, len(sources))
        await asyncio.gather(*(source.fill(share, read) for source in sources))
        found = await listing_merge.merge_sources(sources, request.limit, read)
        if self._mesh.current_map().version != version:  # later pages used another map
            raise StaleMapError(version)
        return found

    def _primaries(self, bucket: str) -> Sequence[Node]:
        """Return the primaries of the bucket's slots. Raises _NoAnswerError while a slot has none."""
        routes, cluster = self._mesh.bucket_routes(bucket), self._mesh.current_map()
        primaries = routes.primary_counts
        if sum(primaries.values()) != routes.slots:
            raise _NoAnswerError("", "nodes that hold a part of the names are away")
        return [node for node in cluster.nodes if node.node_id in primaries]

    def _source(self, node: Node, request: ListingRequest, version: int, kind: type[P]) -> PageSource[P]:
        async def fetch(marker: Marker, limit: int) -> P:
            wanted = msgspec.structs.replace(request, marker=marker, limit=limit)
            if node.node_id == self._mesh.node_id:
                with store_errors():
                    page = self._local.list_page(wanted, version)
                assert isinstance(page, kind)
                return page
            return await self._ask(node, wanted, kind)

        return listing_merge.PageSource(fetch, request.marker)

    async def _ask(self, node: Node, request: ListingRequest, kind: type[P]) -> P:
        try:
            return await self._peers.call_typed(node, LIST_PAGE.returning(kind), request)
        except (PeerUnreachableError, PeerRefusedError) as error:
            skewed = isinstance(error, PeerClockError)
            raise _NoAnswerError(node.node_id, f"node {node.node_id}: {error}", skewed=skewed) from error


class _NoAnswerError(Exception):
    """A part of the listing is not available. `node_id`: the node that was asked; empty if there is none.
    `skewed`: it refuses calls because its clock differs, which waiting does not change."""

    def __init__(self, node_id: str, message: str, *, skewed: bool = False) -> None:
        super().__init__(message)
        self.node_id, self.skewed = node_id, skewed
