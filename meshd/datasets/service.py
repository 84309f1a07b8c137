"""Creates snapshots from a source and its fields: plain objects, archives or record files.

Law: a caller who may not read every object of a snapshot learns nothing about it. An inconsistent
archive raises an error; it never yields a partial dataset.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from meshd.core.api_errors import BatchError, in_progress
from meshd.core.listing_columns import ListingColumns
from meshd.datasets.derived_snapshots import DerivedSnapshots, parse_derivation
from meshd.datasets.listing_updates import ListingUpdates
from meshd.datasets.prepared_snapshots import PREPARED, read_prepared
from meshd.datasets.snapshot_build_cache import BuildResults, request_name, result_name
from meshd.datasets.snapshot_capacity import SnapshotCapacity
from meshd.datasets.snapshot_pages import SnapshotPages
from meshd.datasets.source_listings import (
    SourceListings,
    empty_files,
    named_files,
    rows_of,
    scanned_files,
    with_empty_files,
)
from meshd.datasets.tables import TableFiles, TableOptions, table_files
from meshd.datasets.zarr_arrays import ZarrSources
from meshd.telemetry import metrics
from meshd.transform.assets import MissingAssetError
from meshd.transform.errors import UnknownBuildError, UnknownOpError
from meshd.util.async_tasks import CallProgress, LongRunningCalls, StillRunningError
from meshwire.dataset.build_paged_snapshot import build_from_pages
from meshwire.dataset.build_snapshot import EmptySnapshotError, build_from_objects
from meshwire.dataset.column_filter import parse_filter
from meshwire.dataset.fields import MAX_FIELDS, fields_document, parse_fields, parse_source
from meshwire.dataset.paged_snapshot import TABLE_MEMBERS, TABLE_SLICES, PagedSnapshot, PageParts
from meshwire.strict_json import (
    PlanError,
    checked_choice,
    checked_object,
    checked_text,
    read_json,
    required_field,
    shown_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshd.auth.dataset_access import DatasetAccess
    from meshd.auth.identity import Caller
    from meshd.core.api_errors import Code
    from meshd.core.document_store import DocumentStore
    from meshd.datasets.archives.archive_service import ArchiveService
    from meshd.datasets.bucket_incarnations import BucketIncarnations, SnapshotIncarnations
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.build_snapshot import Snapshot, SnapshotBuild
    from meshwire.dataset.fields import FieldSpec, Source
    from meshwire.dataset.paged_snapshot import PageFacts
    from meshwire.dataset.snapshot import SnapshotKind

Kind = Literal["auto", "objects", "tar", "lines", "zarr", "tfrecord", "mds", "parquet", "table", "tokens"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_PARTS = {
    "zarr": "array",
    "tfrecord": "feature",
    "mds": "column",
    "parquet": "column",
    "table": "column",
    "tokens": "column",
}
"""What a field names, by kind."""
_READ_THROUGH = (
    "auto",
    "tar",
    "lines",
    "tfrecord",
    "mds",
    "parquet",
    "table",
    "tokens",
)  # every file is read once first
_ABSENT = {
    "tar": "archive in {source}; expected names that end in .tar, .tgz, .tar.zst or .zip. Plain files are "
    "read without a kind, or with kind 'objects'",
    "tfrecord": "TFRecord file in {source}; expected names that have .tfrecord or end in -00000-of-00008",
    "parquet": "Parquet file in {source}; expected names that end in .parquet or .pq",
}
"""What is said of a source without a file of its kind."""
_DEFAULTS = TableOptions()
_TABLE_OPTIONS = ("filter", "masks", "ids", "files")
_MAX_FILES = 20_000
_EMPTY = {
    "source": "check the prefix of the source (list it with: mesh ls) and the extensions of the fields",
    "filter": "look at samples with: mesh head; names and content are compared as they are stored",
    "join": 'give with `on` an expression that both have in common, such as part(name, "/", 0)',
}
_CODES: tuple[tuple[type[PlanError], Code], ...] = (
    (UnknownOpError, "UnknownOp"),
    (UnknownBuildError, "UnknownOpBuild"),
    (MissingAssetError, "NoSuchAsset"),
)


def invalid_plan(error: PlanError) -> BatchError:
    """Translates a PlanError into an error of the protocol."""
    code: Code = next((code for kind, code in _CODES if isinstance(error, kind)), "InvalidPlan")
    return BatchError(code, str(error), detail={"path": error.path})


class DatasetService:
    """Creates and returns snapshots, for a worker."""

    def __init__(
        self,
        store: ObjectStore,
        catalog: DocumentStore,
        readers: DatasetAccess,
        archives: ArchiveService,
        objects: RemoteObjects,
        births: SnapshotIncarnations,
        capacity: SnapshotCapacity | None = None,
    ) -> None:
        self._store, self._catalog, self._readers, self._archives = store, catalog, readers, archives
        self._objects, self.births, self._capacity = objects, births, capacity or SnapshotCapacity()
        self._structures = DerivedSnapshots(
            store, catalog, readers, archives, objects, births, self._capacity
        )
        self.pages = SnapshotPages(store, catalog, archives, objects, self._capacity)
        self._zarrs = ZarrSources(objects, self._capacity)
        self.parquets = self.pages.parquets
        self.tables = TableFiles(store, catalog, archives, objects, self._capacity)
        self._long: LongRunningCalls[None] = LongRunningCalls("datasets")
        self._results = BuildResults(catalog)
        self._listings = SourceListings(store, objects, self._capacity)
        self._updates = ListingUpdates(store, catalog, self._results, objects)
        self._listed: tuple[str, object] = "", None

    def __repr__(self) -> str:
        return f"<DatasetService over {self._archives!r}>"

    async def create_snapshot(self, caller: Caller, body: bytes) -> dict[str, Any]:
        """Create or find the snapshot of a source or a derived one; return the answer to `POST /-/snapshots`.

        Raises BatchError: BadRequest, InvalidPlan, NoSuchBucket, AccessDenied, NoSuchSnapshot, NoSuchKey (no
        samples), BadSample (an inconsistent archive), Busy.
        """
        births = self.births.freeze_incarnations()
        try:
            document = read_json(body)
            if isinstance(document, dict) and "from" in document:
                built = await self._structures.derive_snapshot(caller, parse_derivation(document))
                return await self._register(caller, built, births)
            if isinstance(document, dict) and document.get("kind") == PREPARED:
                return await self._register(caller, await self._read_prepared(caller, document), births)
            return await self._open_source(caller, document, births)
        except EmptySnapshotError as error:
            raise BatchError(
                "NoSuchKey", str(error), help=_EMPTY.get(error.path, _EMPTY["source"])
            ) from error
        except PlanError as error:
            raise invalid_plan(error) from error

    async def _open_source(
        self, caller: Caller, document: Any, births: Callable[[Iterable[str]], BucketIncarnations]
    ) -> dict[str, Any]:
        source, kind, fields, options = _parse(document)
        self._readers.require_listing(caller, source)
        made_of = _paged_kind(kind)
        paged = made_of is None or await self._objects.page_support.is_everywhere(made_of)
        if options.conditions and await self._objects.page_support.is_everywhere(TABLE_SLICES):
            options = replace(options, sliced=True)
        if kind == "table" and await self._objects.page_support.is_everywhere(TABLE_MEMBERS):
            options = replace(options, members=True)
        began = await self._objects.listing_revision(source.bucket, source.prefix)
        request = request_name(source, kind, fields, options, paged=paged)
        whole = self._readers.reads_whole_bucket(caller, source.bucket)
        found, how = self._results.find_unchanged(request, began) if whole else None, "known"
        if found is None and whole:
            began, update = await self._updates.find(request, source, kind, fields, began)
            if update is not None:
                found, began = update.result, update.revision
                if update.built is not None:
                    found, how = await self._register(caller, update.built, births), "updated"
                    await self._results.add(request, update.name, found)
                await self._results.record_listing(request, began, update.name)
        metrics.sources_opened.labels(how if found else "listed").inc()
        if found is None:
            listing, listed = await self._listings.objects(source, kind)
            began = began if listed is None else listed
            empty = list[str]()
            if not isinstance(listing, ListingColumns):
                listing = named_files(listing, source, options.files)
                empty = empty_files(listing, source, kind)
                scanned = [key for key, _ in scanned_files(listing, kind, fields)]
                await self._readers.require_keys(caller, source.bucket, scanned)
            name = await asyncio.to_thread(result_name, request, rows_of(listing))
            found = self._results.find(name)
            if found is None:
                built = with_empty_files(await self._build(listing, source, kind, fields, options), empty)
                built = built if paged else await self._without_pages(built)
                answer = await self._register(caller, built, births)
                await self._results.add(request, name, answer)
                await self._results.record_listing(request, began, name)
                self._listed = built.snapshot.hash, began
                return answer
            if not whole:
                await self._readers.require_snapshot(caller, await self._catalog.snapshot(found["snapshot"]))
            await self._results.record_listing(request, began, name)
        await self.births.record_snapshot(found["snapshot"], births([source.bucket]))
        self._listed = found["snapshot"], began
        return found

    async def _read_prepared(self, caller: Caller, document: Mapping[str, Any]) -> SnapshotBuild:
        """Read the snapshot that the SDK prepared from the source. Raises PlanError, BatchError."""
        checked_object(document, "", ("source", "kind"))
        source = parse_source(required_field(document, "source", ""))
        self._readers.require_listing(caller, source)
        return await read_prepared(
            (await self._listings.records(source))[0], source, self._objects, self._capacity
        )

    async def _register(
        self, caller: Caller, built: SnapshotBuild, births: Callable[[Iterable[str]], BucketIncarnations]
    ) -> dict[str, Any]:
        """Store a snapshot, and return the answer to the request for it. Raises BatchError AccessDenied."""
        snapshot = built.snapshot
        await self._readers.require_snapshot(caller, snapshot)
        await self.add_snapshot(snapshot, births(snapshot.objects.buckets))
        more = {"kind": snapshot.kind, "skipped": built.skipped, "examples": list(built.examples)}
        return {**snapshot.summary(), **more}

    async def add_snapshot(self, snapshot: Snapshot, births: BucketIncarnations) -> None:
        """Store a snapshot that was created from buckets of these incarnations. Raises BatchError Busy."""
        await self.births.record_snapshot(snapshot.hash, births)
        await self._catalog.add_snapshot(snapshot)

    def is_as_listed(self, snapshot: Snapshot) -> bool:
        """Return whether this node created the snapshot last and nothing was written since it was listed."""
        return self._listed == (snapshot.hash, self._objects.revision(snapshot.objects.buckets))

    async def snapshot_document(self, caller: Caller, digest: str) -> bytes:
        """Return the document of a snapshot. Raises BatchError NoSuchSnapshot, AccessDenied."""
        await self.snapshot(caller, digest)
        return await self._catalog.snapshot_bytes(digest)

    async def page_document(self, caller: Caller, digest: str, page: str) -> bytes:
        """Return the bytes of a page of a snapshot. Raises BatchError NoSuchKey and what `snapshot` raises,
        Busy, SnapshotChanged."""
        snapshot = await self.snapshot(caller, digest)
        count = len(snapshot.table) if isinstance(snapshot, PagedSnapshot) else 0
        if not isinstance(snapshot, PagedSnapshot) or not (
            page.isdecimal() and len(page) < 10 and int(page) < count
        ):
            raise BatchError("NoSuchKey", f"the snapshot {digest} has {count} pages, counted from 0")
        return await asyncio.to_thread(self.pages.page_document, snapshot, int(page))

    async def snapshot(self, caller: Caller, digest: str) -> Snapshot:
        """Return a snapshot that its caller may read. Raises BatchError NoSuchSnapshot, AccessDenied."""
        snapshot = await self._catalog.snapshot(digest)
        await self._readers.require_snapshot(caller, snapshot)
        await self.births.require_valid(caller, digest, snapshot.objects.buckets, f"snapshots/{digest}")
        return snapshot

    async def scan_source(
        self, source: Source, kind: Kind, fields: Mapping[str, FieldSpec]
    ) -> tuple[SnapshotBuild, int]:
        """Return the present snapshot of a source and the time of its newest object (ms since 1970).

        For views, which authorize their readers themselves. Nothing is stored. Raises as `create_snapshot`
        does, and PlanError.
        """
        listing, _ = await self._listings.records(source)
        newest = max((record.modified for _, record in listing), default=0)
        built, made_of = await self._build_from_objects(listing, source, kind, fields), _paged_kind(kind)
        paged = made_of is None or await self._objects.page_support.is_everywhere(made_of)
        return built if paged else await self._without_pages(built), newest

    async def _without_pages(self, built: SnapshotBuild) -> SnapshotBuild:
        """Return the snapshot in the form that all releases read. Raises BatchError TooLarge."""
        snapshot = built.snapshot
        if not isinstance(snapshot, PagedSnapshot):
            return built
        self._capacity.require_room(snapshot.samples, len(snapshot.fields), snapshot.source)
        return replace(built, snapshot=await asyncio.to_thread(snapshot.without_pages))

    async def _build(
        self,
        listing: Sequence[tuple[str, Record]] | ListingColumns,
        source: Source,
        kind: Kind,
        fields: Mapping[str, FieldSpec],
        options: TableOptions = _DEFAULTS,
    ) -> SnapshotBuild:
        if isinstance(listing, ListingColumns):
            return await asyncio.to_thread(build_from_objects, listing, source=source, fields=fields)
        scanned = scanned_files(listing, kind, fields)
        if kind in _READ_THROUGH and scanned:
            await self._patiently(listing, source, kind, fields, options)
        if kind == "table":
            parts = await self.tables.matching_parts(scanned, source, fields, options)
            return await self.tables.build_snapshot(parts, source, fields, options)
        if not fields:
            fields = parse_fields(await self.parquets.guess_fields(scanned, source))
        return await self._build_from_objects(listing, source, kind, fields)

    async def _patiently(
        self,
        listing: Sequence[tuple[str, Record]],
        source: Source,
        kind: Kind,
        fields: Mapping[str, FieldSpec],
        options: TableOptions = _DEFAULTS,
    ) -> None:
        """Index all files. Raises BatchError Busy (still running: retry), and as `_files`."""
        wanted = fields_document(fields), options
        named = repr((str(source), kind, wanted, [(key, r.etag) for key, r in listing]))

        async def index(progress: CallProgress) -> None:
            scanned = scanned_files(listing, kind, fields)
            if _paged_kind(kind) is not None:
                await self._page_facts(scanned, source, kind, fields, progress)
            else:
                parts = await self.tables.matching_parts(scanned, source, fields, options)
                await self.tables.index_files(parts, source, progress)

        try:
            await self._long.run_or_wait(hashlib.sha256(named.encode()).hexdigest(), index)
        except StillRunningError as error:
            message = f"the files of {source} are being indexed: {error}"
            raise in_progress(message, error.progress, shards=error.items) from None

    async def _build_from_objects(
        self,
        listing: Sequence[tuple[str, Record]],
        source: Source,
        kind: Kind,
        fields: Mapping[str, FieldSpec],
    ) -> SnapshotBuild:
        if kind == "table":
            members = await self._objects.page_support.is_everywhere(TABLE_MEMBERS)
            options = TableOptions(members=members)
            parts = await self.tables.matching_parts(table_files(listing), source, fields, options)
            return await self.tables.build_snapshot(parts, source, fields, options)
        if kind == "zarr":
            return await self._zarrs.build_snapshot(listing, source, fields)
        scanned = scanned_files(listing, kind, fields)
        if kind in _ABSENT and not scanned:
            raise EmptySnapshotError("source", f"there is no {_ABSENT[kind].format(source=source)}")
        if scanned or kind in ("lines", "mds", "tokens"):
            shards = await self._page_facts(scanned, source, kind, fields, CallProgress())
            return await asyncio.to_thread(
                build_from_pages,
                shards,
                kind=_paged_kind(kind) or "tar",
                source=source,
                fields=fields,
                open_pages=self.pages.open_pages,
            )
        return await asyncio.to_thread(build_from_objects, rows_of(listing), source=source, fields=fields)

    async def _page_facts(
        self,
        scanned: Sequence[tuple[str, Record]],
        source: Source,
        kind: Kind,
        fields: Mapping[str, FieldSpec],
        progress: CallProgress,
    ) -> list[tuple[str, str, PageFacts]]:
        """Return what the pages of shards say; those that the last snapshot of this source lacks are made."""
        if kind == "parquet":
            fields = fields or parse_fields(await self.parquets.guess_fields(scanned, source))
            await self.parquets.require_columns(scanned, source, fields)
        beside: dict[str, str] = {}
        if kind == "mds" or kind == "tokens":
            described = (
                await self.pages.mds.find_shards(scanned, source, fields)
                if kind == "mds"
                else self.pages.tokens.find_files(scanned, source, fields)
            )
            scanned = [(key, record) for key, record, _ in described]
            beside = {key: what for key, _, what in described}
        last = self._results.last_snapshot(request_name(source, kind, fields, _DEFAULTS))
        made_of = _paged_kind(kind) or "tar"
        parts = PageParts.of_fields(made_of, fields)
        return await self.pages.read_facts(scanned, source, made_of, parts, last, progress, beside)


def _paged_kind(kind: Kind) -> SnapshotKind | None:
    """Return the kind of the snapshots of a source that consist of pages; None if none do."""
    if kind == "auto" or kind == "tar":
        return "tar"
    return None if kind in ("objects", "table", "zarr") else kind


def _parse(value: Any) -> tuple[Source, Kind, Mapping[str, FieldSpec], TableOptions]:
    document = checked_object(value, "", ("source", "kind", "fields", *_TABLE_OPTIONS))
    source = parse_source(required_field(document, "source", ""))
    kind = cast("Kind", checked_choice(document.get("kind", "auto"), "kind", KINDS))
    options = _table_options(document, kind)
    if kind in ("parquet", "table") and "fields" not in document:
        return source, kind, {}, options  # all columns
    fields = required_field(document, "fields", "")
    if not isinstance(fields, dict):
        raise PlanError("fields", 'expected an object such as {"image": {"ext": ["jpg"]}}')
    parsed = parse_fields(fields)
    for name, spec in parsed.items():
        held = next((part for part in _PARTS.values() if getattr(spec, part) is not None), "ext")
        wanted = _PARTS.get(kind, "ext")
        if held != wanted and (spec.kind == "bytes" or kind == "zarr"):
            whose = kind if wanted != "ext" else " or ".join(k for k, part in _PARTS.items() if part == held)
            part = held if wanted == "ext" else wanted
            message = f'fields of the kind {whose}, and only those, are given as {{"{part}": "name"}}'
            raise PlanError(f"fields.{name}", message)
    return source, kind, parsed, options


def _table_options(document: Mapping[str, Any], kind: Kind) -> TableOptions:
    given = next((name for name in _TABLE_OPTIONS if name in document), None)
    if given is not None and kind != "table":
        raise PlanError(given, f"only a source of the kind table has {given!r}")
    masks = document.get("masks", False)
    if not isinstance(masks, bool):
        raise PlanError("masks", f"expected true or false, got {shown_value(masks)}")
    ids = document.get("ids", [])
    if not isinstance(ids, list) or len(ids) > MAX_FIELDS:
        raise PlanError("ids", f"expected a list of at most {MAX_FIELDS} columns")
    columns = tuple(checked_text(name, f"ids[{number}]", at_most=500) for number, name in enumerate(ids))
    files = document.get("files", [])
    if not isinstance(files, list) or len(files) > _MAX_FILES:
        raise PlanError("files", f"expected a list of at most {_MAX_FILES} names below the source")
    names = tuple(checked_text(name, f"files[{number}]", at_most=1024) for number, name in enumerate(files))
    conditions = parse_filter(document["filter"]) if "filter" in document else ()
    return TableOptions(conditions, masks, columns, names)
