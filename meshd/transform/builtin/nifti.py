"""The op `nifti`: volumes of NIfTI files, with the place of their voxels.

Law: the values are those of nibabel's `get_fdata()`, rounded once to the dtype. Fused with the window that
follows, only the window is converted, to the same bits. What a header claims is checked against the bytes
before anything is allocated.
"""

from __future__ import annotations

import io
import logging
import math
import zlib
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from meshd.transform.builtin.array_files import MAX_ARRAY_BYTES, array_type, checked_shape
from meshd.transform.builtin.array_ops import Cast, Window
from meshd.transform.builtin.text import check_bytes
from meshd.transform.errors import BadSampleError, MissingLibraryError
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import Parameter, choice, dtype, extents
from meshd.transform.registry import operation
from meshwire.strict_json import PlanError, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshd.transform.parameters import Extents
    from meshd.transform.registry import Operation
    from meshwire.plan.keyed_random import KeyedRandom

FORMATS = "a NIfTI-1 or NIfTI-2 file, `.nii` or `.nii.gz`"
_GZIP = b"\x1f\x8b"
_HEAD = 1024
_EXTRA = 1 << 20
"""Bytes after the voxels that are tolerated, as nibabel does."""


@cache
def load_library() -> Any:
    """Return the module `nibabel`. Raises MissingLibraryError."""
    try:
        import nibabel
    except (ImportError, OSError) as error:
        raise MissingLibraryError("nibabel", "medical") from error
    logging.getLogger("nibabel.global").disabled = True  # the bad sample reports the problem
    return nibabel


class Volume(msgspec.Struct, frozen=True):
    """A file: `voxels` as stored, in the file's order; `value = stored * slope + offset` if `slope` is not
    None; `affine`: float64[4, 4], from voxel numbers to millimetres."""

    voxels: npt.NDArray[Any]
    slope: float | None
    offset: float
    affine: npt.NDArray[np.float64]

    def turned(self, codes: str) -> Volume:
        """Return the volume with its first three axes along the directions `codes`. Raises
        BadSampleError."""
        directions = load_library().orientations
        if self.voxels.ndim < 3:
            raise BadSampleError(f"it has {self.voxels.ndim} axes; orient needs three")
        found = directions.io_orientation(self.affine)
        if np.isnan(found).any():
            raise BadSampleError("its affine does not say where its axes point")
        change = directions.ornt_transform(found, directions.axcodes2ornt(codes))
        return Volume(
            directions.apply_orientation(self.voxels, change),
            self.slope,
            self.offset,
            self.affine @ directions.inv_ornt_aff(change, self.voxels.shape),
        )

    def values(self, part: tuple[slice, ...], dtype: str) -> npt.NDArray[Any]:
        """Return the values of a part. Raises BadSampleError if they do not fit into the dtype."""
        stored = self.voxels[part]
        if stored.size * np.dtype(dtype).itemsize > MAX_ARRAY_BYTES:
            raise BadSampleError(f"a volume of {stored.size} voxels; at most 1 GiB is delivered")
        made, cast = np.empty(stored.shape, dtype), Cast(dtype)
        axis = int(np.argmax(np.abs(stored.strides))) if stored.ndim else 0
        into, out = np.moveaxis(stored, axis, 0), np.moveaxis(made, axis, 0)
        with np.errstate(over="ignore"):
            for at in range(len(into)):  # slice by slice, for the sake of memory
                if self.slope is None:
                    out[at] = cast.convert(into[at])
                else:
                    out[at] = cast.convert(into[at].astype(np.float64) * self.slope + self.offset)
        return made


def read_volume(data: bytes, *, header_only: bool = False) -> Volume:
    """Return the volume of a file; with `header_only`, its voxels are zeros that take no memory.

    Raises BadSampleError.
    """
    packed = data[:2] == _GZIP
    head = _unpack(data, _HEAD, part=True) if packed else data[:_HEAD]
    try:
        header = _header(head)
        shape = tuple(int(extent) for extent in header.get_data_shape())
        kind, start = header.get_data_dtype(), int(header.get_data_offset())
        slope, offset = header.get_slope_inter()
        affine = np.asarray(header.get_best_affine(), np.float64)
    except BadSampleError:
        raise
    except Exception as error:  # the parser of a foreign format: whatever it raises, the file is at fault
        raise BadSampleError(f"not a readable NIfTI file: {error}") from error
    if kind.kind not in "iuf":
        raise BadSampleError(f"voxels of {kind.name}; known are integers and floats")
    if not shape or min(shape) < 0 or start < 0 or math.prod(shape) * kind.itemsize > MAX_ARRAY_BYTES:
        raise BadSampleError(f"a volume of {list(shape)} voxels of {kind.name}; at most 1 GiB is read")
    count, end = math.prod(shape), start + math.prod(shape) * kind.itemsize
    if header_only:
        return Volume(np.broadcast_to(np.zeros((), kind), shape), slope, offset or 0.0, affine)
    content = _unpack(data, end) if packed else data
    if len(content) < end:
        raise BadSampleError(f"truncated: the header needs {end} bytes, and there are {len(content)}")
    voxels = np.frombuffer(content, kind, count, start).reshape(shape, order="F")
    return Volume(voxels, slope, offset or 0.0, affine)


