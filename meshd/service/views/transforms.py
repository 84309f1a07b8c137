"""Transform views, read: an object of a view becomes the object that holds its result.

Law: a result is kept in the reserved bucket under the hash of (ops, source ETag), so that it is computed
once, by the steward, however many ask, and never outlives its source's content. Bad sources are left out of
listings and refused by name.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from meshd.assembly.addressing import DerivedAddress
from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.assembly.errors import BatchError
from meshd.service.remote import local_objects
from meshd.service.translation import store_errors
from meshd.service.views.definitions import draws
from meshd.service.views.failing import refusal, unreachable
from meshd.service.views.kinds import Kept
from meshd.store.errors import ConditionFailedError
from meshd.store.records import Meta
from meshd.telemetry import metrics
from meshd.transform.programs import asset_digests
from meshwire import checksums
from meshwire.conditions import Conditions
from meshwire.documents import canonical_json
from meshwire.plans import spec_document
from meshwire.s3.errors import S3Error
from meshwire.s3.results import ObjectEntry, ObjectListing
from meshwire.transformviews import FIELD, walk_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.assembly.addressing import Frame, FrameSource
    from meshd.service.remote import RemoteObjects
    from meshd.service.views.uses import Uses
    from meshd.service.waiting import Names
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshwire.s3.operations import ListObjects
    from meshwire.transformviews import Pair, TransformView

PAGE_LIMIT = 1000
MADE_A_PAGE = 64
"""Results a listing computes before it ends its page: what is listed has a true size."""
RESULTS = "views/"
_SOURCE_PAGE = 1000
_BEYOND = "\U0010ffff"


@lru_cache(maxsize=256)
def _program(view: TransformView) -> str:
    """What a transform process compiles."""
    return canonical_json({"spec": spec_document(view.plan), "fields": [FIELD]}).decode()


class TransformReader:
    """One a worker."""

    def __init__(
        self, store: ObjectStore, frames: FrameSource, uses: Uses, objects: RemoteObjects | None = None
    ) -> None:
        self._store, self._frames, self._uses = store, frames, uses
        self._objects = objects or local_objects(store)

    def __repr__(self) -> str:
        return "<TransformReader>"

    # --- one object -----------------------------------------------------------------------------------

    async def find(self, view: TransformView, key: str) -> Kept:
        """The result of a view's key; made if need be. Raises S3Error NoSuchKey, UnprocessableSource,
        SlowDown."""
        for origin in view.origins(key):
            with store_errors(), unreachable():
                source = await self._objects.find(view.source, origin)
            if source is not None:
                place = await self._made(view, origin, source)
                self._uses.note(place)
                return Kept(RESERVED_BUCKET, place)
        raise S3Error("NoSuchKey", extra={"Key": key})

    async def _made(self, view: TransformView, origin: str, source: Record) -> str:
        place = result_key(view, origin, source)
        made = self._store.get(RESERVED_BUCKET, place) is not None
        metrics.view_results.labels("hit" if made else "miss").inc()
        for op in view.plan.ops if made else ():
            metrics.op_cache_hits.labels(metrics.op_label(op.op)).inc()
        if not made:
            await self._make(view, origin, source, place)
        return place

    async def _make(self, view: TransformView, origin: str, source: Record, place: str) -> None:
        address = DerivedAddress(
            view.digest,
            _program(view),
            view.source,
            origin,
            source.etag,
            _position(view, origin),
            asset_digests(view.plan),
        )
        try:
            frame = await self._frames.frame(address)
        except BatchError as error:
            raise refusal(error) from error
        try:
            await self._keep(view, frame, place)
        finally:
            frame.close()

    async def _keep(self, view: TransformView, frame: Frame, place: str) -> None:
        """Write the result down. Another worker may have been quicker: then it is there."""
        data = await asyncio.to_thread(os.pread, frame.fd, frame.size, 0)
        meta = await asyncio.to_thread(_meta, view, data)
        with store_errors():
            writer = self._store.writer(RESERVED_BUCKET, place, size=len(data))
            try:
                await writer.write(data)
                with suppress(ConditionFailedError):
                    await writer.commit(meta, conditions=Conditions(if_none_match=("*",)))
            finally:
                await writer.abort()

    # --- listings --------------------------------------------------------------------------------------

    async def listing(self, view: TransformView, operation: ListObjects) -> ObjectListing:
        """A page of a view. Every size and ETag is the result's; a page that has to compute many ends early,
        and says that there is more."""
        limit = min(operation.max_keys, PAGE_LIMIT)
        if limit <= 0:
            return ObjectListing()
        gathering = _Gathering(self._store, self._objects.names(), view, operation, limit)
        with store_errors(), unreachable():
            page = await asyncio.to_thread(gathering.run)
        made = await asyncio.gather(*[self._entry(view, pair) for pair in page.pairs])
        entries = tuple(entry for entry in made if entry is not None)
        return ObjectListing(entries, tuple(page.prefixes), page.truncated, page.last)

    async def _entry(self, view: TransformView, pair: Pair[Record]) -> ObjectEntry | None:
        try:
            place = await self._made(view, pair.origin, pair.value)
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


class _Gathering:
    """The keys of one page, found in the index (blocking: run it in a thread)."""

    def __init__(
        self, store: ObjectStore, names: Names, view: TransformView, operation: ListObjects, limit: int
    ) -> None:
        self._store, self._view, self._operation, self._limit = store, view, operation, limit
        self._names = names
        self.pairs: list[Pair[Record]] = []
        self.prefixes: list[str] = []
        self.truncated, self.last = False, ""
        self._unmade = 0

    def run(self) -> _Gathering:
        after: str | None = self._operation.after
        while after is not None:
            after = self._walk(after)
        return self

    def _walk(self, after: str) -> str | None:
        """Go on behind `after`; where to go on next once a common prefix was met, None at the end."""
        prefix, delimiter = self._operation.prefix, self._operation.delimiter
        for pair in self._after(prefix, after):
            cut = pair.key.find(delimiter, len(prefix)) if delimiter else -1
            rolled = pair.key[: cut + len(delimiter)] if cut >= 0 else ""
            if rolled and (rolled <= self._operation.after or rolled in self.prefixes[-1:]):
                continue
            if len(self.pairs) + len(self.prefixes) == self._limit or self._unmade == MADE_A_PAGE:
                self.truncated = True
                return None
            if rolled:
                self.prefixes.append(rolled)
                self.last = rolled
                return rolled + _BEYOND
            self._take(pair)
        return None

    def _take(self, pair: Pair[Record]) -> None:
        place = result_key(self._view, pair.origin, pair.value)
        self._unmade += self._store.get(RESERVED_BUCKET, place) is None
        self.pairs.append(pair)
        self.last = pair.key

    def _after(self, prefix: str, after: str) -> Iterator[Pair[Record]]:
        source = self._source(prefix, after)
        return walk_view(self._view, source, self._look, prefix=prefix, after=after)

    def _look(self, key: str) -> Record | None:
        return self._names.get(self._view.source, key)

    def _source(self, prefix: str, after: str) -> Iterator[tuple[str, Record]]:
        more = True
        while more:
            page = self._names.list(self._view.source, prefix=prefix, after=after, limit=_SOURCE_PAGE)
            yield from page.entries
            after, more = page.next_after, page.truncated


def result_key(view: TransformView, origin: str, source: Record) -> str:
    """The name of a result: what was done, to which content; for random ops to which key."""
    drawn = f"-{_position(view, origin):x}" if draws(view) else ""
    kind = hashlib.sha256(view.content_type.encode()).hexdigest()[:8]
    return f"{RESULTS}{view.digest}-{kind}/{source.etag}-{source.size:x}{drawn}"


def _position(view: TransformView, origin: str) -> int:
    """What keys the randomness of one object: its name."""
    if not draws(view):
        return 0
    return int.from_bytes(hashlib.blake2b(origin.encode(), digest_size=8).digest()) >> 2


def _meta(view: TransformView, data: bytes) -> Meta:
    hasher = checksums.new(checksums.DEFAULT_ALGORITHM)
    hasher.update(data)
    return Meta(
        hashlib.md5(data, usedforsecurity=False).hexdigest(),
        {"content-type": view.content_type},
        checksums={checksums.DEFAULT_ALGORITHM: hasher.base64()},
        checksum_type="FULL_OBJECT",
    )
