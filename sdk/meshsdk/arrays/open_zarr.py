"""`mesh.open_zarr`: windows over several variables of a Zarr store, or of files by references, as samples.

Law: the snapshot is prepared here, once for the same content and options, and stored beside the source;
nodes validate it like any other.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING

import numpy as np

from meshsdk import transfers
from meshsdk.arrays.array_windows import field_places, window_grid
from meshsdk.arrays.stored_chunks import BucketStore, Objects, ReferenceStore, unknown_variable
from meshsdk.client.native_api import pin_snapshot
from meshsdk.datasets.dataset import Dataset
from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError, NotFoundError
from meshsdk.ops.array_ops import zarr_window
from meshwire.dataset.fields import Source, parse_fields, parse_source
from meshwire.dataset.snapshot import PREPARED_NAME, ObjectTable, Snapshot
from meshwire.frame.columns import StringColumn
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.arrays.array_windows import FieldPlaces, WindowGrid
    from meshsdk.arrays.stored_chunks import ArrayStore
    from meshsdk.client.s3_client import Client

_HEADERS = "places"


def open_zarr(
    url: str,
    variables: Sequence[str] | Mapping[str, str],
    *,
    window: Mapping[str, int],
    stride: Mapping[str, int] | None = None,
    within: Mapping[str, tuple[int, int]] | None = None,
    decode: bool = True,
    index: str | None = None,
    client: Client | None = None,
    deadline: float | None = None,
) -> Dataset:
    """Open windows over variables and coordinates of a Zarr store as samples; windows may cross chunks.

    Arguments:
        url: a folder of arrays of Zarr version 2 or 3, such as "s3://climate/era5.zarr"; or references to
            other files (NetCDF-4, HDF5) as kerchunk and VirtualiZarr write them, "s3://climate/era5.json".
        variables: names of arrays, coordinates included, each a field of its own name; or {field: array}.
        window: length by dimension, {"time": 8, "lat": 64}. Dimensions without one are taken whole.
        stride: distance of the windows' starts by dimension. Default: the window's length.
        within: (first, end) by dimension, such as the years for training.
        decode: apply `scale_factor` and `add_offset`, and make `_FillValue` and `missing_value` NaN, as
            xarray does. Numbers of at most two bytes become float32, larger integers float64. False: as
            stored.
        index: folder to store the places of the windows in. Default: beside `url`, which needs the right to
            write there. A later call with the same content and options uses what is there.
        client, deadline: as in `mesh.open`.

    Dimensions have the names that the arrays give (`dimension_names`, `_ARRAY_DIMENSIONS`), else dim_0 and
    so on. Chunks that are not stored have the array's fill value. Raises ConfigurationError, NotFoundError
    (no such array), and as `mesh.open` does.

    Example:
        ds = mesh.open_zarr("s3://climate/era5.zarr", ["t2m", "time"], window={"time": 8}, stride={"time": 1})
    """
    from meshsdk.client.s3_client import connect

    client = client or connect()
    chosen = dict(variables) if isinstance(variables, Mapping) else _by_name(variables)
    source, store = _store(client, url)
    objects = Objects()
    with tempfile.TemporaryFile() as headers:
        known = {array: store.variable(array) for array in dict.fromkeys(chosen.values())}
        if not known:
            raise unknown_variable("", store.names(), url)
        grid = window_grid(known, window, stride or {}, within or {})
        places = {
            field: field_places(
                field,
                array,
                known[array],
                store.chunks(array, known[array], objects, lambda data: _keep(headers, data)),
                grid,
                headers,
                decode=decode,
            )
            for field, array in sorted(chosen.items())
        }
        target = _store_once(client, index, source, headers, objects, places, grid)
    pinned = pin_snapshot(client.transport, str(target), "prepared", None, deadline)
    return Dataset(client, pinned).map(
        *(zarr_window(field, each.layout.document()) for field, each in places.items())
    )


def _by_name(variables: str | Sequence[str]) -> dict[str, str]:
    if isinstance(variables, str):
        raise ConfigurationError(f"variables={variables!r}: give a list, [{variables!r}]")
    return {array.rpartition("/")[2]: array for array in variables}


def _store(client: Client, url: str) -> tuple[Source, ArrayStore]:
    if url.endswith(".json"):
        bucket, _, key = url.removeprefix("s3://").partition("/")
        return Source(bucket, key), ReferenceStore(client, bucket, key)
    source = parse_source(check_source(url))
    return source, BucketStore(client, source)


def _keep(headers: IO[bytes], data: bytes) -> int:
    at = headers.tell()
    headers.write(data)
    return at


def _store_once(
    client: Client,
    index: str | None,
    source: Source,
    headers: IO[bytes],
    objects: Objects,
    places: Mapping[str, FieldPlaces],
    grid: WindowGrid,
) -> Source:
    """Store the headers and the snapshot, unless they are there. Returns their folder."""
    size = headers.tell()
    headers.seek(0)
    named = hashlib.sha256()
    while block := headers.read(1 << 20):
        named.update(block)
    draft = _snapshot(source, source, "", size, objects, places, grid)
    named.update(draft.hash.encode())
    beside = f"s3://{source.bucket}/{source.prefix.rstrip('/')}.windows" if index is None else index
    folder = parse_source(f"{check_source(beside)}{named.hexdigest()[:16]}")
    try:
        client.head(folder.bucket, f"{folder.prefix}{PREPARED_NAME}")
    except NotFoundError:
        headers.seek(0)
        etag = transfers.upload(client, headers, folder.bucket, f"{folder.prefix}{_HEADERS}")
        made = _snapshot(source, folder, etag, size, objects, places, grid)
        client.put(folder.bucket, f"{folder.prefix}{PREPARED_NAME}", made.to_bytes())
    return folder


def _snapshot(
    source: Source,
    folder: Source,
    etag: str,
    size: int,
    objects: Objects,
    places: Mapping[str, FieldPlaces],
    grid: WindowGrid,
) -> Snapshot:
    entries = [(folder.bucket, f"{folder.prefix}{_HEADERS}", etag.strip('"'), size), *objects.places]
    order = sorted(range(len(entries)), key=lambda number: entries[number][:2])
    moved = np.empty(len(entries), np.int64)
    moved[order] = np.arange(len(entries))
    table = ObjectTable.concatenate(
        [
            ObjectTable(
                bucket,
                StringColumn.from_strings([entries[at][1] for at in order if entries[at][0] == bucket]),
                StringColumn.from_strings([entries[at][2] for at in order if entries[at][0] == bucket]),
                np.array([entries[at][3] for at in order if entries[at][0] == bucket], np.int64),
            )
            for bucket in sorted({entry[0] for entry in entries})
        ]
    )
    columns = {name: column for each in places.values() for name, column in each.columns.items()}
    specs = {name: spec for each in places.values() for name, spec in each.specs.items()}
    try:
        parse_fields({name: {"ext": "x"} for name in places})
    except PlanError as error:
        raise ConfigurationError(str(error)) from error
    main = max(places, key=lambda field: np.prod(places[field].layout.window))
    first = columns[f"{main}__0000"].object
    begins = np.flatnonzero(np.diff(first, prepend=first[0] - 1))
    return Snapshot.from_parts(
        str(source) if source.bucket == table.bucket else f"s3://{table.bucket}/",
        "joined",
        table,
        np.append(begins, grid.samples).astype(np.int64),
        {name: columns[name].renumber(moved) for name in sorted(columns)},
        {name: specs[name] for name in sorted(specs)},
        StringColumn.from_strings(grid.names()),
    )
