"""`mesh.open_iceberg`: a snapshot of an Iceberg table as a dataset of the data files that it consists of.

Law: the rows are those that an Iceberg reader sees. Data files whose rows were deleted or whose columns have
changed are read by PyIceberg, in this process, and stored again; what it cannot read is refused, never
guessed. A stream depends on one data file, the files that delete rows of it, and the present columns of
the table; none of these ever changes, and all of them are part of its name.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

from meshsdk.datasets.fields import check_source
from meshsdk.errors import AccessError, ConfigurationError, NotFoundError
from meshsdk.open_dataset import open_table_files, table_options
from meshsdk.tables.iceberg_deletes import (
    DeletedValues,
    EqualityDeletes,
    has_equality_deletes,
    plan_without_equality_deletes,
)
from meshsdk.tables.stored_streams import StoredStreams
from meshwire.dataset.column_filter import parse_filter
from meshwire.dataset.fields import parse_source
from meshwire.strict_json import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.open_dataset import Nulls
    from meshwire.dataset.fields import Source

_METADATA: Final = ".metadata.json"
_NUMBER: Final = re.compile(r"v?(\d+)")
_CLASSES: Final = {
    "==": "EqualTo",
    "!=": "NotEqualTo",
    "<": "LessThan",
    "<=": "LessThanOrEqual",
    ">": "GreaterThan",
    ">=": "GreaterThanOrEqual",
    "in": "In",
    "not in": "NotIn",
}


def open_iceberg(
    table: Any,
    *,
    columns: Sequence[str] | None = None,
    filter: Sequence[tuple[str, str, Any]] | None = None,
    nulls: Nulls = "skip",
    ids: Sequence[str] | None = None,
    snapshot_id: int | None = None,
    client: Client | None = None,
    deadline: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Open a snapshot of an Iceberg table as a dataset: one sample per row, as `mesh.open(kind="table")`.

    Arguments:
        table: the folder of the table, such as "s3://lake/db/sales", or its metadata file,
            "s3://lake/db/sales/metadata/00003-….metadata.json"; or a table that PyIceberg loaded from a
            catalog. Of a folder, the metadata file is the one that `version-hint.text` names, else the one
            with the greatest number.
        columns: names of columns, `user.age` for a member of a struct. Default: all of supported types.
        filter: as in `mesh.open`. Files that cannot match by their partition or by the statistics in the
            manifests are not read, nor are row groups that cannot by the statistics of their file.
        nulls, ids, client, deadline, progress: as in `mesh.open`.
        snapshot_id: the snapshot of the table. Default: the current one.

    Data files must lie below the table's folder, which may have been copied to another bucket or name. Those
    of which rows were deleted (by position, deletion vector or equality), or columns renamed, added or given
    another type, are read by PyIceberg, here, once, and stored in `_rows/` below the table, which needs the
    right to write there. Needs `pip install "shardmesh[iceberg]"`, where this is called, and pyarrow on the
    nodes; for `_rows/`, here, too.

    Raises ConfigurationError for data files that are not Parquet, rows deleted by a column that the table no
    longer has, and unknown columns and snapshots; NotFoundError if there is no table; AccessError; and as
    `mesh.open` does.

    Example:
        ds = mesh.open_iceberg("s3://lake/db/sales", columns=["price"], filter=[("day", ">=", 20000)])
    """
    from meshsdk.client.s3_client import connect

    client = client or connect()
    source, found = _table(client, table)
    try:
        scan = found.scan(snapshot_id=snapshot_id)
        schema = scan.projection()
    except ValueError as error:
        raise ConfigurationError(f"{source}: {error}") from error
    leaves = dict(_leaves(schema.fields, ""))
    chosen = _columns(leaves, columns, str(source))
    options = table_options("table", filter, nulls, ids)
    conditions: list[list[Any]] = options.get("filter", [])
    deletes, tasks = _plan_scan(found, scan, conditions if ids is None else None, str(source))
    by_path = {task.file.file_path: task for task in tasks}
    read = list(dict.fromkeys([*chosen, *(name for name, *_ in conditions if name in leaves)]))
    changed = changed_files(found, scan, read, by_path) if by_path else set()
    changed |= {path for path, task in by_path.items() if task.delete_files or deletes.of_file(path)}
    rows = IcebergRows(client, source, found, schema, read, deletes) if changed else None
    files: list[str] = []
    for path, task in sorted(by_path.items()):
        key = _data_file(task, found.metadata.location, source)
        files += rows.names(task) if rows and path in changed else [key.removeprefix(source.prefix)]
    if not files:
        matches = " that matches the filter" * bool(conditions)
        raise NotFoundError(f"{source} has no row in this snapshot{matches}")
    return open_table_files(
        str(source),
        files,
        columns=chosen,
        filter=filter,
        nulls=nulls,
        ids=ids,
        client=client,
        deadline=deadline,
        progress=progress,
    )


