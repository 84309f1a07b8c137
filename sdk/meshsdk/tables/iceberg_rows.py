"""Rows of Iceberg's data files that are not what the table has: PyIceberg reads them, and streams keep them.

Law: a stream is made of one data file, the files that delete rows of it, and the columns as the table has
them now; none of these ever changes, and all are in its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshsdk.errors import AccessError, ConfigurationError
from meshsdk.tables.iceberg_deletes import DeletedValues
from meshsdk.tables.stored_streams import StoredStreams
from meshwire.dataset.fields import parse_source

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from meshsdk.client.s3_client import Client
    from meshsdk.tables.iceberg_deletes import EqualityDeletes
    from meshwire.dataset.fields import Source

FOLDER: Final = "_rows/"
"""Below the table: jobs that remove orphan files leave names that begin with `_`."""
_FORM: Final = 1
"""Raise it if the same files give other streams than before."""


class IcebergRows:
    """Streams of a table's rows with some of its columns."""

    def __init__(
        self,
        client: Client,
        table: Source,
        found: Any,
        schema: Any,
        columns: Sequence[str],
        deletes: EqualityDeletes,
    ) -> None:
        self._table, self._found, self._schema = table, found, schema.select(*columns)
        self._whole, self._columns, self._deletes = schema, list(columns), deletes
        self._values = DeletedValues(found, schema)
        self._streams = StoredStreams(client, parse_source(f"s3://{table.bucket}/{table.prefix}{FOLDER}"))

    def __repr__(self) -> str:
        return f"<IcebergRows of {self._table}>"

    def names(self, task: Any) -> list[str]:
        """Return the names below the table of the streams of a file, which are stored if they are not there.

        Raises ConfigurationError if PyIceberg cannot read it, AccessError without the right to store them.
        """
        path = task.file.file_path
        deletes = sorted(
            [each.file_path, getattr(each, "content_offset", None)] for each in task.delete_files
        )
        made_of = [_FORM, path, deletes, str(self._schema)]
        by_value = sorted([each.file.file_path, *each.columns] for each in self._deletes.of_file(path))
        if by_value:  # without them, streams keep the names that they had
            made_of.append(by_value)
        try:
            names = self._streams.names("rows", made_of, lambda: self._rows(task))
        except AccessError as error:
            raise error.saying(
                f"Rows of {path} were deleted, or columns changed, so its rows as they are now must be "
                f"stored in {self._table}{FOLDER}: allow that, or compact the table (rewrite_data_files)."
            ) from error
        return [f"{FOLDER}{name}" for name in names]

    def _rows(self, task: Any) -> Iterator[Any]:
        try:
            import pyarrow as pa
            from pyiceberg.expressions import AlwaysTrue
            from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow
        except ImportError as error:
            raise ConfigurationError(
                f"rows of {task.file.file_path} were deleted, or columns changed; PyIceberg reads them with "
                f'pyarrow ({error}): pip install "shardmesh[iceberg,parquet]"'
            ) from error
        shape = schema_to_pyarrow(self._schema, include_field_ids=False)
        deletes = self._deletes.of_file(task.file.file_path)
        read = self._whole.select(*self._columns, *self._values.columns(deletes)) if deletes else self._schema
        scan = ArrowScan(self._found.metadata, self._found.io, read, AlwaysTrue())
        try:
            for batch in scan.to_record_batches([task]):
                rows = pa.Table.from_batches([batch])
                if deletes:
                    rows = self._values.remaining(rows, deletes).select(shape.names)
                yield from rows.cast(shape).to_batches()
        except (ValueError, TypeError, KeyError, IndexError, NotImplementedError) as error:
            raise ConfigurationError(
                f"{task.file.file_path}: PyIceberg cannot read it as the table is now: {error!s:.200}; "
                "compact the table (rewrite_data_files)"
            ) from error


def changed_files(found: Any, scan: Any, columns: Sequence[str], files: Collection[str]) -> set[str]:
    """Return those files that were written when a column had another name or type, or was not there."""
    projection = scan.projection()
    wanted = {name: projection.find_field(name) for name in columns}

    def same(schema: Any) -> bool:
        return all(_is_same(schema, name, field) for name, field in wanted.items())

    schemas = {schema.schema_id: schema for schema in found.metadata.schemas}
    if all(map(same, schemas.values())):
        return set()
    written = {each.snapshot_id: schemas.get(each.schema_id) for each in found.metadata.snapshots}
    changed = set[str]()
    for manifest in scan.snapshot().manifests(found.io):
        for entry in manifest.fetch_manifest_entry(found.io):
            schema, path = written.get(entry.snapshot_id), entry.data_file.file_path
            if path in files and (schema is None or not same(schema)):  # or there is no record of its schema
                changed.add(path)
    return changed


def _is_same(schema: Any, name: str, field: Any) -> bool:
    """Return whether files of a schema have the column under its name and in its type, and none other."""
    if schema.find_column_name(field.field_id) != name:
        return False
    return str(schema.find_type(field.field_id)) == str(field.field_type)
