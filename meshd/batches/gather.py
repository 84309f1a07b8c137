"""Gather: an ordered list of objects, shard members and byte ranges, sent as one stream.

Law: each item is authorized on its own; a failed item is marked with its error code and the rest is
still sent. Invariant: the stream never exceeds the credit of the caller; the next request continues with
the remaining items. Cold items on rotational disks are loaded in the order of the disks, together with those
of the same request that later ones will name again.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from meshd.batches.blob_reader import Blob
from meshd.batches.sample_responses import samples_body, tar_body
from meshd.core.api_errors import BatchError
from meshd.core.peer_messages import RemoteRecord, to_remote_record
from meshd.core.peer_source import ObjectRange
from meshd.datasets.service import invalid_plan
from meshd.peer_reads.load_window import LoadWindow
from meshd.store.errors import StoreError
from meshd.telemetry import metrics
from meshd.util.async_tasks import CooperativeYield
from meshd.util.page_cache import is_cached
from meshwire.frame.sample_frames import BLOB_ALIGNMENT
from meshwire.frame.tensor_frame import FRAME_VERSION
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.auth.dataset_access import DatasetAccess
    from meshd.auth.identity import Caller
    from meshd.auth.policy_evaluator import BulkAccess
    from meshd.batches.sample_responses import StreamBody
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.disks.page_loader import PageLoader
    from meshd.store.records import Record
    from meshwire.dataset.archive_index import ArchiveIndex

MAX_ITEMS: Final = 20_000
MAX_BODY_BYTES: Final = 4 << 20
MAX_KEY_BYTES: Final = 1024
_WINDOW_BYTES: Final = 64 << 20
"""A third of a second of a disk, by which the first items of a stream may be later."""
_CACHED_MEMBERS: Final = 100_000  # member names that a worker caches, over all shards

_PROBES: Final = 4
"""Items of an answer that are looked up in the page cache."""
_UNBOUNDED: Final = 1 << 62
_Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]


class GatherItem(Struct, frozen=True, forbid_unknown_fields=True):
    """One requested item. `range`: (offset, length) in bytes within the object or the member.

    `tag` is any JSON; it is returned unchanged and never interpreted.
    """

    bucket: Annotated[str, Meta(max_length=255)]
    key: Annotated[str, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
    member: Annotated[str, Meta(max_length=4096)] | None = None
    range: tuple[_Bytes, _Bytes] | None = None
    tag: msgspec.Raw = msgspec.Raw()

    @property
    def name(self) -> str:
        return self.key if self.member is None else self.member


class GatherRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A parsed gather request.

    `credit`: bytes of items, each rounded up to 64, that the caller can receive; the response has the first
    items that fit, at least one. `enough`: bytes after which the stream may end, so that a client can reuse
    its memory; a larger item comes alone. `names`: whether a frame of samples includes the item names.
    """

    items: Annotated[list[GatherItem], Meta(min_length=1, max_length=MAX_ITEMS)]
    format: Literal["samples", "tar"] = "samples"
    credit: Annotated[int, Meta(ge=1, le=1 << 60)] | None = None
    enough: Annotated[int, Meta(ge=1, le=1 << 60)] | None = None
    names: bool = True


_decoder = msgspec.json.Decoder(GatherRequest)
_Places = dict[str, tuple[int, int]]


class MemberCache:
    """Members of recently used shards: name → (offset, size), keyed by the content of the shard."""

    def __init__(self) -> None:
        self._held = 0
        self._places: OrderedDict[tuple[str, int], _Places] = OrderedDict()

    def __repr__(self) -> str:
        return f"<MemberCache, {self._held} members of {len(self._places)} shards>"

    def members_of(self, record: Record) -> _Places | None:
        name = (record.etag, record.size)
        found = self._places.get(name)
        if found is not None:
            self._places.move_to_end(name)
        return found

    def put_members(self, record: Record, places: _Places) -> None:
        name = (record.etag, record.size)
        self._held += len(places) - len(self._places.pop(name, ()))
        self._places[name] = places
        while self._held > _CACHED_MEMBERS and self._places:
            self._held -= len(self._places.popitem(last=False)[1])


