"""Results of transform views, made once and kept under the hash of what was done to which content.

Law: where the source lies at an origin, the node that reads it makes the result, keeps it, and gives it to
the one that was asked, which keeps a copy; so no two make one at once. A node that does not answer is done
without: results are the same whoever makes them. One that is damaged where it is kept is made again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from meshd.assembly.addressing import DerivedAddress
from meshd.assembly.catalog import RESERVED_BUCKET
from meshd.assembly.errors import busy
from meshd.kit.singleflight import SingleFlight
from meshd.service.remote.wire import MadeAsk
from meshd.service.views.definitions import draws
from meshd.store.errors import ConditionFailedError
from meshd.store.records import Meta
from meshd.transform.programs import asset_digests
from meshwire import checksums
from meshwire.conditions import Conditions
from meshwire.documents import PlanError, canonical_json
from meshwire.plans import spec_document
from meshwire.transformviews import FIELD, TransformView
from meshwire.views import parse_view

if TYPE_CHECKING:
    from meshd.assembly.addressing import Frame, FrameSource
    from meshd.service.remote.objects import RemoteObjects
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record

RESULTS = "views/"


@lru_cache(maxsize=256)
def _program(view: TransformView) -> str:
    """What a transform process compiles."""
    return canonical_json({"spec": spec_document(view.plan), "fields": [FIELD]}).decode()


@lru_cache(maxsize=256)
def _parsed(document: str, source: str) -> TransformView:
    """Raises PlanError."""
    view = parse_view(json.loads(document), source)
    if not isinstance(view, TransformView):
        raise PlanError("view", "expected a view that transforms objects")
    return view


class ViewMaker:
    """One a worker."""

    def __init__(self, store: ObjectStore, frames: FrameSource, objects: RemoteObjects) -> None:
        self._store, self._frames, self._objects = store, frames, objects
        self._making: SingleFlight[str, None] = SingleFlight()

    def __repr__(self) -> str:
        return f"<ViewMaker, {len(self._making)} being made>"

    async def make(self, view: TransformView, key: str, source: Record) -> None:
        """Have the result of a source object here. Raises BatchError, StoreError."""
        place = result_key(view, key, source.etag, source.size)
        await self._making.run(place, lambda: self._make(view, key, source, place))

    async def _make(self, view: TransformView, key: str, source: Record, place: str) -> None:
        document = view.to_json().decode()
        ask = MadeAsk(document, view.source, key, source.etag, source.size)
        data = await self._objects.made(ask)
        if data is None:
            await self._make_here(view, key, source.etag, place)
        else:
            await self._keep(view, data, place)

    async def asked(self, ask: MadeAsk) -> bytes:
        """The result of a source object that this node reads, for another node. Raises BatchError,
        StoreError, PlanError."""
        view = _parsed(ask.view, ask.bucket)
        place = result_key(view, ask.key, ask.etag, ask.size)
        if sound_result(self._store, place) is None:
            await self._making.run(place, lambda: self._make_here(view, ask.key, ask.etag, place))
        record = self._store.get(RESERVED_BUCKET, place)
        if record is None:
            raise busy("a result was evicted this moment")
        return await asyncio.to_thread(self._store.read, record, 0, record.size)

    async def again(self, view: TransformView, key: str, source: Record) -> bytes:
        """The result of a source object, made anew and not kept. Raises BatchError."""
        ask = MadeAsk(view.to_json().decode(), view.source, key, source.etag, source.size)
        return await self._objects.made(ask) or await self._rendered(view, key, source.etag)

    async def _make_here(self, view: TransformView, key: str, etag: str, place: str) -> None:
        await self._keep(view, await self._rendered(view, key, etag), place)

    async def _rendered(self, view: TransformView, key: str, etag: str) -> bytes:
        position = _position(view, key)
        program, assets = _program(view), asset_digests(view.plan)
        address = DerivedAddress(view.digest, program, view.source, key, etag, position, assets)
        frame: Frame = await self._frames.frame(address)
        try:
            return await asyncio.to_thread(os.pread, frame.fd, frame.size, 0)
        finally:
            frame.close()

    async def _keep(self, view: TransformView, data: bytes, place: str) -> None:
        """Write the result down. Another worker may have been quicker: then it is there."""
        meta = await asyncio.to_thread(_meta, view, data)
        writer = self._store.writer(RESERVED_BUCKET, place, size=len(data))
        try:
            await writer.write(data)
            with suppress(ConditionFailedError):
                await writer.commit(meta, conditions=result_conditions(self._store, place))
        finally:
            await writer.abort()


def sound_result(store: ObjectStore, place: str) -> Record | None:
    """A result that is kept, None where there is none or its bytes are damaged."""
    record = store.get(RESERVED_BUCKET, place)
    return None if record is None or record.broken else record


def result_conditions(store: ObjectStore, place: str) -> Conditions:
    """Under which a result is written down: it is not there, or not sound."""
    record = store.get(RESERVED_BUCKET, place)
    broken = record is not None and record.broken
    return Conditions() if broken else Conditions(if_none_match=("*",))


def result_key(view: TransformView, key: str, etag: str, size: int) -> str:
    """The name of a result: what was done, to which content; for random ops to which key. Raises BatchError
    UnknownOpBuild."""
    plain, drawn = result_keys(view, key, etag, size)
    return drawn if draws(view) else plain


def result_keys(view: TransformView, key: str, etag: str, size: int) -> tuple[str, str]:
    """Both names that it may have, where it is not known any more whether an op drew."""
    kind = hashlib.sha256(view.content_type.encode()).hexdigest()[:8]
    plain = f"{RESULTS}{view.digest}-{kind}/{etag}-{size:x}"
    return plain, f"{plain}-{_hashed(key):x}"


def _position(view: TransformView, key: str) -> int:
    """What keys the randomness of one object: its name."""
    return _hashed(key) if draws(view) else 0


def _hashed(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 2


def _meta(view: TransformView, data: bytes) -> Meta:
    hasher = checksums.new(checksums.DEFAULT_ALGORITHM)
    hasher.update(data)
    return Meta(
        hashlib.md5(data, usedforsecurity=False).hexdigest(),
        {"content-type": view.content_type},
        checksums={checksums.DEFAULT_ALGORITHM: hasher.base64()},
        checksum_type="FULL_OBJECT",
    )