def _table(client: Client, table: Any) -> tuple[Source, Any]:
    """Return the folder of a table in the mesh, and PyIceberg's object of it."""
    try:
        from pyiceberg.catalog.noop import NoopCatalog
        from pyiceberg.serializers import FromInputFile
        from pyiceberg.table import StaticTable
    except ImportError as error:
        raise ConfigurationError(
            f'Iceberg tables need PyIceberg ({error}): pip install "shardmesh[iceberg]"'
        ) from error
    if not isinstance(table, str):
        bucket, _, folder = _without_scheme(table.metadata.location).partition("/")
        return parse_source(check_source(f"s3://{bucket}/{folder}")), table
    if table.endswith(_METADATA):
        folder, _, name = table.rpartition("/metadata/")
        source = parse_source(check_source(folder))
        key = f"{source.prefix}metadata/{name}"
    else:
        source = parse_source(check_source(table))
        key = _newest(client, source)
    files = _Files(client, source)
    try:
        metadata = FromInputFile.table_metadata(
            _File(client, source.bucket, key, f"s3://{source.bucket}/{key}")
        )
    except ValueError as error:
        raise ConfigurationError(
            f"s3://{source.bucket}/{key} is not the metadata of an Iceberg table: {error}"
        ) from error
    files.location = metadata.location
    return source, StaticTable(("shardmesh", key), metadata, key, files, NoopCatalog("shardmesh"))


def _newest(client: Client, source: Source) -> str:
    """Return the key of the metadata file of a folder. Raises NotFoundError."""
    folder = f"{source.prefix}metadata/"
    names = [entry.key.removeprefix(folder) for entry in client.list(source.bucket, folder)]
    numbered = [(name, _NUMBER.match(name)) for name in names if name.endswith(_METADATA)]
    found = {name: int(number[1]) for name, number in numbered if number is not None}
    if not found:
        raise NotFoundError(f"there is no Iceberg table in {source}: no file metadata/*{_METADATA}")
    if "version-hint.text" in names:
        hint = client.get(source.bucket, f"{folder}version-hint.text").decode().strip()
        for name in (hint, f"v{hint}{_METADATA}", f"{hint}{_METADATA}"):
            if name in found:
                return f"{folder}{name}"
    return folder + max(found, key=lambda name: (found[name], name))


def _columns(leaves: Mapping[str, bool], columns: Sequence[str] | None, table: str) -> list[str]:
    """Return the columns to read. Raises ConfigurationError for an unknown one."""
    chosen = [name for name, supported in leaves.items() if supported] if columns is None else [*columns]
    for name in chosen:
        if name not in leaves:
            raise ConfigurationError(f"there is no column {name!r} in {table}{suggestion(name, leaves)}")
    return chosen


