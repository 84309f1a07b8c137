"""`mesh.open_lance`: a version of a Lance dataset as a table, through Arrow streams stored beside it.

Law: a stream has the rows of one fragment in its order, and is named by the fragment's metadata and the
columns; so a version that is opened again, or another that shares fragments, converts what is new alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError, NotFoundError
from meshsdk.open_dataset import open_table_files, table_options
from meshsdk.tables.stored_streams import StoredStreams
from meshwire.dataset.fields import parse_source
from meshwire.strict_json import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshsdk.open_dataset import Nulls
    from meshwire.dataset.fields import Source

_FORM: Final = 1
"""Raise it if the same fragment gives other streams than before."""


def open_lance(
    url: str,
    *,
    columns: Sequence[str] | None = None,
    filter: Sequence[tuple[str, str, Any]] | None = None,
    nulls: Nulls = "skip",
    ids: Sequence[str] | None = None,
    version: int | str | None = None,
    index: str | None = None,
    client: Client | None = None,
    deadline: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """Open a version of a Lance dataset: one sample per row, as `mesh.open(kind="table")`.

    The first call reads the wanted columns with Lance, here, a fragment at a time, and stores them as Arrow
    streams; deleted rows are left out. Later calls convert fragments that are new alone.

    Arguments:
        url: the folder of the dataset, such as "s3://vectors/items.lance".
        columns: names of columns, `user.age` for a member of a struct. Default: all.
        filter, nulls, ids, client, deadline, progress: as in `mesh.open`.
        version: a version or a tag of the dataset. Default: the newest.
        index: folder to store the streams in. Default: beside `url`, which needs the right to write there.

    Needs `pip install "shardmesh[lance]"`, where this is called, and pyarrow on the nodes.

    Raises ConfigurationError for an unknown column or version, NotFoundError if there is no dataset, and as
    `mesh.open` does.

    Example:
        ds = mesh.open_lance("s3://vectors/items.lance", columns=["vector", "label"])
    """
    from meshsdk.client.s3_client import connect

    client = client or connect()
    source = parse_source(check_source(url))
    options = table_options("table", filter, nulls, ids)
    opened = _open_lance_dataset(client, source, version)
    read = _stored_columns(opened.schema.names, columns, options.get("filter", []), str(source))
    beside = f"s3://{source.bucket}/{source.prefix.rstrip('/')}.rows" if index is None else index
    target = parse_source(check_source(beside))
    streams = StoredStreams(client, target)
    fragments = opened.get_fragments()
    files: list[str] = []
    for number, fragment in enumerate(fragments):
        made_of = [_FORM, fragment.metadata.to_json(), read]
        files += streams.names(
            f"{fragment.fragment_id:010d}", made_of, partial(fragment.to_batches, columns=read)
        )
        if progress is not None:
            progress(number + 1, len(fragments))
    if not files:
        raise NotFoundError(f"{source} has no rows in this version")
    return open_table_files(
        str(target),
        files,
        columns=columns,
        filter=filter,
        nulls=nulls,
        ids=ids,
        client=client,
        deadline=deadline,
        progress=progress,
    )


def _open_lance_dataset(client: Client, source: Source, version: int | str | None) -> Any:
    """Return Lance's object of the dataset. Raises ConfigurationError, NotFoundError."""
    try:
        import lance
    except ImportError as error:
        raise ConfigurationError(
            f'Lance datasets need pylance ({error}): pip install "shardmesh[lance]"'
        ) from error
    if next(iter(client.list(source.bucket, f"{source.prefix}_versions/")), None) is None:
        raise NotFoundError(f"there is no Lance dataset in {source}: nothing in _versions/")
    transport = client.transport
    keys = transport.keys.current()
    options = {
        "aws_endpoint": str(transport.settings.endpoint),
        "aws_region": transport.settings.region,
        "aws_access_key_id": keys.access_key,
        "aws_secret_access_key": keys.secret_key,
        "aws_virtual_hosted_style_request": "false",
        "allow_http": "true",
    }
    if keys.session_token:
        options["aws_session_token"] = keys.session_token
    place = f"s3://{source.bucket}/{source.prefix.rstrip('/')}"
    try:
        return lance.dataset(place, version=version, storage_options=options)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{source} cannot be opened: {error!s:.300}") from error


def _stored_columns(
    names: Sequence[str], columns: Sequence[str] | None, conditions: Sequence[Sequence[Any]], table: str
) -> list[str]:
    """Return the columns of the dataset that are converted. Raises ConfigurationError for an unknown one."""
    if columns is None:
        return list(names)
    wanted = dict.fromkeys([*columns, *(condition[0] for condition in conditions)])
    found = {name if name in names else name.partition(".")[0]: name for name in wanted}
    for name, given in found.items():
        if name not in names:
            raise ConfigurationError(f"there is no column {given!r} in {table}{suggestion(given, names)}")
    return sorted(found)
