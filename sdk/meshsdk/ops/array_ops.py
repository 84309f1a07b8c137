"""Constructors of the ops on arrays: reading and writing array files, columns and windows.

Law: that of `meshsdk.ops`, through which users call them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from meshsdk.ops import arguments as _values
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def npy(field: str, *, dtype: str | None = None, shape: Sequence[int | None] | None = None) -> OpSpec:
    """Read a `.npy` file: bytes → array.

    Arguments:
        dtype: the expected dtype. Default: that of the first sample.
        shape: the expected shape, None for an axis of any length. A shape without None makes the field dense.
            Default: any shape with as many axes as the first sample.
    """
    return OpSpec("npy", _values.field("npy", field), _values.array(dtype, shape))


def npz(
    field: str, name: str, *, dtype: str | None = None, shape: Sequence[int | None] | None = None
) -> OpSpec:
    """Read the array `name` from a `.npz` file: bytes → array; `dtype` and `shape` as in `npy`."""
    return OpSpec("npz", _values.field("npz", field), {"name": name, **_values.array(dtype, shape)})


def safetensors(
    field: str, name: str, *, dtype: str | None = None, shape: Sequence[int | None] | None = None
) -> OpSpec:
    """Read the tensor `name` from a `.safetensors` file: bytes → array; `dtype` and `shape` as in `npy`.

    BF16 tensors are converted to float32.
    """
    return OpSpec(
        "safetensors", _values.field("safetensors", field), {"name": name, **_values.array(dtype, shape)}
    )


def zarr(field: str, metadata: str) -> OpSpec:
    """Decode a row of a Zarr v3 array: bytes of a dataset of kind "zarr" → array.

    `metadata` is the zarr.json of the array, as "s3://BUCKET/…/zarr.json" or "sha256:HEX".
    """
    return OpSpec("zarr", _values.field("zarr", field), {"metadata": _values.asset("zarr", metadata)})


def zarr_chunk(field: str, metadata: str) -> OpSpec:
    """Decode a chunk of a Zarr array: bytes of a dataset of kind "chunks" → array.

    `metadata` is as in `zarr`, or the .zarray of an array of version 2.
    """
    return OpSpec(
        "zarr_chunk", _values.field("zarr_chunk", field), {"metadata": _values.asset("zarr_chunk", metadata)}
    )


def zarr_window(field: str, layout: Mapping[str, object]) -> OpSpec:
    """Put a window of a Zarr array together from the chunks that it touches; `mesh.open_zarr` adds it.

    `layout` is what `mesh.open_zarr` computes.
    """
    return OpSpec("zarr_window", _values.field("zarr_window", field), {"layout": dict(layout)})


def frombuffer(field: str, dtype: str, *, shape: Sequence[int | None] = ()) -> OpSpec:
    """Interpret bytes as little-endian numbers, such as a column of MDS: bytes → array of `shape`.

    The default shape is a single number. One extent may be None; it follows from the number of bytes.
    """
    args = {"dtype": dtype, "shape": _values.extents("frombuffer", "shape", shape)}
    return OpSpec("frombuffer", _values.field("frombuffer", field), args)


def feature(
    field: str, type: Literal["integer", "integers", "number", "numbers"], *, length: int = 0
) -> OpSpec:
    """Convert a feature of a `tf.Example` (a dataset of kind "tfrecord") to numbers.

    `type` says whether the feature is one value or a list; a list with a `length` must have exactly that many
    values and is dense. Features of bytes need no op.
    """
    return OpSpec("feature", _values.field("feature", field), {"type": type, "length": length})


def to_npy(field: str) -> OpSpec:
    """Encode an image or array: → bytes of a `.npy` file."""
    return OpSpec("to_npy", _values.field("to_npy", field))


def as_image(field: str, *, layout: Literal["hwc", "chw"] = "hwc", channels: int | None = None) -> OpSpec:
    """Treat an array as an image: [h, w], [h, w, c], or [c, h, w] → [h, w, c] of the same dtype.

    From here on the ops on images apply to it, and `ops.over` moves it with its image: masks, depth and flow
    of `.npy` files, columns of tables, slices of volumes. Numbers are moved, not changed: a mirrored flow
    keeps its signs.

    Arguments:
        layout: of arrays with three axes: "hwc", channels last, or "chw", channels first.
        channels: how many, 1 to 4, where `shape=` of the op before does not say it. [h, w] has one.

    Example:
        ops.npy("flow"), ops.as_image("flow", channels=2), ops.over(("image", "flow"), ops.hflip)
    """
    args = {"layout": layout} if channels is None else {"layout": layout, "channels": channels}
    return OpSpec("as_image", _values.field("as_image", field), args)


def gather_columns(field: str, columns: Sequence[int]) -> OpSpec:
    """Select these columns of the last axis, in the given order."""
    return OpSpec("gather_columns", _values.field("gather_columns", field), {"columns": list(columns)})


def window(
    field: str,
    extents: Sequence[int | None],
    *,
    at: Literal["random", "center", "first"] = "random",
    pad: float | None = None,
) -> OpSpec:
    """Cut a window out of an array.

    Arguments:
        extents: length along each axis; None for the whole axis.
        at: "random" (keyed by seed, epoch and position), "center", or "first" for the beginning.
        pad: a number that fills up an array that is shorter. Default: such a sample is bad.
    """
    args: dict[str, object] = {"extents": _values.extents("window", "extents", extents), "at": at}
    if pad is not None:  # otherwise left out, so that plans keep the hash they had without the argument
        args["pad"] = pad
    return OpSpec("window", _values.field("window", field), args)
