"""Geometric image ops: flips, padding, random crop, rotation, and the order of the channel axis.

Law: the size of the result follows from the arguments and the image size, never from a draw.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import cv2
import msgspec
import numpy as np

from meshd.transform.builtin.resample_window import pixels
from meshd.transform.errors import BadSampleError
from meshd.transform.image_annotations import Motion
from meshd.transform.op_types import FieldType, channels_of, check_image, image
from meshd.transform.parameters import MAX_SIDE, Parameter, choice, pair, probability, sides, size, whole
from meshd.transform.registry import operation

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.registry import Operation
    from meshwire.plan.keyed_random import KeyedRandom

    Pixels = npt.NDArray[Any]

MOST_WARPED = 32_000  # maximum pixels a side, because coordinates have 16 bits
_SCALE_BITS, _PART_BITS = 10, 5
_SCALE, _PART = 1 << _SCALE_BITS, (1 << _PART_BITS) - 1
_FURTHEST = 1 << 15 + _SCALE_BITS
_HALF = 1 << _SCALE_BITS - _PART_BITS - 1
_WORD = 8  # bytes


@operation(
    "vflip",
    Parameter("p", probability, 0.5),
    random=True,
    moves=True,
    takes="[h, w, c] of any dtype",
    gives="the same type",
)
class VerticalFlip(msgspec.Struct, frozen=True):
    """Top and bottom swapped with probability `p`."""

    p: float

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        return pixels(cv2.flip(value, 0)) if random.chance(self.p) else value

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion | None:
        return Motion(height, width, yy=-1.0, y0=height) if random.chance(self.p) else None


@operation("pad", Parameter("border", sides), Parameter("fill", whole(0, 255), 0))
class PadBytes(msgspec.Struct, frozen=True):
    """Version 1: makes uint8 of any image."""

    border: tuple[int, int, int, int]
    fill: int

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        return self._padded_type(field, "uint8")

    def _padded_type(self, field: FieldType, dtype: str) -> FieldType:
        top, right, bottom, left = self.border
        height, width = field.shape[0], field.shape[1]
        return image(
            None if height is None else height + top + bottom,
            None if width is None else width + left + right,
            channels_of(field),
            dtype=dtype,
        )

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        return self._pad(value, np.uint8)

    def _padded_size(self, height: int, width: int) -> tuple[int, int]:
        top, right, bottom, left = self.border
        if height + top + bottom > MAX_SIDE or width + left + right > MAX_SIDE:
            raise BadSampleError(f"the padded image would exceed {MAX_SIDE} pixels a side")
        return height + top + bottom, width + left + right

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion:
        top, _, _, left = self.border
        return Motion(*self._padded_size(height, width), x0=left, y0=top)

    def _pad(self, value: Pixels, dtype: npt.DTypeLike) -> Pixels:
        top, _, _, left = self.border
        shape = *self._padded_size(value.shape[0], value.shape[1]), value.shape[2]
        padded = np.full(shape, self.fill, dtype)
        padded[top : top + value.shape[0], left : left + value.shape[1]] = value
        return padded


@operation(
    "pad",
    Parameter("border", sides),
    Parameter("fill", whole(0, 65535), 0),
    version="2",
    takes="[h, w, c] of any dtype",
    gives="the same dtype [h + top + bottom, w + left + right, c]",
    refuses="a side would exceed 16,384 pixels",
)
class Pad(PadBytes, frozen=True):
    """A border of `fill` around the image: one width in pixels, or [top, right, bottom, left]. For masks,
    `fill` can be the number that the loss ignores, such as 255."""

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        _check_fill(field, self.fill)
        return self._padded_type(field, field.dtype)

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        return self._pad(value, value.dtype)


def _check_fill(field: FieldType, fill: int) -> None:
    kind = np.dtype(field.dtype)
    if kind.kind in "iu" and fill > np.iinfo(kind).max:
        raise ValueError(f"fill={fill} does not fit into {field}")


@operation(
    "random_crop",
    Parameter("size", size),
    random=True,
    moves=True,
    takes="[h, w, c] of any dtype",
    gives="the same dtype [height, width, c]",
    refuses="the image is smaller than the crop",
)
class RandomCrop(msgspec.Struct, frozen=True):
    """A random window of [height, width] pixels, not resampled; a smaller image is a bad sample."""

    size: tuple[int, int]

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        for known, wanted in zip(field.shape[:2], self.size, strict=True):
            if known is not None and known < wanted:
                raise ValueError(
                    f"cannot cut {self.size[0]}×{self.size[1]} out of {field}; pad or resize first"
                )
        return image(*self.size, channels_of(field), dtype=field.dtype)

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        rows, columns = self.size
        top, left = self._draw_corner(value.shape[0], value.shape[1], random)
        return np.ascontiguousarray(value[top : top + rows, left : left + columns])

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion:
        top, left = self._draw_corner(height, width, random)
        return Motion(*self.size, x0=-left, y0=-top)

    def _draw_corner(self, height: int, width: int, random: KeyedRandom) -> tuple[int, int]:
        rows, columns = self.size
        if height < rows or width < columns:
            raise BadSampleError(f"an image of {width}×{height} is smaller than the crop of {columns}×{rows}")
        return random.integer(height - rows + 1), random.integer(width - columns + 1)


_DEGREES, _FILL = Parameter("degrees", pair(-360.0, 360.0)), Parameter("fill", whole(0, 255), 0)
_WARPED = frozenset({"uint8", "uint16", "int16", "float32", "float64"})


@operation("rotate", _DEGREES, _FILL, random=True, moves=True)
class RotateBilinear(msgspec.Struct, frozen=True):
    """Version 1: bilinear."""

    degrees: tuple[float, float]
    fill: int

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        return affine(value, rotation(value, random.uniform(*self.degrees)), self.fill)

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion:
        return rotation_motion(height, width, random.uniform(*self.degrees))


@operation(
    "rotate",
    _DEGREES,
    _FILL,
    Parameter("filter", choice("bilinear", "nearest"), "bilinear"),
    version="2",
    random=True,
    moves=True,
    takes="[h, w, c] of uint8, uint16, int16, float32 or float64",
    gives="the same type",
    refuses="the image has more than 32,000 pixels a side",
)
class Rotate(msgspec.Struct, frozen=True):
    """A rotation about the center by a random angle in [lowest, highest] degrees, counter-clockwise, with the
    same size and with corners of `fill`. With `filter` "nearest", no new values appear: use it for masks."""

    degrees: tuple[float, float]
    fill: int
    filter: Literal["bilinear", "nearest"]

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        if field.dtype not in _WARPED:
            raise ValueError(f"needs {', '.join(sorted(_WARPED))}, not {field}; cast it first")
        return field

    def apply(self, value: Pixels, random: KeyedRandom) -> Pixels:
        source = rotation(value, random.uniform(*self.degrees))
        return affine(value, source, self.fill, nearest=self.filter == "nearest")

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion:
        return rotation_motion(height, width, random.uniform(*self.degrees))


def rotation(value: Pixels, degrees: float) -> npt.NDArray[np.float64]:
    """Return the source coordinates of every target pixel, as [2, 3], for a rotation about the center."""
    cosine, sine = _direction(degrees)
    x, y = (value.shape[1] - 1) / 2, (value.shape[0] - 1) / 2
    return np.array([[cosine, -sine, x - cosine * x + sine * y], [sine, cosine, y - sine * x - cosine * y]])


def rotation_motion(height: int, width: int, degrees: float) -> Motion:
    """Return where an image goes that `rotation` turns."""
    cosine, sine = _direction(degrees)
    x, y = width / 2, height / 2
    return Motion(
        height, width, cosine, sine, x - cosine * x - sine * y, -sine, cosine, y + sine * x - cosine * y
    )


def _direction(degrees: float) -> tuple[float, float]:
    """Return cosine and sine."""
    angle = math.radians(degrees)
    return _coarse(math.cos(angle)), _coarse(math.sin(angle))


def _coarse(value: float) -> float:
    """Round to steps of 2⁻³⁰, because the last bits of a sine differ between C libraries."""
    return round(value * (1 << 30)) / (1 << 30)


def affine(value: Pixels, source: npt.NDArray[np.float64], fill: int, *, nearest: bool = False) -> Pixels:
    """Return the image transformed by `source` ([2, 3]: target to source coordinates), in the same size.

    Bilinear, or with `nearest` the nearest pixel.

    Coordinates are in 1/32 of a pixel, weights in 1/1024, as in OpenCV's warpAffine before its release 5,
    whose floats depend on the processor. Raises BadSampleError above MOST_WARPED pixels a side.
    """
    height, width = value.shape[:2]
    if max(height, width) > MOST_WARPED:
        raise BadSampleError(f"an image of {width}×{height} pixels cannot be rotated, shifted or sheared")
    whole, parts = np.empty((height, width, 2), np.int16), np.zeros((height, width), np.uint16)
    for axis, row in enumerate(source):
        at = _coordinates(row, height, width)
        if nearest:
            at += 1 << _PART_BITS - 1
        parts += ((at & _PART) << axis * _PART_BITS).astype(np.uint16)
        whole[:, :, axis] = at >> _PART_BITS
    warped: Any = cv2.remap(
        value,
        whole,
        parts,
        cv2.INTER_NEAREST if nearest else cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_CONSTANT,
        borderValue=(fill,) * 4,
    )
    return pixels(warped)


def _coordinates(row: npt.NDArray[np.float64], height: int, width: int) -> npt.NDArray[np.int32]:
    """Return one source coordinate of every pixel, [height, width], in 1/32 of a pixel.

    Coordinates are clipped to 16 bits of whole pixels.
    """
    across = np.rint(row[0] * np.arange(width) * _SCALE).astype(np.int32)
    down = np.rint((row[1] * np.arange(height) + row[2]) * _SCALE).astype(np.int32) + np.int32(_HALF)
    at: npt.NDArray[np.int32] = np.add.outer(down, across)
    at >>= _SCALE_BITS - _PART_BITS
    if max(abs(int(down.min() + across.min())), abs(int(down.max() + across.max()))) >= _FURTHEST:
        np.clip(at, -(1 << 15 + _PART_BITS), (1 << 15 + _PART_BITS) - 1, out=at)
    return at


@operation(
    "to_chw",
    takes="[h, w, c] of any dtype",
    gives="the same dtype [c, h, w]",
)
class ToChw(msgspec.Struct, frozen=True):
    """Channels first: [height, width, channels] to [channels, height, width]."""

    def infer(self, field: FieldType) -> FieldType:
        if field.layout != "hwc":
            raise ValueError(f"needs an image with its channels last, not {field}")
        shape = (channels_of(field), field.shape[0], field.shape[1])
        return FieldType(field.kind, field.dtype, shape, "chw")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return np.ascontiguousarray(value.transpose(2, 0, 1))

    def write_row(self, value: npt.NDArray[Any], row: npt.NDArray[Any], random: KeyedRandom) -> None:
        if splits_into(value, row):
            split_into(value, row)
        else:
            np.copyto(row, value.transpose(2, 0, 1), casting="no")


def splits_into(value: npt.NDArray[Any], row: npt.NDArray[Any]) -> bool:
    """Return whether `split_into` supports these arrays."""
    planes = value.shape[2] == 3 and value.dtype == row.dtype and value.dtype in (np.uint8, np.float32)
    return bool(planes and row.flags.c_contiguous and value.shape[:2] == row.shape[1:])


def split_into(value: npt.NDArray[Any], row: npt.NDArray[Any]) -> None:
    """Write the planes straight into the row: 9 µs for 224×224 RGB; a transposing copy takes 44 µs."""
    cv2.split(value, [row[0], row[1], row[2]])


def mirror_into(planes: npt.NDArray[Any], row: npt.NDArray[Any]) -> None:
    """Write planes [c, h, w], both arrays contiguous, into the row with left and right swapped.

    Bytes are swapped eight at a time: the words of a line in reverse, and the bytes of each. 11 µs for
    224×224 RGB; OpenCV, a byte at a time, takes 53 µs.
    """
    lines = -1, row.shape[2]
    if row.dtype == np.uint8 and row.shape[2] % _WORD == 0:
        np.copyto(row.reshape(lines).view("<u8"), planes.reshape(lines).view(">u8")[:, ::-1])
    else:
        cv2.flip(planes.reshape(lines), 1, row.reshape(lines))


@operation(
    "to_hwc",
    takes="[c, h, w] of any dtype",
    gives="the same dtype [h, w, c]",
)
class ToHwc(msgspec.Struct, frozen=True):
    """Channels last: [channels, height, width] to [height, width, channels]."""

    def infer(self, field: FieldType) -> FieldType:
        if field.layout != "chw":
            raise ValueError(f"needs an image with its channels first, not {field}")
        shape = (field.shape[1], field.shape[2], channels_of(field))
        return FieldType(field.kind, field.dtype, shape, "hwc")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return np.ascontiguousarray(value.transpose(1, 2, 0))


@operation(
    "hflip",
    Parameter("p", probability, 0.5),
    random=True,
    moves=True,
    takes="[h, w, c] of any dtype",
    gives="the same type",
)
class HorizontalFlip(msgspec.Struct, frozen=True):
    """Left and right swapped with probability `p`."""

    p: float

    def infer(self, field: FieldType) -> FieldType:
        check_image(field)
        return field

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return _mirror(value) if random.chance(self.p) else value

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion | None:
        return Motion(height, width, xx=-1.0, x0=width) if random.chance(self.p) else None

    def fuse(self, following: Operation) -> Operation | None:
        return _FlippedToChw(self, following) if isinstance(following, ToChw) else None


class _FlippedToChw(msgspec.Struct, frozen=True):
    """hflip and to_chw, fused: the planes are flipped as they are written into the row.

    16 µs for 224×224 RGB, instead of 70 µs.
    """

    flip: HorizontalFlip
    planes: ToChw

    def infer(self, field: FieldType) -> FieldType:
        raise NotImplementedError("types are inferred op by op, before fusing")

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        return self.planes.apply(self.flip.apply(value, random), random)

    def write_row(self, value: npt.NDArray[Any], row: npt.NDArray[Any], random: KeyedRandom) -> None:
        if not random.chance(self.flip.p):
            self.planes.write_row(value, row, random)
        elif splits_into(value, row):
            planes = np.empty_like(row)
            split_into(value, planes)
            mirror_into(planes, row)
        else:
            self.planes.write_row(_mirror(value), row, random)


def _mirror(value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return pixels(cv2.flip(value, 1))
