"""Listings of backed buckets: the origin's pages, with what is dirty here put among them.

Law: a page is kept for the origin's TTL, unless the bucket is written to, through whichever node. One
question for all who ask for the same page. Where both have a key, this store's is newer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshd.kit.singleflight import SingleFlight
from meshd.origin.errors import OriginError
from meshd.origin.interface import Entry, Listing
from meshd.service.backed.reading import told
from meshd.service.caching.shelf import shelf_name
from meshwire.s3.results import ObjectEntry, ObjectListing, Owner

if TYPE_CHECKING:
    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import Bucket
    from meshd.kit.clock import Clock
    from meshd.service.caching.marks import Marker, Marks
    from meshd.service.caching.origins import Origins
    from meshd.service.caching.shelf import Shelf
    from meshd.service.remote.merged import MergedListings
    from meshd.store.records import EntryPage
    from meshd.store.store import Store
    from meshwire.s3.operations import ListObjects

_KEPT: Final = 512  # pages of one process
PAGE: Final = 1000

Question = tuple[str, str, str, str, int]


@dataclass(frozen=True, slots=True)
class _Kept:
    page: Listing
    marks: Marks
    since: float


class BackedListings:
    """One a process."""

    def __init__(
        self,
        origins: Origins,
        store: Store,
        shelf: Shelf,
        clock: Clock,
        mesh: Mesh,
        merged: MergedListings,
        marker: Marker,
    ) -> None:
        self._origins, self._store, self._shelf, self._clock = origins, store, shelf, clock
        self._mesh, self._merged, self.marker = mesh, merged, marker
        self._pages: OrderedDict[Question, _Kept] = OrderedDict()
        self._asking: SingleFlight[tuple[Question, Marks], Listing] = SingleFlight()

    def __repr__(self) -> str:
        return f"<BackedListings {len(self._pages)} pages kept>"

    async def objects(self, operation: ListObjects) -> ObjectListing | None:
        """A page of a backed bucket; None for another. Raises S3Error."""
        bucket = self._shelf.backed(operation.bucket)
        if bucket is None:
            return None
        if operation.max_keys <= 0:
            return ObjectListing()
        limit = min(operation.max_keys, PAGE)
        try:
            page = await self.page(bucket, operation.prefix, operation.delimiter, operation.after, limit)
        except OriginError as error:
            raise told(error, operation.prefix) from error
        owner = Owner(bucket.owner) if operation.version == 1 or operation.fetch_owner else None
        entries = tuple(
            ObjectEntry(entry.key, entry.size, entry.etag, entry.modified, owner) for entry in page.entries
        )
        return ObjectListing(entries, page.prefixes, bool(page.after), page.after)

    async def page(self, bucket: Bucket, prefix: str, delimiter: str, after: str, limit: int) -> Listing:
        """A page in order of UTF-8 bytes, dirty objects among it. Raises OriginError."""
        dirty = await self._dirty(bucket, prefix, delimiter, after, limit)  # before it may go to the origin
        page = await self._remote(bucket, prefix, delimiter, after, limit)
        return _merged(page, dirty, limit) if dirty else page

    async def _remote(self, bucket: Bucket, prefix: str, delimiter: str, after: str, limit: int) -> Listing:
        assert bucket.origin is not None
        question = (shelf_name(bucket), prefix, delimiter, after, limit)
        marks, now = await self.marker.of(bucket), self._clock.monotonic()
        origin = self._origins.of(bucket)
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
    ) -> list[Entry | str]:
        """What is not at the origin yet, as much as fits in a page. Raises S3Error SlowDown."""
        found: dict[str, Entry | str] = {}
        at = after
        while len(found) <= limit:
            page = await self._own(bucket, prefix, at)
            for entry in page.entries:
                cut = entry.key.find(delimiter, len(prefix)) if delimiter else -1
                name = entry.key if cut < 0 else entry.key[: cut + len(delimiter)]
                if name.encode() > after.encode():
                    found[name] = name if cut >= 0 else Entry(*entry[:4])
            if not page.truncated:
                break
            at = page.next_after
        return list(found.values())

    async def _own(self, bucket: Bucket, prefix: str, after: str) -> EntryPage:
        """Of all nodes, where something may have been acknowledged that the origin does not have."""
        assert bucket.origin is not None
        if self._mesh.alone or bucket.origin.write != "back":
            return self._store.own_entries(bucket.name, prefix, after, PAGE)
        return await self._merged.own(bucket.name, prefix, after, PAGE)


def _merged(page: Listing, dirty: list[Entry | str], limit: int) -> Listing:
    every: dict[bytes, Entry | str] = {entry.key.encode(): entry for entry in page.entries}
    every |= {prefix.encode(): prefix for prefix in page.prefixes}
    every |= {(each if isinstance(each, str) else each.key).encode(): each for each in dirty}
    names = sorted(every)
    if page.after:
        last = page.after.encode()
        names = [name for name in names if name <= last]
    shown = [every[name] for name in names[:limit]]
    more = len(names) > limit or bool(page.after)
    return Listing(
        tuple(each for each in shown if isinstance(each, Entry)),
        tuple(each for each in shown if isinstance(each, str)),
        names[:limit][-1].decode() if more and shown else page.after if more else "",
    )