def _leaves(fields: Iterable[Any], prefix: str) -> Iterator[tuple[str, bool]]:
    """Yield the columns that files have, and whether nodes read their type."""
    for field in fields:
        kind, name = field.field_type, f"{prefix}{field.name}"
        if kind.is_struct:
            yield from _leaves(kind.fields, f"{name}.")
            continue
        text = str(kind)
        numbers = re.fullmatch(r"list<(boolean|int|long|float|double)>", text) is not None
        yield name, numbers or (kind.is_primitive and not text.startswith(("decimal", "unknown")))


def _plan_scan(
    found: Any, scan: Any, conditions: list[list[Any]] | None, table: str
) -> tuple[EqualityDeletes, list[Any]]:
    """Return what deletes rows by equality, and the files of a scan, without those that cannot match. Raises
    ConfigurationError."""
    snapshot = scan.snapshot()
    if snapshot is None:
        return EqualityDeletes({}), []
    by_value = has_equality_deletes(found, snapshot)
    if conditions:
        try:
            return _plan(found, scan.filter(_expression(conditions)), by_value=by_value)
        except (TypeError, ValueError):  # the node compares values, and says which it cannot
            pass
    try:
        return _plan(found, scan, by_value=by_value)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(f"{table}: {error}; compact the table (rewrite_data_files)") from error


def _plan(found: Any, scan: Any, *, by_value: bool) -> tuple[EqualityDeletes, list[Any]]:
    """`by_value`: whether rows are deleted by equality; some writers name such files among the data."""
    if not by_value:
        try:
            return EqualityDeletes({}), list(scan.plan_files())
        except (ValueError, NotImplementedError) as error:
            if "equality" not in str(error):
                raise
    tasks = plan_without_equality_deletes(scan, found)
    return EqualityDeletes.of_snapshot(found, scan.snapshot()), tasks


def _expression(conditions: list[list[Any]]) -> Any:
    from pyiceberg import expressions

    found: Any = expressions.AlwaysTrue()
    for condition in parse_filter(conditions):
        kind = getattr(expressions, _CLASSES[condition.operator])
        several = condition.operator in ("in", "not in")
        value = condition.values if several else condition.values[0]
        found = expressions.And(found, kind(condition.column, value))
    return found


def _data_file(task: Any, location: str, source: Source) -> str:
    """Return the key of a data file. Raises ConfigurationError."""
    path, form = task.file.file_path, str(getattr(task.file.file_format, "value", task.file.file_format))
    if form.upper() != "PARQUET":
        raise ConfigurationError(f"{path} is {form}; only data files in Parquet are read")
    return _key(path, location, source)


def _without_scheme(location: str) -> str:
    return location.partition("://")[2] or location


def _key(path: str, location: str, source: Source) -> str:
    """Return the key in the mesh of a file that metadata names. Raises ConfigurationError."""
    root = f"{_without_scheme(location).rstrip('/')}/"
    if not _without_scheme(path).startswith(root):
        raise ConfigurationError(f"{path} is not below the table's location, {location}")
    return f"{source.prefix}{_without_scheme(path)[len(root) :]}"


class _Files:
    """The files of a table, for PyIceberg, which names them as its metadata does."""

    def __init__(self, client: Client, source: Source) -> None:
        self._client, self._source, self.location = client, source, ""
        self.properties: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<_Files of {self._source}>"

    def new_input(self, location: str) -> _File:
        return _File(self._client, self._source.bucket, _key(location, self.location, self._source), location)


class _File:
    """A file of metadata."""

    def __init__(self, client: Client, bucket: str, key: str, location: str) -> None:
        self._client, self._bucket, self._key, self.location = client, bucket, key, location

    def __repr__(self) -> str:
        return f"<_File {self.location}>"

    def __len__(self) -> int:
        return self._client.head(self._bucket, self._key).size

    def exists(self) -> bool:
        try:
            self._client.head(self._bucket, self._key)
        except NotFoundError:
            return False
        return True

    def open(self, seekable: bool = True) -> io.BytesIO:
        return io.BytesIO(self._client.get(self._bucket, self._key))


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
