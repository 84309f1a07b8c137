"""`mesh.open_zarr`: windows over several variables of a Zarr store, or of files by references, as samples.

Law: the snapshot is prepared here, once for the same content and options, and stored beside the source;
nodes validate it like any other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from meshsdk.arrays.array_windows import field_places, window_grid
from meshsdk.arrays.prepared_samples import PreparedSamples, keep, open_prepared
from meshsdk.arrays.stored_chunks import BucketStore, Objects, ReferenceStore, unknown_variable
from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError
from meshsdk.ops.array_ops import zarr_window
from meshwire.dataset.fields import Source, parse_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.arrays.stored_chunks import ArrayStore
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset


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
                store.chunks(array, known[array], objects, lambda data: keep(headers, data)),
                grid,
                headers,
                decode=decode,
            )
            for field, array in sorted(chosen.items())
        }
        main = max(places, key=lambda field: np.prod(places[field].layout.window))
        columns = {name: column for each in places.values() for name, column in each.columns.items()}
        samples = PreparedSamples(
            columns,
            {name: spec for each in places.values() for name, spec in each.specs.items()},
            grid.names(),
            columns[f"{main}__0000"].object.astype(np.int64),
        )
        dataset = open_prepared(client, index, source, headers, objects, samples, deadline)
    return dataset.map(*(zarr_window(field, each.layout.document()) for field, each in places.items()))


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
