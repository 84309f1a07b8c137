"""Constructors of the ops on medical images: NIfTI volumes and DICOM files.

Law: that of `meshsdk.ops`, through which users call them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from meshsdk.ops import arguments as _values
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

Values = Literal["modality", "stored", "display"]


def nifti(
    field: str,
    *,
    part: Literal["values", "affine", "spacing"] = "values",
    dtype: str = "float32",
    shape: Sequence[int | None] | None = None,
    orient: str | None = None,
) -> OpSpec:
    """Read a volume from a NIfTI file, `.nii` or `.nii.gz`: bytes → array [x, y, z], or [x, y, z, time].

    The nodes need `shardmesh[medical]`. The values are those of nibabel's `get_fdata()`. If a `window` op
    follows, the window is cut out before the values are converted.

    Arguments:
        part: "values"; "affine" → float64 [4, 4], from voxel numbers to millimetres; "spacing" → float64
            [3], the distances of the voxels in millimetres. To read several parts, name the file in several
            fields.
        dtype: of the values, such as "uint8" for a mask of labels; a value that does not fit makes a sample
            bad.
        shape: the expected shape, None for an axis of any length. A shape without None makes the field dense.
            Default: any shape with as many axes as the first sample.
        orient: the directions to which the axes are turned, without interpolation: "RAS" is to the right, to
            the front and up. Default: as stored.
    """
    args: dict[str, Any] = {"part": part, "dtype": dtype}
    if shape is not None:
        args["shape"] = _values.extents("nifti", "shape", shape)
    if orient is not None:
        args["orient"] = orient
    return OpSpec("nifti", _values.field("nifti", field), args)


def decode_dicom(
    field: str,
    *,
    values: Values = "modality",
    window: tuple[float, float] | None = None,
    frames: bool | None = None,
    dtype: str | None = None,
    channels: int | None = None,
) -> OpSpec:
    """Decode a DICOM file: bytes → [height, width, channels], or [frames, height, width, channels].

    The nodes need `shardmesh[medical]`. Ops on images can follow; they treat all frames alike.

    Arguments:
        values: "modality" → float32 in units of the modality, such as Hounsfield units; "stored" → as stored;
            "display" → uint8 as a viewer shows them, MONOCHROME1 inverted. Colour images are RGB of uint8.
        window: (center, width) for "display". Default: the first window of the file, or else all values.
        frames: whether files have several frames. Default: as in the first sample.
        dtype, channels: the dtype and channels that files must have. Default: those of the first sample.
    """
    given = {
        "window": None if window is None else [float(number) for number in window],
        "frames": frames,
        "dtype": dtype,
        "channels": channels,
    }
    args: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return OpSpec("decode_dicom", _values.field("decode_dicom", field), args | {"values": values})


def dicom_volume(
    field: str,
    slots: int,
    *,
    slices: int | None = None,
    size: Sequence[int | None] = (None, None),
    values: Values = "modality",
    window: tuple[float, float] | None = None,
    dtype: str = "float32",
) -> OpSpec:
    """Assemble a volume from the slices of a DICOM series; `mesh.open_dicom` adds this op.

    Arguments:
        slots: the largest number of files of a sample.
        slices: the number of files of every sample, None if it differs between samples.
        size: [rows, columns], None for one that differs between samples.
        values, window, dtype: as in `decode_dicom`.
    """
    args: dict[str, Any] = {"slots": slots, "slices": slices, "size": list(size), "values": values}
    args |= {"window": None if window is None else [float(number) for number in window], "dtype": dtype}
    return OpSpec("dicom_volume", _values.field("dicom_volume", field), args)


def slide_window(field: str, slots: int, size: Sequence[int], *, channels: int = 3) -> OpSpec:
    """Assemble a window of a slide from its tiles; `mesh.open_slides` adds this op.

    Arguments:
        slots: the largest number of tiles of a sample.
        size: [height, width] of the window.
        channels: of the slides, 1 or 3.
    """
    args = {"slots": slots, "size": list(size), "channels": channels}
    return OpSpec("slide_window", _values.field("slide_window", field), args)