class GatherService:
    """Serves gather requests for a worker. `pages` loads up to `window_bytes` at a time from rotational
    disks; 0 if there are none."""

    def __init__(
        self,
        store: ObjectStore,
        archives: ArchiveService,
        readers: DatasetAccess,
        objects: RemoteObjects,
        pages: PageLoader | None = None,
        window_bytes: int = 0,
    ) -> None:
        self._store, self._archives, self._readers = store, archives, readers
        self._objects, self._pages = objects, pages
        self._window_bytes = 0 if pages is None else min(_WINDOW_BYTES, window_bytes)
        self._members = MemberCache()

    def __repr__(self) -> str:
        return f"<GatherService {self._members!r}>"

    async def gather(self, caller: Caller, body: bytes) -> StreamBody:
        """Return the stream, with one row per answered item.

        Its metadata has `errors`, {item number: code}, and `tags`, both as JSON. Raises BatchError
        InvalidPlan for a malformed request; items that fail are marked instead.
        """
        request = _parse(body)
        blobs = await self._resolve_all(caller, request)
        for result, count in Counter(blob.error or "ok" for blob in blobs).items():
            metrics.gather_items.labels(result).inc(count)
        tags = [bytes(item.tag) for item in request.items[: len(blobs)]]
        if request.format == "tar":
            texts = [tag.decode() for tag in tags]
            return tar_body(self._store, blobs, len(blobs), texts, self._objects)
        errors = {str(number): blob.error for number, blob in enumerate(blobs) if blob.error}
        metadata = {"version": FRAME_VERSION, "errors": json.dumps(errors)}
        if any(tags):
            metadata["tags"] = "[" + ", ".join((tag or b"null").decode() for tag in tags) + "]"
        return samples_body(
            self._store, blobs, metadata, len(blobs), names=request.names, remote=self._objects
        )

    async def _resolve_all(self, caller: Caller, request: GatherRequest) -> list[Blob]:
        """Return a blob for each of the first items, as far as the credit allows."""
        run = _GatherRun(self._store, self._readers, self._objects, caller)
        await run.look_up(request.items)
        blobs: list[Blob] = []
        credit = request.credit or _UNBOUNDED
        enough = min(credit, request.enough or _UNBOUNDED)
        sent = 0
        turn = CooperativeYield()
        for item in request.items:
            blob = run.resolve(item)
            if blob is None:
                await self._open_shard(run, item)
                blob = run.resolve(item)
                assert blob is not None
            room = -(-blob.length // BLOB_ALIGNMENT) * BLOB_ALIGNMENT
            if sent and sent + room > enough:
                break
            if room > credit:
                blob, room = Blob(item.name, 0, error="TooLarge"), 0
            sent += room
            blobs.append(blob)
            await turn.yield_if_due()
        if self._pages is not None and self._window_bytes and await asyncio.to_thread(self._is_cold, blobs):
            await self._load(self._pages, run, request.items)
        return blobs

    def _is_cold(self, blobs: Sequence[Blob]) -> bool:
        """Whether one of some of these is not in memory (blocking)."""
        stored = [blob for blob in blobs if blob.record is not None and blob.length]
        return any(map(self._is_absent, stored[:: max(1, len(stored) // _PROBES)]))

    def _is_absent(self, blob: Blob) -> bool:
        if blob.record is None:
            return False
        place = blob.record, blob.offset, blob.length
        with suppress(StoreError), self._store.open_spans(*place) as spans:  # its reader reports it
            return not all(is_cached(span.fd, span.offset, span.length) for span in spans)
        return False

    async def _load(self, pages: PageLoader, run: _GatherRun, items: Sequence[GatherItem]) -> None:
        """Load the first items of a request that fit the window."""
        window, size, turn = LoadWindow(self._store), 0, CooperativeYield()
        for item in items:
            blob = run.resolve(item)
            if blob is None or blob.record is None:  # of a shard that is not open yet, or on another node
                continue
            size += blob.length
            if size > self._window_bytes:
                break
            window.add_range(item.bucket, item.key, blob.record, blob.offset, blob.length)
            await turn.yield_if_due()
        await window.load(pages, self._objects)

    async def _open_shard(self, run: _GatherRun, item: GatherItem) -> None:
        """Load the members of the item's shard into the run."""
        known = run.records[item.bucket, item.key]
        assert isinstance(known, tuple)
        record = known[0]
        places = self._members.members_of(record)
        try:
            if places is None:
                index = await self._archives.get_index(item.bucket, item.key, record)
                places = await asyncio.to_thread(_places, index)
                self._members.put_members(record, places)
            plain = await self._archives.decompressed(item.bucket, item.key, record)
        except BatchError as error:
            if error.code == "Busy":  # concerns the node, not this item
                raise
            run.records[item.bucket, item.key] = error.code
            return
        run.records[item.bucket, item.key] = (plain, places)


class _GatherRun:
    """The lookups of one request: the rights to a bucket and each shard are looked up once for all items."""

    def __init__(
        self, store: ObjectStore, readers: DatasetAccess, objects: RemoteObjects, caller: Caller
    ) -> None:
        self._store, self._readers, self._objects, self._caller = store, readers, objects, caller
        self._rights: dict[str, BulkAccess | str] = {}  # or an error code
        self.records: dict[tuple[str, str], tuple[Record, _Places | None] | str] = {}  # shards; or a code
        self._remote: dict[tuple[str, str], Record | None] = {}

    async def look_up(self, items: Sequence[GatherItem]) -> None:
        """Look up the objects that this node does not hold on those that do. Raises BatchError Busy."""
        objects = self._objects
        if objects.single_node:
            return
        names = list(
            {(item.bucket, item.key) for item in items if not objects.is_local(item.bucket, item.key)}
        )
        self._remote = dict(zip(names, await objects.find_many(names), strict=True))

    def resolve(self, item: GatherItem) -> Blob | None:
        """Return the blob of an item, or None if the members of its shard must be loaded first."""
        if item.member is None:
            found = self._find(item.bucket, item.key)
            if isinstance(found, str):
                return Blob(item.key, 0, error=found)
            return _cut(item, found, 0, found.size)
        known = self._shard(item)
        if isinstance(known, str):
            return Blob(item.member, 0, error=known)
        record, places = known
        if places is None:
            return None
        place = places.get(item.member)
        if place is None:
            return Blob(item.member, 0, error="NoSuchKey")
        return _cut(item, record, *place)

    def _shard(self, item: GatherItem) -> tuple[Record, _Places | None] | str:
        name = (item.bucket, item.key)
        known = self.records.get(name)
        if known is None:
            found = self._find(*name)
            known = self.records[name] = found if isinstance(found, str) else (found, None)
        return known

    def _find(self, bucket: str, key: str) -> Record | str:
        """Return the record, or the error code if it is missing or not allowed."""
        try:
            rights = self._rights.get(bucket)
            if rights is None:
                rights = self._rights[bucket] = self._readers.bulk_access(self._caller, bucket)
            if isinstance(rights, str):
                return rights
            if not rights.allows_key(key):
                return "AccessDenied"
            elsewhere = (bucket, key) in self._remote
            record = self._remote[bucket, key] if elsewhere else self._store.get(bucket, key)
            if record is not None and record.broken and not self._objects.single_node:
                record = to_remote_record(record)  # damaged on this node; read it from another owner
            return record or self._readers.missing_key_code(self._caller, bucket, key)
        except BatchError as error:
            self._rights.setdefault(bucket, error.code)
            return error.code


def _places(index: ArchiveIndex) -> _Places:
    spots = zip(index.offsets.tolist(), index.sizes.tolist(), strict=True)
    return dict(zip(index.names, spots, strict=True))  # the last of duplicate names wins, as in `find`


def _cut(item: GatherItem, record: Record, offset: int, size: int) -> Blob:
    """Return the requested range of an object or member of `size` bytes that begins at `offset`."""
    first, length = item.range or (0, size)
    if first > size or (first == size and length):
        return Blob(item.name, 0, error="InvalidRange")
    length = min(length, size - first)
    if not isinstance(record, RemoteRecord):
        return Blob(item.name, length, record, offset + first)
    part = ObjectRange(item.bucket, item.key, record.etag, record.size, offset + first, length)
    return Blob(item.name, length, part=part)


def _parse(body: bytes) -> GatherRequest:
    """Parses the body of a gather request. Raises BatchError InvalidPlan."""
    if len(body) > MAX_BODY_BYTES:
        raise invalid_plan(
            PlanError("", f"the document has more than {MAX_BODY_BYTES} bytes; send a smaller one")
        )
    try:
        body.decode()  # tags are passed on without parsing
        request = _decoder.decode(body)
    except (ValueError, RecursionError) as error:  # all errors of msgspec are ValueErrors
        raise invalid_plan(PlanError("", f"not a list of items: {str(error)[:200]}")) from error
    for number, item in enumerate(request.items):
        if not item.key.isascii() and len(item.key.encode()) > MAX_KEY_BYTES:
            raise invalid_plan(
                PlanError(f"items[{number}].key", f"a key has 1…{MAX_KEY_BYTES} bytes of UTF-8")
            )
    return request
