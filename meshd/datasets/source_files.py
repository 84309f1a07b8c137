"""Files of a source: which of the objects in a listing determine its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.datasets.parquet_row_copies import parquet_files
from meshd.datasets.tables import table_files
from meshd.datasets.token_files import token_files
from meshwire.dataset.archive_keys import archive_kind, prefer_uncompressed
from meshwire.dataset.build_snapshot import EmptySnapshotError
from meshwire.formats.json_lines import is_lines
from meshwire.formats.tfrecord_index import is_tfrecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.store.records import Record
    from meshwire.dataset.fields import FieldSpec, Source


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


def _once(files: list[tuple[str, Record]]) -> list[tuple[str, Record]]:
    """Return the files without the compressed forms of those that are also there uncompressed."""
    read = set(prefer_uncompressed(key for key, _ in files).values())
    return [entry for entry in files if entry[0] in read]
