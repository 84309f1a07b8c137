"""Listings of the objects of a source, with their records, or in columns where these are enough; and which
of the objects determine its samples.

Law: a source of a million plain objects is listed without an object in memory for each of them. Only files
whose content determines the samples are read, and need their records.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from meshd.core.listing_columns import ListingColumns
from meshd.datasets.parquet_row_copies import is_parquet, parquet_files
from meshd.datasets.tables import table_files
from meshd.datasets.token_files import token_files
from meshwire.dataset.archive_paths import archive_kind, is_table, prefer_uncompressed
from meshwire.dataset.build_snapshot import EmptySnapshotError
from meshwire.formats.json_lines import is_lines
from meshwire.formats.tfrecord_index import is_tfrecord
from meshwire.strict_json import shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshd.datasets.snapshot_capacity import SnapshotCapacity
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record
    from meshwire.dataset.build_snapshot import SnapshotBuild
    from meshwire.dataset.fields import FieldSpec, Source

_PAGE: Final = 1000
_EXAMPLES: Final = 5
_EMPTY: Final = "has no bytes: write and upload it again"
_FILES: Final[Mapping[str, Callable[[str], object]]] = {
    "auto": archive_kind,
    "tar": archive_kind,
    "parquet": is_parquet,
    "table": is_table,
}
"""What holds samples by its name, of the kinds of which no program writes a file without a byte. (A TFRecord
file without records has none.)"""


class SourceListings:
    """Lists sources, for a worker."""

    def __init__(self, store: ObjectStore, objects: RemoteObjects, capacity: SnapshotCapacity) -> None:
        self._store, self._objects, self._capacity = store, objects, capacity

    def __repr__(self) -> str:
        return f"<SourceListings of {self._objects!r}>"

    async def objects(
        self, source: Source, kind: str
    ) -> tuple[list[tuple[str, Record]] | ListingColumns, object | None]:
        """Return the objects of a source, and which listing of an origin they are of: in columns if none of
        them is read to find its samples. Raises BatchError Busy, TooLarge."""
        if kind not in ("auto", "objects"):
            return await self.records(source)
        plain = _PlainObjects(self._capacity, source, kind)
        found, revision = await self._objects.list_columns(source.bucket, source.prefix, plain)
        return await self.records(source) if found is None else (found, revision)

    async def records(self, source: Source) -> tuple[list[tuple[str, Record]], object | None]:
        """Return the objects of a source, and which listing of an origin they are of. Raises BatchError
        Busy."""
        if not self._objects.single_node:
            return await self._objects.list_revision(source.bucket, source.prefix)
        found, after = list[tuple[str, "Record"]](), ""
        while True:
            page = self._store.list(source.bucket, prefix=source.prefix, after=after, limit=_PAGE)
            found += page.entries
            if not page.truncated:
                return found, None
            after = page.next_after
            await asyncio.sleep(0)  # give other requests a turn between pages


class _PlainObjects:
    """Accepts objects that are not read to find samples, as many as fit into memory; a KeyFilter."""

    def __init__(self, capacity: SnapshotCapacity, source: Source, kind: str) -> None:
        self._capacity, self._source, self._kind = capacity, source, kind
        self._listed = 0

    def begin(self) -> None:
        self._listed = 0

    def accepts(self, keys: list[str]) -> bool:
        """Raises BatchError TooLarge."""
        self._listed += len(keys)
        self._capacity.require_room_to_list(self._listed, self._source)
        return self._kind == "objects" or not any(map(archive_kind, keys))


def rows_of(listing: Sequence[tuple[str, Record]] | ListingColumns) -> Iterable[tuple[str, str, int]]:
    """Return (key, ETag, size) of each object."""
    if isinstance(listing, ListingColumns):
        return listing
    return ((key, record.etag, record.size) for key, record in listing)


def named_files(
    listing: list[tuple[str, Record]], source: Source, names: Sequence[str]
) -> list[tuple[str, Record]]:
    """Return the objects with these names below the source, all of them without names. Raises
    EmptySnapshotError for one that is not there."""
    if not names:
        return listing
    wanted = {f"{source.prefix}{name}" for name in names}
    found = [entry for entry in listing if entry[0] in wanted]
    if missing := sorted(wanted - {key for key, _ in found})[:1]:
        raise EmptySnapshotError(
            "source", f"s3://{source.bucket}/{missing[0]} is part of the table, but does not exist"
        )
    return found


def scanned_files(
    listing: Sequence[tuple[str, Record]], kind: str, fields: Mapping[str, FieldSpec]
) -> list[tuple[str, Record]]:
    """Return the objects whose content determines the samples: archives, files of lines, arrays, …"""
    if kind == "objects":
        return []
    if kind in ("zarr", "mds"):
        return list(listing)
    if kind == "tokens":
        return token_files(listing)
    if kind == "parquet":
        return parquet_files(listing)
    if kind == "table":
        return table_files(listing)
    if kind == "tfrecord":
        return _once([entry for entry in listing if entry[1].size and is_tfrecord(entry[0])])
    if kind == "lines":
        wanted = {ext for spec in fields.values() for ext in spec.ext}
        return _once([entry for entry in listing if is_lines(entry[0], wanted)])
    return [entry for entry in listing if archive_kind(entry[0]) is not None]


def empty_files(listing: Sequence[tuple[str, Record]], source: Source, kind: str) -> list[str]:
    """Return the keys of files that hold samples by their names, but not a byte, of the kinds of which such a
    file is one that was not written to its end. Raises EmptySnapshotError if all are so."""
    holds = _FILES.get(kind)
    files = [(key, record.size) for key, record in listing if holds(key)] if holds else []
    empty = [key for key, size in files if not size]
    if empty and len(empty) == len(files):
        others = f", like the other {len(empty) - 1}," if len(empty) > 1 else ""
        raise EmptySnapshotError("source", f"no sample in {source}: {shown_value(empty[0])}{others} {_EMPTY}")
    return empty


def with_empty_files(built: SnapshotBuild, empty: Sequence[str]) -> SnapshotBuild:
    """Count these files among what was left out."""
    if not empty:
        return built
    examples = *(f"{shown_value(key)} {_EMPTY}" for key in empty[:1]), *built.examples
    return replace(built, skipped=built.skipped + len(empty), examples=examples[:_EXAMPLES])


def _once(files: list[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """Return the files without the compressed forms of those that are also there uncompressed."""
    read = set(prefer_uncompressed(key for key, _ in files).values())
    return [entry for entry in files if entry[0] in read]
