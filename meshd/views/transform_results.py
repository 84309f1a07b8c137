"""Results of transform views: computed once, stored under a content hash, and evicted by last use.

Law: for sources with an origin, the node that reads the source computes and stores the result and sends
a copy to the requesting node, so no two nodes compute it at once; if it does not answer, the requesting
node computes the result itself. Damaged results are recomputed. Any result may be evicted. Invariant:
the memory of an eviction pass does not grow with the number of results.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from meshd.core.api_errors import busy, store_errors
from meshd.core.document_store import RESERVED_BUCKET, find_intact, unless_intact
from meshd.core.frame_address import DerivedAddress
from meshd.core.peer_messages import MAKE_VIEW_RESULT, ViewResultRequest
from meshd.documents.inventory import MINUTE_MS
from meshd.rpc.peer_rpc import NotHereError, handler, malformed_message
from meshd.store.errors import ConditionFailedError
from meshd.store.records import Meta
from meshd.telemetry import metrics
from meshd.transform.compiler import asset_digests
from meshd.util.async_tasks import SingleFlight
from meshd.views.definitions import is_random
from meshwire.checksums import body_checksums
from meshwire.plan.plan_spec import spec_document
from meshwire.strict_json import PlanError, canonical_json
from meshwire.views.transform_view import OBJECT_FIELD, TransformView
from meshwire.views.view_kinds import parse_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshd.cluster.cluster_view import ClusterView
    from meshd.core.frame_address import Frame, FrameSource
    from meshd.documents.inventory import LastUses, UsageFile
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.rpc.peer_rpc import CallContext
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record

RESULTS_PREFIX = "views/"


@lru_cache(maxsize=256)
def _program(view: TransformView) -> str:
    """Return the program that a transform process compiles."""
    return canonical_json({"spec": spec_document(view.plan), "fields": [OBJECT_FIELD]}).decode()


@lru_cache(maxsize=256)
def _parse(document: str, source: str) -> TransformView:
    """Parse the document of a transform view. Raises PlanError."""
    view = parse_view(json.loads(document), source)
    if not isinstance(view, TransformView):
        raise PlanError("view", "expected a view that transforms objects")
    return view


class TransformResultMaker:
    """Computes and stores results of transform views, for a worker."""

    def __init__(self, store: ObjectStore, frames: FrameSource, objects: RemoteObjects) -> None:
        self._store, self._frames, self._objects = store, frames, objects
        self._making: SingleFlight[str, None] = SingleFlight()

    def __repr__(self) -> str:
        return f"<TransformResultMaker, {len(self._making)} results in progress>"

    async def ensure_result(self, view: TransformView, key: str, source: Record) -> None:
        """Make sure that this node has the result of a source object. Raises BatchError, StoreError."""
        place = result_key(view, key, source.etag, source.size)
        await self._making.run(place, lambda: self._make(view, key, source, place))

    async def _make(self, view: TransformView, key: str, source: Record, place: str) -> None:
        await self._store_result(view, await self.recompute_result(view, key, source), place)

    async def make_for_peer(self, ask: ViewResultRequest) -> bytes:
        """Return, for another node, the result of a source object that this node reads.

        Raises BatchError, StoreError, PlanError.
        """
        view = _parse(ask.view, ask.bucket)
        place = result_key(view, ask.key, ask.etag, ask.size)
        if find_intact(self._store, place) is None:
            await self._making.run(place, lambda: self._make_here(view, ask.key, ask.etag, place))
        record = self._store.get(RESERVED_BUCKET, place)
        if record is None:
            raise busy("a result was evicted before it was read")
        return await asyncio.to_thread(self._store.read_range, record, 0, record.size)

    async def recompute_result(self, view: TransformView, key: str, source: Record) -> bytes:
        """Compute the result of a source object without storing it. Raises BatchError."""
        ask = ViewResultRequest(view.to_json().decode(), view.source, key, source.etag, source.size)
        data = await self._objects.fetch_view_result(ask)
        return await self._render(view, key, source.etag) if data is None else data

    async def _make_here(self, view: TransformView, key: str, etag: str, place: str) -> None:
        await self._store_result(view, await self._render(view, key, etag), place)

    async def _render(self, view: TransformView, key: str, etag: str) -> bytes:
        position = _hash_key(key) if is_random(view) else 0  # keys the randomness of the object
        program, assets = _program(view), asset_digests(view.plan)
        address = DerivedAddress(view.digest, program, view.source, key, etag, position, assets)
        frame: Frame = await self._frames.get_frame(address)
        try:
            return await asyncio.to_thread(os.pread, frame.fd, frame.size, 0)
        finally:
            frame.close()

    async def _store_result(self, view: TransformView, data: bytes, place: str) -> None:
        """Store the result. If another worker stored it first, that one is kept."""
        meta = await asyncio.to_thread(_meta, view, data)
        writer = self._store.writer(RESERVED_BUCKET, place, size=len(data))
        try:
            await writer.write(data)
            with suppress(ConditionFailedError):
                await writer.commit(meta, conditions=unless_intact(self._store, place))
        finally:
            await writer.abort()


def result_key(view: TransformView, key: str, etag: str, size: int) -> str:
    """Return the key of a result: the ops and the source content, with random ops also the source key.

    Raises BatchError UnknownOpBuild.
    """
    plain, drawn = result_keys(view, key, etag, size)
    return drawn if is_random(view) else plain


def result_keys(view: TransformView, key: str, etag: str, size: int) -> tuple[str, str]:
    """Return both possible keys of a result, for when it is no longer known whether an op is random."""
    kind = hashlib.sha256(view.content_type.encode()).hexdigest()[:8]
    plain = f"{RESULTS_PREFIX}{view.digest}-{kind}/{etag}-{size:x}"
    return plain, f"{plain}-{_hash_key(key):x}"


def _hash_key(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2


def _meta(view: TransformView, data: bytes) -> Meta:
    hasher = body_checksums.new_hasher(body_checksums.DEFAULT_ALGORITHM)
    hasher.update(data)
    return Meta(
        hashlib.md5(data, usedforsecurity=False).hexdigest(),
        {"content-type": view.content_type},
        checksums={body_checksums.DEFAULT_ALGORITHM: hasher.base64()},
        checksum_type="FULL_OBJECT",
    )


_PAGE = 1000
_LEAVE = 0.9  # share of the limit that an eviction leaves, so that not every new result causes an eviction


def eviction_cutoff(used: Mapping[int, int], limit: int) -> int:
    """Return the first minute whose results stay, so that at most `limit` bytes stay.

    `used`: bytes by the minute of their last use. The newest minute stays in any case.
    """
    left, kept = limit, max(used, default=0)
    for minute in sorted(used, reverse=True):
        left -= used[minute]
        if left < 0:
            return kept
        kept = minute
    return min(used, default=0)


class ResultEvictor:
    """Evicts results of views. One instance per node, in the coordinator."""

    def __init__(self, store: ObjectStore, uses: UsageFile, limit: int) -> None:
        self._store, self._uses, self._limit = store, uses, limit
        self._held: int | None = None

    def __repr__(self) -> str:
        return f"<ResultEvictor, at most {self._limit} bytes>"

    def free_bytes(self) -> int | None:
        """Return the bytes that were free when results were last measured; None before the first time."""
        return None if self._held is None else max(0, int(self._limit * _LEAVE) - self._held)

    async def evict_results(self) -> int:
        """Measure the results and remove what exceeds the limit. Returns how many were removed."""
        uses = self._uses.last_uses()
        used = await asyncio.to_thread(self._used, uses)
        total = sum(used.values())
        metrics.view_result_bytes.set(total)
        self._held = total
        if total <= self._limit:
            return 0
        first = eviction_cutoff(used, int(self._limit * _LEAVE))
        gone = 0
        for keys in await asyncio.to_thread(lambda: list(self._older(uses, first))):
            with store_errors():
                await self._store.delete_many(RESERVED_BUCKET, keys)
            gone += len(keys)
            await asyncio.sleep(0)
        metrics.view_results_evicted.inc(gone)
        return gone

    def _used(self, uses: LastUses) -> Counter[int]:
        used: Counter[int] = Counter()
        for key, record in self._results():
            used[_last(uses, key, record)] += record.size
        return used

    def _older(self, uses: LastUses, first: int) -> Iterator[list[str]]:
        """Yield keys that were last used before the minute `first`, one page at a time."""
        keys: list[str] = []
        for key, record in self._results():
            if _last(uses, key, record) < first:
                keys.append(key)
            if len(keys) == _PAGE:
                yield keys
                keys = []
        if keys:
            yield keys

    def _results(self) -> Iterator[tuple[str, Record]]:
        after, more = "", True
        while more:
            page = self._store.list(RESERVED_BUCKET, prefix=RESULTS_PREFIX, after=after, limit=_PAGE)
            yield from page.entries
            after, more = page.next_after, page.truncated


def _last(uses: LastUses, key: str, record: Record) -> int:
    """Return the minute in which a result was last read, or made."""
    return max(record.modified // MINUTE_MS, uses.last_used_minute(key))


class ViewResultHandlers:
    """Makes view results for other nodes, in a worker."""

    def __init__(self, maker: TransformResultMaker, mesh: ClusterView) -> None:
        self._maker, self._mesh = maker, mesh

    @handler(MAKE_VIEW_RESULT)
    async def make_view_result(self, request: ViewResultRequest, context: CallContext) -> bytes:
        if not self._mesh.is_reader(request.bucket, request.key):
            raise NotHereError(f"{self._mesh.node_id} does not read this object")
        try:
            return await self._maker.make_for_peer(request)
        except PlanError as error:
            raise malformed_message(error) from error