def _header(head: bytes) -> Any:
    library = load_library()
    size = head[:4]
    for length, magic, cls in (
        (348, (344, b"n+1\0"), library.Nifti1Header),
        (540, (4, b"n+2\0"), library.Nifti2Header),
    ):
        if length in (int.from_bytes(size, "little"), int.from_bytes(size, "big")):
            if head[magic[0] : magic[0] + 4] != magic[1]:
                raise BadSampleError("a header without voxels (.hdr and .img): store it as one .nii file")
            return cls.from_fileobj(io.BytesIO(head))
    raise BadSampleError(f"not {FORMATS.replace('`', '')}")


def _unpack(data: bytes, size: int, *, part: bool = False) -> bytes:
    """Return the first `size` bytes of a gzip file, whose checksums are verified unless `part`.

    Raises BadSampleError, also if there is much more.
    """
    made, rest, room = bytearray(), data, size if part else size + _EXTRA
    while rest[:2] == _GZIP and len(made) < room:
        stream = zlib.decompressobj(wbits=31)
        try:
            made += stream.decompress(rest, room - len(made))
        except zlib.error as error:
            raise BadSampleError(f"its compression is damaged: {error}") from None
        if not stream.eof:
            if part:
                break
            raise BadSampleError("its compressed content is cut short, or longer than its header says")
        rest = stream.unused_data
    return bytes(made[:size])


def _codes(value: Any, path: str) -> str | None:
    """Three letters for the directions in which the axes increase, such as "RAS", or null."""
    if value is None:
        return None
    pairs = ("LR", "PA", "IS")
    if (
        not isinstance(value, str)
        or len(value) != 3
        or any(sum(each in pair for each in value) != 1 for pair in pairs)
    ):
        raise PlanError(
            path, f'expected one letter each of L/R, P/A and I/S, such as "RAS", got {shown_value(value)}'
        )
    return value


@operation(
    "nifti",
    Parameter("part", choice("values", "affine", "spacing"), "values"),
    Parameter("dtype", dtype, "float32"),
    Parameter("shape", extents, None),
    Parameter("orient", _codes, None),
    takes=f"bytes of {FORMATS}",
    gives='`dtype` of `shape`; float64 [4, 4] for the part "affine", float64 [3] for "spacing"',
    refuses="not such a file, truncated or damaged; colours and complex numbers; another shape; values that "
    "do not fit into `dtype`; over 1 GiB",
)
@dataclass(frozen=True, slots=True)
class Nifti:
    """The voxels of a NIfTI file, scaled as its header says, in the order of nibabel: [x, y, z] or [x, y, z,
    time]. `orient` turns the axes to the closest directions, so that "RAS" leads to the right, to the
    front and up. Without a `shape`, a plan takes the number of axes from the dataset's first sample.
    "affine": from voxel numbers to millimetres; "spacing": of voxels, in millimetres; both after `orient`."""

    part: Literal["values", "affine", "spacing"]
    dtype: str
    shape: Extents | None
    orient: str | None

    def __post_init__(self) -> None:
        load_library()

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """Return the arguments, with the number of axes of the first sample unless a shape is given.

        Raises BadSampleError.
        """
        if args.get("shape") is not None or args.get("part", "values") != "values":
            return dict(args)
        return {**args, "shape": [None] * read_volume(first(), header_only=True).voxels.ndim}

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        if self.part == "affine":
            return FieldType("array", "float64", (4, 4))
        if self.part == "spacing":
            return FieldType("array", "float64", (3,))
        if self.shape is None:
            raise ValueError("needs a shape here, such as [null, null, null]")
        return array_type(self.dtype, self.shape)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        if self.part == "values":
            found = self.open(value)
            return found.values((slice(None),) * found.voxels.ndim, self.dtype)
        found = self._turn(read_volume(value, header_only=True))
        if self.part == "affine":
            return found.affine
        spacing: npt.NDArray[Any] = np.sqrt(np.square(found.affine[:3, :3]).sum(axis=0))
        return spacing

    def _turn(self, found: Volume) -> Volume:
        return found if self.orient is None else found.turned(self.orient)

    def open(self, value: bytes) -> Volume:
        """Return the volume, as yet unconverted. Raises BadSampleError."""
        found = self._turn(read_volume(value))
        checked_shape(found.voxels, self.shape)
        return found

    def fuse(self, following: Operation) -> Operation | None:
        if self.part == "values" and isinstance(following, Window):
            return _NiftiWindow(self, following)
        return None


class _NiftiWindow(msgspec.Struct, frozen=True):
    """nifti, fused with the window that follows: only the window is converted."""

    nifti: Nifti
    window: Window

    def infer(self, field: FieldType) -> FieldType:
        raise NotImplementedError("types are inferred op by op, before fusing")

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        found = self.nifti.open(value)
        places = self.window.places(found.voxels.shape, random)
        return self.window.padded(found.values(tuple(slice(*place) for place in places), self.nifti.dtype))
