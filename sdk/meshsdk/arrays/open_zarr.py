"""`mesh.open_zarr`: windows over several variables of a Zarr store, or of files by references, as samples.

Law: the snapshot is prepared here, once for the same content and options, and stored beside the source;
nodes validate it like any other. A window is the same slice of every variable, by the names of its
dimensions; a dimension without a window is taken whole.
"""

from __future__ import annotations

import base64
import math
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from meshsdk.arrays.prepared_snapshot import PreparedSnapshot, index_folder, keep, open_prepared
from meshsdk.arrays.stored_chunks import (
    INLINE,
    BucketStore,
    Objects,
    ReferenceStore,
    chunk_grid,
    unknown_variable,
)
from meshsdk.datasets.fields import check_source
from meshsdk.errors import ConfigurationError
from meshsdk.ops.array_ops import zarr_window
from meshwire.dataset.fields import FieldSpec, Source, parse_source
from meshwire.dataset.snapshot import BytesColumn
from meshwire.formats.zarr_layout import MISSING
from meshwire.formats.zarr_window_layout import ABSENT, MAX_SLOTS, WindowLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.arrays.stored_chunks import ArrayStore, ChunkTable
    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshwire.formats.zarr_metadata import ZarrVariable
    from meshwire.frame.columns import Integers


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
            "/" is an array that is the store itself.
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
    source, store = _store(client, url, index)
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
        samples = PreparedSnapshot(
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


def _store(client: Client, url: str, index: str | None) -> tuple[Source, ArrayStore]:
    if url.endswith(".json"):
        bucket, _, key = url.removeprefix("s3://").partition("/")
        return Source(bucket, key), ReferenceStore(client, bucket, key)
    source = parse_source(check_source(url))
    return source, BucketStore(client, source, index_folder(source, index))


MAX_WINDOWS = 1 << 26


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """The windows of a dataset. `lengths`: of a window, by dimension; `starts`: int64[samples], by dimension;
    the last dimension of `lengths` changes fastest."""

    lengths: Mapping[str, int]
    starts: Mapping[str, Integers]

    @property
    def samples(self) -> int:
        return next(iter(self.starts.values())).size

    def names(self) -> list[str]:
        """Return the names of the samples: `time=17,lat=0`."""
        columns = [[f"{dim}={start}" for start in starts.tolist()] for dim, starts in self.starts.items()]
        return [",".join(parts) for parts in zip(*columns, strict=True)]


def window_grid(
    variables: Mapping[str, ZarrVariable],
    window: Mapping[str, int],
    stride: Mapping[str, int],
    within: Mapping[str, tuple[int, int]],
) -> WindowGrid:
    """Return the windows that lie in all variables. Raises ConfigurationError."""
    extents: dict[str, int] = {}
    for name, found in variables.items():
        for dim, extent in zip(found.dims, found.shape, strict=True):
            if extents.setdefault(dim, extent) != extent:
                raise ConfigurationError(f"{name!r} has {extent} along {dim!r}, others {extents[dim]}")
    options: tuple[tuple[str, object], ...] = (("window", window), ("stride", stride), ("within", within))
    for option, given in options:
        if not isinstance(given, Mapping):
            values = "(first, end)" if option == "within" else "a number"
            raise ConfigurationError(f"{option}={given!r}: give {values} by dimension, as in {{'time': …}}")
        unknown = next((dim for dim in given if dim not in (extents if option != "stride" else window)), None)
        if unknown is not None:
            known = ", ".join(map(repr, extents if option != "stride" else window))
            raise ConfigurationError(f"{option}: there is no dimension {unknown!r}; use {known}")
        for dim, value in given.items():
            if option == "within" and not (isinstance(value, (tuple, list)) and len(value) == 2):
                raise ConfigurationError(
                    f"within: {dim!r} has {value!r}; give (first, end), such as (0, 100)"
                )
    if not window:
        raise ConfigurationError(f"window={{}}: give a length for one of {', '.join(map(repr, extents))}")
    axes = []
    for dim, length in window.items():
        low, high = within.get(dim, (0, extents[dim]))
        step = stride.get(dim, length)
        if not (0 <= low < high <= extents[dim] and 1 <= length <= high - low and step >= 1):
            raise ConfigurationError(
                f"window={length}, stride={step} of {dim!r} do not fit into {low}…{high} of {extents[dim]}"
            )
        axes.append(np.arange(low, high - length + 1, step, dtype=np.int64))
    if math.prod(axis.size for axis in axes) > MAX_WINDOWS:
        raise ConfigurationError(f"more than {MAX_WINDOWS} windows: use a larger stride")
    grids = np.meshgrid(*axes, indexing="ij")
    return WindowGrid(dict(window), {dim: grid.ravel() for dim, grid in zip(window, grids, strict=True)})


@dataclass(frozen=True, slots=True)
class FieldPlaces:
    """A field: its layout, and its columns and specs (its own, and those of its further pieces)."""

    layout: WindowLayout
    columns: Mapping[str, BytesColumn]
    specs: Mapping[str, FieldSpec]


def field_places(
    field: str,
    array: str,
    found: ZarrVariable,
    table: ChunkTable,
    grid: WindowGrid,
    headers: IO[bytes],
    *,
    decode: bool,
) -> FieldPlaces:
    """Write the headers of a field's windows, and return where its bytes are. Raises ConfigurationError."""
    moving = [dim for dim in found.dims if dim in grid.starts]
    samples = grid.samples if moving else 1  # otherwise the same for all
    size = tuple(grid.lengths.get(dim, extent) for dim, extent in zip(found.dims, found.shape, strict=True))
    starts = np.stack(
        [grid.starts[dim][:samples] if dim in moving else np.zeros(samples, np.int64) for dim in found.dims]
    )
    chunk, window = np.array(found.chunk, np.int64)[:, None], np.array(size, np.int64)[:, None]
    first = starts // chunk
    counts = tuple(int(count) for count in ((starts + window - 1) // chunk - first + 1).max(axis=1))
    if math.prod(counts) > MAX_SLOTS:
        raise ConfigurationError(
            f"a window of {array!r} is in {math.prod(counts)} chunks of {list(found.chunk)}; at most "
            f"{MAX_SLOTS} are put together: choose a smaller window"
        )
    layout = _layout(found, size, counts, decode=decode)
    place = np.array(list(product(*map(range, counts))), np.int64).T  # [axes, slots]
    at = first[:, :, None] + place[:, None, :]  # [axes, samples, slots]
    needed = (at * chunk[:, :, None] < (starts + window)[:, :, None]).all(axis=0)
    numbers = np.ravel_multi_index(tuple(np.where(needed, at, 0)), chunk_grid(found))
    needed &= table.objects[numbers] != MISSING
    lengths = np.where(needed, table.lengths[numbers], ABSENT)
    begin = headers.tell()
    header = np.concatenate([(starts - first * chunk).T, lengths], axis=1).astype("<i8")
    headers.write(header.tobytes())
    own = begin + layout.header_bytes * np.arange(samples, dtype=np.int64)
    everywhere = np.zeros(grid.samples, np.int64) if samples == 1 else np.arange(grid.samples)
    columns = {field: _column(np.zeros(samples), own, np.full(samples, layout.header_bytes), everywhere)}
    specs = {field: FieldSpec(field, "bytes", array=array)}
    for slot in range(layout.slots):
        there, chunks = needed[:, slot], numbers[:, slot]
        name = f"{field}__{slot:04}"
        columns[name] = _column(
            np.where(there, table.objects[chunks], INLINE),
            np.where(there, table.offsets[chunks], own),
            np.where(there, table.lengths[chunks], layout.header_bytes),
            everywhere,
        )
        specs[name] = FieldSpec(name, "bytes", piece_of=field)
    return FieldPlaces(layout, columns, specs)


def _column(objects: Any, offsets: Integers, lengths: Any, samples: Integers) -> BytesColumn:
    return BytesColumn(
        objects.astype(np.int32)[samples],
        offsets[samples].astype(np.int64),
        lengths[samples].astype(np.int64),
    )


def _layout(
    found: ZarrVariable, window: Sequence[int], counts: Sequence[int], *, decode: bool
) -> WindowLayout:
    stored = np.dtype(found.dtype)
    scale, offset, missing = _meaning(found) if decode else (1.0, 0.0, ())
    floats = bool(missing) or (scale, offset) != (1.0, 0.0)
    dtype = stored.newbyteorder("=").name
    if floats and not (stored.kind == "f" and stored.itemsize >= 4):
        dtype = "float32" if stored.itemsize <= 2 else "float64"
    return WindowLayout(
        found.dtype, found.chunk, found.axes, tuple(found.codecs), 0 if found.fill is None else found.fill,
        tuple(window), tuple(counts), dtype, scale, offset, missing,
    )  # fmt: skip


def _meaning(found: ZarrVariable) -> tuple[float, float, tuple[float, ...]]:
    """Return scale, offset and the numbers that stand for missing values, by the conventions that xarray
    follows (CF). A fill value of 0 of numbers that are not packed is the default of Zarr and HDF5, and no
    mark of missing ones."""
    given = found.attributes
    packed = "scale_factor" in given or "add_offset" in given
    missing = [_number(given[name]) for name in ("_FillValue", "missing_value") if name in given]
    if found.masks_fill and "_FillValue" not in given and found.fill is not None and (found.fill or packed):
        missing.append(float(found.fill))
    kept = sorted({value for value in missing if not math.isnan(value)})
    return (
        float(_number(given.get("scale_factor", 1))),
        float(_number(given.get("add_offset", 0))),
        tuple(kept),
    )


def _number(value: Any) -> float:
    """Return a number of an attribute; xarray writes the float `_FillValue` of Zarr version 3 in base64."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return float(struct.unpack("<d", base64.b64decode(value))[0])
    return float(value)
