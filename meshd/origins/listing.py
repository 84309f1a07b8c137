"""Listings of backed buckets: pages of the origin, merged with objects that are not written back yet.

A page is cached for the TTL of the origin while the write marks of all nodes stay equal. Marks are compared,
never ordered; a node changes its mark before it acknowledges a write. If a node cannot be asked there are no
marks, and the page is fetched again. Whole listings, for datasets, are cached in the same way if they are
small; of a large one only the revision is, which tells whether what was made of it may be used again. For a
key present on both sides the local object is newer.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from meshd.origins.cache.cache_store import cache_name
from meshd.origins.client.origin_api import OriginEntry, OriginError, OriginListing
from meshd.origins.read_sources import s3_error_for
from meshd.rpc.http_connection import PeerUnreachableError
from meshd.rpc.peer_client import PeerRefusedError, StaleMapError
from meshd.rpc.peer_rpc import PREFIX, PeerCall, handler
from meshd.util.async_tasks import SingleFlight
from meshd.util.timeouts import timeout
from meshwire.s3.result_types import ObjectEntry, ObjectListing, Owner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket
    from meshd.origins.cache.cache_store import CacheStore
    from meshd.origins.client.origin_pool import OriginPool
    from meshd.peer_reads.listing import MergedListings
    from meshd.rpc.peer_client import PeerClient
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.records import EntryPage
    from meshd.store.store import Store
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.origin import Origin
    from meshwire.s3.operations import ListObjects


_PATIENCE: Final = 0.5  # seconds for all nodes; asking the origin hardly takes longer
READ_WRITE_MARK: Final = PeerCall(
    f"{PREFIX}origin-mark", request=bytes, response=bytes, max_bytes=256, timeout=_PATIENCE
)
"""Returns the write mark of a bucket, by its name; empty if the node does not know the bucket."""
_LONGEST: Final = 64

MarkVector = tuple[str, ...]


class WriteMarks:
    """Collects the write marks of all nodes. One instance per process."""

    def __init__(self, cache_store: CacheStore, mesh: ClusterView, peers: PeerClient) -> None:
        self._cache_store, self._mesh, self._peers = cache_store, mesh, peers

    def __repr__(self) -> str:
        return f"<WriteMarks of {self._mesh.node_id}>"

    @handler(READ_WRITE_MARK)
    async def read_own_mark(self, name: bytes, context: CallContext) -> bytes:
        bucket = self._cache_store.backed_bucket(name.decode("utf-8", "replace"))
        return b"" if bucket is None else self._cache_store.write_mark(bucket).encode()

    async def marks_of(self, bucket: Bucket) -> MarkVector | None:
        """Return the marks of all nodes; None while a node that may write does not answer."""
        assert bucket.origin is not None
        if self._mesh.single_node or bucket.origin.write == "off":
            return (self._cache_store.write_mark(bucket),)
        cluster = self._mesh.current_map()
        nodes = [node for node in cluster.nodes if node.stores and node.state not in ("away", "down")]
        try:
            async with timeout(_PATIENCE):
                answers = await asyncio.gather(*[self._ask(node, bucket) for node in nodes])
        except (TimeoutError, PeerUnreachableError, PeerRefusedError, StaleMapError):
            return None
        if not all(answers) or self._mesh.current_map().version != cluster.version:
            return None
        return (str(cluster.version), *answers)

    async def _ask(self, node: Node, bucket: Bucket) -> str:
        if node.node_id == self._mesh.node_id:
            return self._cache_store.write_mark(bucket)
        mark = await self._peers.call_typed(node, READ_WRITE_MARK, bucket.name.encode())
        return mark[:_LONGEST].decode("ascii", "replace")


_KEPT: Final = 512  # maximum cached pages of one process
_KEPT_NAMES: Final = 50_000  # of all whole listings that a process caches
_REVISIONS: Final = 1024
PAGE: Final = 1000

PageKey = tuple[str, str, str, str, int]


class _Kept(msgspec.Struct, frozen=True):
    page: OriginListing
    marks: MarkVector
    since: float


class ListingRevision(NamedTuple):
    """A whole listing of an origin: of which contents of which origin, after which writes, and when it
    began. An equal one stands for the same names."""

    cache_name: str
    origin: Origin
    marks: MarkVector
    since: float


_Listed = tuple["Sequence[OriginEntry]", ListingRevision | None]


class BackedListings:
    """Lists backed buckets. One instance per process."""

    def __init__(
        self,
        origins: OriginPool,
        store: Store,
        cache_store: CacheStore,
        clock: Clock,
        mesh: ClusterView,
        merged: MergedListings,
        marker: WriteMarks,
    ) -> None:
        self._origins, self._store, self._cache_store, self._clock = origins, store, cache_store, clock
        self._mesh, self._merged, self.write_marks = mesh, merged, marker
        self._pages: OrderedDict[PageKey, _Kept] = OrderedDict()
        self._asking: SingleFlight[tuple[PageKey, MarkVector], OriginListing] = SingleFlight()
        self._whole: OrderedDict[tuple[str, str], _Listed] = OrderedDict()
        self._revisions: OrderedDict[tuple[str, str], ListingRevision] = OrderedDict()
        self._listing: SingleFlight[tuple[tuple[str, str], Origin, MarkVector], _Listed] = SingleFlight()

    def __repr__(self) -> str:
        return f"<BackedListings {len(self._pages)} pages kept>"

    async def list_objects(self, operation: ListObjects) -> ObjectListing | None:
        """Return a page of a backed bucket; None for another bucket. Raises S3Error."""
        bucket = self._cache_store.backed_bucket(operation.bucket)
        if bucket is None:
            return None
        if operation.max_keys <= 0:
            return ObjectListing()
        limit = min(operation.max_keys, PAGE)
        try:
            page = await self.list_page(bucket, operation.prefix, operation.delimiter, operation.after, limit)
        except OriginError as error:
            raise s3_error_for(error, operation.prefix) from error
        owner = Owner(bucket.owner) if operation.version == 1 or operation.fetch_owner else None
        entries = tuple(
            ObjectEntry(entry.key, entry.size, entry.etag, entry.modified, owner) for entry in page.entries
        )
        return ObjectListing(entries, page.prefixes, bool(page.after), page.after)

    async def list_page(
        self, bucket: Bucket, prefix: str, delimiter: str, after: str, limit: int
    ) -> OriginListing:
        """Return a page in order of UTF-8 bytes, including dirty objects. Raises OriginError."""
        # Read first: it may be written back meanwhile.
        dirty = await self._dirty(bucket, prefix, delimiter, after, limit)
        page = await self._remote(bucket, prefix, delimiter, after, limit)
        return _merged(page, dirty, limit) if dirty else page

    async def list_all(
        self, bucket: Bucket, prefix: str
    ) -> tuple[Sequence[OriginEntry], ListingRevision | None]:
        """Return all objects below a prefix in order of UTF-8 bytes, including dirty ones, and the listing
        that they are of; None if it cannot be told whether it is current. Raises OriginError, S3Error
        SlowDown."""
        # Read first: it may be written back meanwhile.
        dirty = await self._dirty(bucket, prefix, "", "", sys.maxsize)
        entries, revision = await self._all_remote(bucket, prefix)
        if dirty:
            entries = _merged(OriginListing(tuple(entries)), dirty, sys.maxsize).entries
        return entries, revision

    async def revision(self, bucket: Bucket, prefix: str) -> ListingRevision | None:
        """Return the last whole listing of a prefix, if what it has is still current by the bucket's TTL."""
        assert bucket.origin is not None
        found = self._revisions.get((cache_name(bucket), prefix))
        if found is None or found.origin != bucket.origin:
            return None
        if self._clock.monotonic() >= found.since + bucket.origin.ttl:
            return None
        return found if found.marks == await self.write_marks.marks_of(bucket) else None

    async def _all_remote(self, bucket: Bucket, prefix: str) -> _Listed:
        assert bucket.origin is not None
        name, current = (cache_name(bucket), prefix), await self.revision(bucket, prefix)
        kept = self._whole.get(name)
        if kept is not None and kept[1] == current:
            self._whole.move_to_end(name)
            return kept
        marks, origin = await self.write_marks.marks_of(bucket), self._origins.origin_for(bucket)
        if marks is None:
            return await origin.list_all(prefix), None
        revision = ListingRevision(name[0], bucket.origin, marks, self._clock.monotonic())

        async def ask() -> _Listed:
            return await origin.list_all(prefix), revision

        listed, joined = await self._listing.run((name, bucket.origin, marks), ask)
        if not joined:
            self._keep(name, listed, revision)
        return listed

    def _keep(self, name: tuple[str, str], listed: _Listed, revision: ListingRevision) -> None:
        self._revisions[name] = revision
        self._revisions.move_to_end(name)
        while len(self._revisions) > _REVISIONS:
            self._revisions.popitem(last=False)
        self._whole.pop(name, None)
        if len(listed[0]) <= _KEPT_NAMES:
            self._whole[name] = listed
        while sum(len(each[0]) for each in self._whole.values()) > _KEPT_NAMES or len(self._whole) > _KEPT:
            self._whole.popitem(last=False)

    async def _remote(
        self, bucket: Bucket, prefix: str, delimiter: str, after: str, limit: int
    ) -> OriginListing:
        assert bucket.origin is not None
        question = (cache_name(bucket), prefix, delimiter, after, limit)
        marks, now = await self.write_marks.marks_of(bucket), self._clock.monotonic()
        origin = self._origins.origin_for(bucket)
        if marks is None:
            return await origin.list(prefix, delimiter, after, limit)
        kept = self._pages.get(question)
        if kept is not None and kept.marks == marks and now < kept.since + bucket.origin.ttl:
            return kept.page
        page, _ = await self._asking.run(
            (question, marks), lambda: origin.list(prefix, delimiter, after, limit)
        )
        self._pages[question] = _Kept(page, marks, now)
        self._pages.move_to_end(question)
        while len(self._pages) > _KEPT:
            self._pages.popitem(last=False)
        return page

    async def _dirty(
        self, bucket: Bucket, prefix: str, delimiter: str, after: str, limit: int
    ) -> list[OriginEntry | str]:
        """Return up to a page of the objects that are not at the origin yet. Raises S3Error SlowDown."""
        found: dict[str, OriginEntry | str] = {}
        at = after
        while len(found) <= limit:
            page = await self._own(bucket, prefix, at)
            for entry in page.entries:
                cut = entry.key.find(delimiter, len(prefix)) if delimiter else -1
                name = entry.key if cut < 0 else entry.key[: cut + len(delimiter)]
                if name.encode() > after.encode():
                    found[name] = name if cut >= 0 else OriginEntry(*entry[:4])
            if not page.truncated:
                break
            at = page.next_after
        return list(found.values())

    async def _own(self, bucket: Bucket, prefix: str, after: str) -> EntryPage:
        """List the stored entries of all nodes, if nodes may have acknowledged writes that the origin
        lacks."""
        assert bucket.origin is not None
        if self._mesh.single_node or bucket.origin.write != "back":
            return self._store.list_stored_entries(bucket.name, prefix, after, PAGE)
        return await self._merged.list_own_entries(bucket.name, prefix, after, PAGE)


def _merged(page: OriginListing, dirty: list[OriginEntry | str], limit: int) -> OriginListing:
    every: dict[bytes, OriginEntry | str] = {entry.key.encode(): entry for entry in page.entries}
    every |= {prefix.encode(): prefix for prefix in page.prefixes}
    every |= {(each if isinstance(each, str) else each.key).encode(): each for each in dirty}
    names = sorted(every)
    if page.after:
        last = page.after.encode()
        names = [name for name in names if name <= last]
    shown = [every[name] for name in names[:limit]]
    more = len(names) > limit or bool(page.after)
    return OriginListing(
        tuple(each for each in shown if isinstance(each, OriginEntry)),
        tuple(each for each in shown if isinstance(each, str)),
        names[:limit][-1].decode() if more and shown else page.after if more else "",
    )
