"""Rows of Iceberg tables that are deleted by equality: which files delete rows of which, and what is left.

Law: a delete file applies to the data files of its partition, or to all if its partition spec has no fields,
that have a smaller sequence number (https://iceberg.apache.org/spec/#scan-planning). A null equals a null.
PyIceberg reads both kinds of files; it does not apply these deletes itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class EqualityDelete(NamedTuple):
    """A file of deleted values, and the ids of the columns that they are of."""

    file: Any
    columns: tuple[int, ...]


class EqualityDeletes:
    """The equality deletes of a snapshot, by the data file that they apply to."""

    def __init__(self, by_path: Mapping[str, Sequence[EqualityDelete]]) -> None:
        self._by_path = by_path

    def __repr__(self) -> str:
        return f"<EqualityDeletes of rows in {len(self._by_path)} files>"

    @classmethod
    def of_snapshot(cls, found: Any, snapshot: Any) -> EqualityDeletes:
        """Read the manifests of a snapshot. Raises ConfigurationError for a delete file without columns."""
        from pyiceberg.manifest import DataFileContent

        deletes, data = list[tuple[Any, Any, int]](), list[tuple[Any, Any, int]]()
        for manifest in snapshot.manifests(found.io):
            for entry in manifest.fetch_manifest_entry(found.io):
                content = entry.data_file.content
                known = (entry.data_file, manifest.partition_spec_id, entry.sequence_number or 0)
                if content == DataFileContent.EQUALITY_DELETES:
                    deletes.append(known)
                elif content == DataFileContent.DATA:
                    data.append(known)
        specs, by_path = found.metadata.specs(), dict[str, list[EqualityDelete]]()
        for file, spec, number in deletes:
            if not file.equality_ids:
                raise ConfigurationError(f"{file.file_path} deletes rows by equality, but names no column")
            everywhere = specs[spec].is_unpartitioned()
            for target, other, earlier in data:
                same = everywhere or (spec == other and file.partition == target.partition)
                if same and earlier < number:
                    delete = EqualityDelete(file, tuple(sorted(file.equality_ids)))
                    by_path.setdefault(target.file_path, []).append(delete)
        return cls(by_path)

    def of_file(self, path: str) -> Sequence[EqualityDelete]:
        """Return what deletes rows of a data file."""
        return self._by_path.get(path, ())


def has_equality_deletes(found: Any, snapshot: Any) -> bool:
    """Return whether a manifest of deletes has a file of equality deletes."""
    from pyiceberg.manifest import DataFileContent, ManifestContent

    return any(
        entry.data_file.content == DataFileContent.EQUALITY_DELETES
        for manifest in snapshot.manifests(found.io)
        if manifest.content == ManifestContent.DELETES
        for entry in manifest.fetch_manifest_entry(found.io)
    )


def plan_without_equality_deletes(scan: Any, found: Any) -> list[Any]:
    """Return the tasks of a scan that has equality deletes, which PyIceberg would refuse to plan. Raises
    NotImplementedError if this release of PyIceberg cannot leave them out."""
    from pyiceberg.manifest import DataFileContent

    planner = getattr(scan, "_manifest_planner", None)
    if planner is None:
        raise NotImplementedError("rows are deleted by equality, for which PyIceberg 0.12 is needed")

    def wanted(entry: Any) -> bool:
        return bool(entry.data_file.content != DataFileContent.EQUALITY_DELETES)

    return list(planner.plan_files(scan.snapshot().manifests(found.io), manifest_entry_filter=wanted))


class DeletedValues:
    """Reads delete files of a table and removes the rows with their values."""

    def __init__(self, found: Any, schema: Any) -> None:
        self._found, self._schema = found, schema
        self._read: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<DeletedValues, {len(self._read)} files read>"

    def columns(self, deletes: Sequence[EqualityDelete]) -> list[str]:
        """Return the names of the columns that the deletes compare. Raises ConfigurationError for one that
        the table has no longer."""
        names = dict.fromkeys(name for delete in deletes for name in self._names(delete))
        return list(names)

    def remaining(self, table: Any, deletes: Sequence[EqualityDelete]) -> Any:
        """Return the rows of a table, with the columns that are compared, that are not deleted."""
        kept = np.ones(table.num_rows, np.bool_)
        flat = _flatten(table)
        for delete in deletes:
            path = delete.file.file_path
            if path not in self._read:
                self._read[path] = self._values(delete)
            kept &= ~_is_among(flat, self._read[path], self._names(delete))
        return table if kept.all() else table.filter(kept)

    def _names(self, delete: EqualityDelete) -> list[str]:
        names = [self._schema.find_column_name(number) for number in delete.columns]
        if None in names:
            raise ConfigurationError(
                f"{delete.file.file_path} deletes rows by a column that the table has no longer "
                f"(field {delete.columns[names.index(None)]}): compact the table (rewrite_data_files)"
            )
        return names

    def _values(self, delete: EqualityDelete) -> Any:
        import pyarrow as pa
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
        from pyiceberg.table import FileScanTask

        schema = self._schema.select(*self._names(delete))
        scan = ArrowScan(self._found.metadata, self._found.io, schema, AlwaysTrue())
        batches = list(scan.to_record_batches([FileScanTask(delete.file)]))
        shape = schema_to_pyarrow(schema, include_field_ids=False)
        made = [pa.Table.from_batches([batch]).cast(shape) for batch in batches]
        return _flatten(pa.concat_tables(made) if made else shape.empty_table())


def _flatten(table: Any) -> Any:
    import pyarrow as pa

    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    return table


def _is_among(table: Any, deleted: Any, names: Sequence[str]) -> Any:
    """Return bool[rows]: whether a row has the values of some row of `deleted` in these columns."""
    codes = np.zeros(deleted.num_rows + table.num_rows, np.int64)
    for column in _codes(table, deleted, names):
        pairs = codes * (int(column.max(initial=0)) + 1) + column
        codes = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
    return np.isin(codes[deleted.num_rows :], codes[: deleted.num_rows])


def _codes(table: Any, deleted: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield a number for each value of a column, first of `deleted`; equal values have the same."""
    import pyarrow as pa

    for name in names:
        values = table.column(name)
        both = pa.chunked_array([*deleted.column(name).cast(values.type).chunks, *values.chunks], values.type)
        encoded = both.combine_chunks().dictionary_encode(null_encoding="encode")
        yield np.asarray(encoded.indices).astype(np.int64)
