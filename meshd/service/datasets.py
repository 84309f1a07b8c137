"""Datasets: from a source and its fields to a pinned snapshot, of plain objects or of archives.

Law: who may not read every object of a snapshot learns nothing of it. An archive that lies about itself is a
clear error, never a partial dataset.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Literal, cast

from meshd.assembly.errors import BatchError
from meshd.transform.assets import MissingAssetError
from meshd.transform.errors import UnknownBuildError, UnknownOpError
from meshwire.archives.kinds import archive_kind
from meshwire.documents import PlanError, checked_choice, checked_object, read_json, required
from meshwire.fields import parse_fields, parse_source
from meshwire.snapshots import EmptySnapshotError, build_from_objects, build_from_tars

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meshd.assembly.catalog import Catalog
    from meshd.assembly.errors import Code
    from meshd.service.access import Caller
    from meshd.service.archives.reading import Archives
    from meshd.service.readers import Readers
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record
    from meshwire.fields import FieldSpec, Source
    from meshwire.snapshots import Built, Snapshot

Kind = Literal["auto", "objects", "tar"]
_PAGE = 1000
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
    """Snapshots. One a worker."""

    def __init__(self, store: ObjectStore, catalog: Catalog, readers: Readers, archives: Archives) -> None:
        self._store, self._catalog, self._readers, self._archives = store, catalog, readers, archives

    def __repr__(self) -> str:
        return f"<DatasetService over {self._archives!r}>"

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

    async def scanned(self, source: Source, kind: Kind, fields: Mapping[str, FieldSpec]) -> tuple[Built, int]:
        """The snapshot of a source as it is now, and when its newest object was written (ms since 1970): for
        views, whose readers were admitted elsewhere. Nothing is kept. Raises as `create` does, PlanError."""
        listing = await asyncio.to_thread(lambda: list(self._entries(source)))
        newest = max((record.modified for _, record in listing), default=0)
        return await self._built(listing, source, kind, fields), newest

    async def _build(
        self, caller: Caller, source: Source, kind: Kind, fields: Mapping[str, FieldSpec]
    ) -> Built:
        listing = await self._list(source)
        shards = _archives_of(listing)
        if kind == "tar" or (kind == "auto" and shards):
            await self._readers.require_keys(caller, source.bucket, [key for key, _ in shards])
        return await self._built(listing, source, kind, fields)

    async def _built(
        self,
        listing: Sequence[tuple[str, Record]],
        source: Source,
        kind: Kind,
        fields: Mapping[str, FieldSpec],
    ) -> Built:
        shards = _archives_of(listing)
        if kind == "tar" or (kind == "auto" and shards):
            indexed = []
            for key, record in shards:
                index = await self._archives.index(source.bucket, key, record)
                indexed.append((key, record.etag, index.size, index.files))
            return await asyncio.to_thread(build_from_tars, indexed, source=source, fields=fields)
        objects = [(key, record.etag, record.size) for key, record in listing]
        return await asyncio.to_thread(build_from_objects, objects, source=source, fields=fields)

    def _entries(self, source: Source) -> Iterator[tuple[str, Record]]:
        after, more = "", True
        while more:
            page = self._store.list(source.bucket, prefix=source.prefix, after=after, limit=_PAGE)
            yield from page.entries
            after, more = page.next_after, page.truncated

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


def _archives_of(listing: Sequence[tuple[str, Record]]) -> list[tuple[str, Record]]:
    return [entry for entry in listing if archive_kind(entry[0]) is not None]


def _parse(body: bytes) -> tuple[Source, Kind, Mapping[str, FieldSpec]]:
    document = checked_object(read_json(body), "", ("source", "kind", "fields"))
    source = parse_source(required(document, "source", ""))
    kind = cast("Kind", checked_choice(document.get("kind", "auto"), "kind", ("auto", "objects", "tar")))
    fields = required(document, "fields", "")
    if not isinstance(fields, dict):
        raise PlanError("fields", 'expected an object, as {"image": {"ext": ["jpg"]}}')
    return source, kind, parse_fields(fields)
