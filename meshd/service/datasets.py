"""Datasets: from a source and its fields to a pinned snapshot, of plain objects or of tar shards.

Law: who may not read every object of a snapshot learns nothing of it. A tar is scanned once per content and
its index kept; one that lies about itself is a clear error, never a partial dataset.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Literal, cast

from meshd.assembly.errors import BatchError
from meshd.kit.singleflight import SingleFlight
from meshd.transform.assets import MissingAssetError
from meshd.transform.errors import UnknownBuildError, UnknownOpError
from meshwire.columns import ColumnError
from meshwire.documents import PlanError, checked_choice, checked_object, read_json, required
from meshwire.fields import parse_fields, parse_source
from meshwire.shardindex import ShardIndex, index_tar
from meshwire.snapshots import EmptySnapshotError, build_from_objects, build_from_tars
from meshwire.tars import TarError, scan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.assembly.catalog import Catalog
    from meshd.assembly.errors import Code
    from meshd.service.access import Caller
    from meshd.service.readers import Readers
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record, Span
    from meshwire.fields import FieldSpec, Source
    from meshwire.snapshots import Built, Snapshot

Kind = Literal["auto", "objects", "tar"]
_PAGE = 1000
_READ_AHEAD = 64 << 10
MAX_MEMBERS = 10_000_000
_CODES: tuple[tuple[type[PlanError], Code], ...] = (
    (UnknownOpError, "UnknownOp"),
    (UnknownBuildError, "UnknownOpBuild"),
    (MissingAssetError, "NoSuchAsset"),
)


def invalid(error: PlanError) -> BatchError:
    """A PlanError in the protocol's words."""
    code: Code = next((code for kind, code in _CODES if isinstance(error, kind)), "InvalidPlan")
    return BatchError(code, str(error), detail={"path": error.path})


class DatasetService:
    """Snapshots and shard indexes. One a worker."""

    def __init__(self, store: ObjectStore, catalog: Catalog, readers: Readers) -> None:
        self._store, self._catalog, self._readers = store, catalog, readers
        self._indexing: SingleFlight[str, ShardIndex] = SingleFlight()

    def __repr__(self) -> str:
        return f"<DatasetService, {len(self._indexing)} shards being indexed>"

    async def create(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Make (or find) the snapshot of a source; what `POST /-/snapshots` answers.

        Raises BatchError: BadRequest, InvalidPlan, NoSuchBucket, AccessDenied, NoSuchKey (nothing there),
        BadSample (a tar that lies).
        """
        try:
            source, kind, fields = _parse(body)
            self._readers.require_listing(caller, source)
            built = await self._build(caller, source, kind, fields)
        except EmptySnapshotError as error:
            raise BatchError(
                "NoSuchKey", str(error), help="check the source's prefix and the fields' extensions"
            ) from error
        except PlanError as error:
            raise invalid(error) from error
        await self._readers.require(caller, built.snapshot)
        await self._catalog.add_snapshot(built.snapshot)
        return {
            **built.snapshot.summary(),
            "kind": built.snapshot.kind,
            "skipped": built.skipped,
            "examples": list(built.examples),
        }

    async def document(self, caller: Caller, digest: str) -> bytes:
        """A snapshot's document. Raises BatchError NoSuchSnapshot, AccessDenied."""
        await self.snapshot(caller, digest)
        return self._catalog.snapshot_bytes(digest)

    async def snapshot(self, caller: Caller, digest: str) -> Snapshot:
        """A snapshot its caller may read. Raises BatchError NoSuchSnapshot, AccessDenied."""
        snapshot = await self._catalog.snapshot(digest)
        await self._readers.require(caller, snapshot)
        return snapshot

    async def _build(
        self, caller: Caller, source: Source, kind: Kind, fields: Mapping[str, FieldSpec]
    ) -> Built:
        listing = await self._list(source)
        shards = [entry for entry in listing if entry[0].lower().endswith(".tar")]
        if kind == "tar" or (kind == "auto" and shards):
            await self._readers.require_keys(caller, source.bucket, [key for key, _ in shards])
            indexed = [
                (key, record.etag, record.size, await self.shard_index(source.bucket, key, record))
                for key, record in shards
            ]
            return await asyncio.to_thread(build_from_tars, indexed, source=source, fields=fields)
        objects = [(key, record.etag, record.size) for key, record in listing]
        return await asyncio.to_thread(build_from_objects, objects, source=source, fields=fields)

    async def _list(self, source: Source) -> list[tuple[str, Record]]:
        found: list[tuple[str, Record]] = []
        after = ""
        while True:
            page = self._store.list(source.bucket, prefix=source.prefix, after=after, limit=_PAGE)
            found += page.entries
            if not page.truncated:
                return found
            after = page.next_after
            await asyncio.sleep(0)  # other requests get their turn between pages

    async def shard_index(self, bucket: str, key: str, record: Record) -> ShardIndex:
        """The index of a tar object, made when first asked for. Raises BatchError BadSample when it lies."""
        name = f"shards/{record.etag}-{record.size}"
        document = self._catalog.read(name)
        if document is not None:
            try:
                return ShardIndex.from_bytes(document)
            except ColumnError:  # written by another version: made anew below
                pass
        index, _ = await self._indexing.run(name, lambda: self._index(name, f"s3://{bucket}/{key}", record))
        return index

    async def _index(self, name: str, url: str, record: Record) -> ShardIndex:
        try:
            with self._store.reading(record, 0, record.size) as spans:
                index = await asyncio.to_thread(_scan, spans, record.size)
        except TarError as error:
            raise BatchError(
                "BadSample",
                f"{url} is not a tar that can be read: {error}",
                help="write the shard again and make a new snapshot",
                detail={"url": url},
            ) from error
        await self._catalog.write(name, index.to_bytes())
        return index


def _parse(body: bytes) -> tuple[Source, Kind, Mapping[str, FieldSpec]]:
    document = checked_object(read_json(body), "", ("source", "kind", "fields"))
    source = parse_source(required(document, "source", ""))
    kind = cast("Kind", checked_choice(document.get("kind", "auto"), "kind", ("auto", "objects", "tar")))
    fields = required(document, "fields", "")
    if not isinstance(fields, dict):
        raise PlanError("fields", 'expected an object, as {"image": {"ext": ["jpg"]}}')
    return source, kind, parse_fields(fields)


def _scan(spans: Sequence[Span], size: int) -> ShardIndex:
    """Index a tar by its headers alone. Raises TarError."""
    members = scan(_Reader(spans).read, 0, size)
    return index_tar(_counted(members))


def _counted(members: Any) -> Any:
    for number, member in enumerate(members):
        if number >= MAX_MEMBERS:
            raise TarError(f"more than {MAX_MEMBERS} members", member.start)
        yield member


class _Reader:
    """pread over spans, reading ahead: the headers of small members share a read."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._start, self._data = 0, b""

    def read(self, offset: int, length: int) -> bytes:
        begin = offset - self._start
        if begin < 0 or begin + length > len(self._data):
            self._data = self._pread(offset, max(length, _READ_AHEAD))
            self._start, begin = offset, 0
        return self._data[begin : begin + length]

    def _pread(self, offset: int, length: int) -> bytes:
        parts = []
        for span in self._spans:
            if length <= 0:
                break
            if offset >= span.length:
                offset -= span.length
                continue
            data = os.pread(span.fd, min(length, span.length - offset), span.offset + offset)
            parts.append(data)
            length -= len(data)
            offset = 0
        return b"".join(parts)
