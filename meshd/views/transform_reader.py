"""Reader of transform views: maps an object of the view to the object that holds its result.

Law: a result never outlives the content of its source. Bad sources are missing from listings and
refused by name.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from meshd.core.api_errors import BatchError, store_errors
from meshd.core.document_store import RESERVED_BUCKET, find_intact
from meshd.telemetry import metrics
from meshd.telemetry.metric_registry import bounded_label
from meshd.views import view_kind
from meshd.views.transform_results import TransformResultMaker, result_key, result_keys
from meshd.views.view_kind import StoredResult, to_s3_error, translate_peer_errors
from meshwire.errors import S3Error
from meshwire.s3.result_types import ObjectEntry, ObjectListing
from meshwire.views.transform_view import iter_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.core.frame_address import FrameSource
    from meshd.documents.inventory import UsageFile
    from meshd.peer_reads.remote_objects import ObjectNames, RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.s3.operations import ListObjects
    from meshwire.views.transform_view import TransformView, ViewEntry

PAGE_LIMIT = 1000
MAX_COMPUTED_PER_PAGE = 64
"""Results that a listing computes per page, because a listed size must be the real one."""
_SOURCE_PAGE = 1000
_BEYOND = "\U0010ffff"


class TransformReader:
    """Reads transform views, for a worker."""

    def __init__(
        self, store: ObjectStore, frames: FrameSource, uses: UsageFile, objects: RemoteObjects
    ) -> None:
        self._store, self._uses = store, uses
        self._objects = objects
        self._maker = TransformResultMaker(store, frames, self._objects)

    # --- one object -----------------------------------------------------------------------------------

    async def find_object(self, view: TransformView, key: str) -> StoredResult:
        """Return the result for a key of the view, computing it if needed.

        Raises S3Error NoSuchKey, UnprocessableSource, ViewOutdated, SlowDown.
        """
        for origin in view.source_keys(key):
            with store_errors(), translate_peer_errors():
                source = await self._objects.find(view.source, origin)
            if source is not None:
                place = await self._ensure_result(view, origin, source)
                self._uses.note(place)
                return StoredResult(
                    RESERVED_BUCKET, place, partial(self._maker.recompute_result, view, origin, source)
                )
        raise S3Error("NoSuchKey", extra={"Key": key})

    async def _ensure_result(self, view: TransformView, origin: str, source: Record) -> str:
        place = self._result_key(view, origin, source)
        made = find_intact(self._store, place) is not None
        view_kind.count_result(kept=made)
        for op in view.plan.ops if made else ():
            metrics.op_cache_hits.labels(bounded_label("op", op.op)).inc()
        if not made:
            await self._compute_result(view, origin, source)
        return place

    def _result_key(self, view: TransformView, origin: str, source: Record) -> str:
        """Return the key of a result, stored or not. Results made before an op was removed stay readable.

        Raises S3Error ViewOutdated.
        """
        try:
            return result_key(view, origin, source.etag, source.size)
        except BatchError as error:
            for place in result_keys(view, origin, source.etag, source.size):
                if find_intact(self._store, place) is not None:
                    return place
            raise to_s3_error(error) from error

    async def _compute_result(self, view: TransformView, origin: str, source: Record) -> None:
        with store_errors():
            try:
                await self._maker.ensure_result(view, origin, source)
            except BatchError as error:
                raise to_s3_error(error) from error

    # --- listings --------------------------------------------------------------------------------------

    async def list_page(self, view: TransformView, operation: ListObjects) -> ObjectListing:
        """Return a page of a view. Every size and ETag is that of the result.

        A page that has to compute many results ends early and is marked as truncated.
        """
        limit = min(operation.max_keys, PAGE_LIMIT)
        if limit <= 0:
            return ObjectListing()
        gathering = _PageWalk(self._store, self._objects.blocking_names(view.source), view, operation, limit)
        with store_errors(), translate_peer_errors():
            page = await asyncio.to_thread(gathering.run)
        made = await asyncio.gather(*[self._entry(view, pair) for pair in page.pairs])
        entries = tuple(entry for entry in made if entry is not None)
        return ObjectListing(entries, tuple(page.prefixes), page.truncated, page.last)

    async def _entry(self, view: TransformView, pair: ViewEntry[Record]) -> ObjectEntry | None:
        try:
            place = await self._ensure_result(view, pair.origin, pair.value)
        except S3Error as error:
            if error.code == "UnprocessableSource":
                return None
            raise
        record = self._store.get(RESERVED_BUCKET, place)
        if record is None:
            raise S3Error("ServiceUnavailable")
        algorithm = next(iter(record.checksums), "")
        return ObjectEntry(
            pair.key,
            record.size,
            record.etag,
            record.modified,
            checksum_algorithm=algorithm,
            checksum_type=record.checksum_type,
        )


class _PageWalk:
    """Finds the keys of one page in the index (blocking: run it in a thread)."""

    def __init__(
        self, store: ObjectStore, names: ObjectNames, view: TransformView, operation: ListObjects, limit: int
    ) -> None:
        self._store, self._view, self._operation, self._limit = store, view, operation, limit
        self._names = names
        self.pairs: list[ViewEntry[Record]] = []
        self.prefixes: list[str] = []
        self.truncated, self.last = False, ""
        self._unmade = 0

    def run(self) -> _PageWalk:
        after: str | None = self._operation.after
        while after is not None:
            after = self._walk(after)
        return self

    def _walk(self, after: str) -> str | None:
        """Add keys after `after`. Returns where to resume after a common prefix; None at the end."""
        prefix, delimiter = self._operation.prefix, self._operation.delimiter
        for pair in self._after(prefix, after):
            cut = pair.key.find(delimiter, len(prefix)) if delimiter else -1
            rolled = pair.key[: cut + len(delimiter)] if cut >= 0 else ""
            if rolled and (rolled <= self._operation.after or rolled in self.prefixes[-1:]):
                continue
            if len(self.pairs) + len(self.prefixes) == self._limit or self._unmade == MAX_COMPUTED_PER_PAGE:
                self.truncated = True
                return None
            if rolled:
                self.prefixes.append(rolled)
                self.last = rolled
                return rolled + _BEYOND
            self._take(pair)
        return None

    def _take(self, pair: ViewEntry[Record]) -> None:
        source = pair.value
        places = result_keys(self._view, pair.origin, source.etag, source.size)
        self._unmade += all(self._store.get(RESERVED_BUCKET, place) is None for place in places)
        self.pairs.append(pair)
        self.last = pair.key

    def _after(self, prefix: str, after: str) -> Iterator[ViewEntry[Record]]:
        source = self._source(prefix, after)
        return iter_view(self._view, source, self._look, prefix=prefix, after=after)

    def _look(self, key: str) -> Record | None:
        return self._names.get(self._view.source, key)

    def _source(self, prefix: str, after: str) -> Iterator[tuple[str, Record]]:
        more = True
        while more:
            page = self._names.list(self._view.source, prefix=prefix, after=after, limit=_SOURCE_PAGE)
            yield from page.entries
            after, more = page.next_after, page.truncated
