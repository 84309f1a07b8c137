"""Ops on the annotations of images: boxes, their classes, and keypoints, read, filtered and converted.

Law: the rows of boxes, classes and keypoints of a file are in its order, and only `keep_boxes` drops some,
from all fields alike. How annotations follow an image: see `image_annotations`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from meshd.transform.builtin.annotation_files import (
    FILE_FORMATS,
    check_coordinates,
    read_numbers,
    read_objects,
)
from meshd.transform.builtin.text import check_bytes
from meshd.transform.errors import BadSampleError
from meshd.transform.image_annotations import BOXES, make_boxes, make_points, points_type
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import MAX_CLASSES, Parameter, choice, flag, number, whole
from meshd.transform.registry import operation
from meshwire.formats.image_headers import read_image_header
from meshwire.strict_json import PlanError, checked_integer, checked_text, shown_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from meshd.transform.image_annotations import Annotations, Floats
    from meshwire.plan.keyed_random import KeyedRandom

Source = Literal["array", "coco", "voc", "yolo"]
BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
_FORMAT = choice("xyxy", "xywh", "cxcywh")
_DIFFICULT = Parameter("difficult", flag, False)
_FILES = "bytes of an annotation file"
_ROUNDING = 1e-6
"""What the rounding of coordinates may take of a share of visible area."""
_MALFORMED = "a malformed file; over 4 MiB or 16,384 objects"


def _canvas(image: Any) -> tuple[int, int]:
    """Return height and width of an image: an array, or the bytes of a file. Raises BadSampleError."""
    if isinstance(image, np.ndarray):
        height, width = image.shape[:2]
        return height, width
    header = read_image_header(image)
    if header is None or not header.height or not header.width:
        raise BadSampleError("the image is not a JPEG, PNG, WebP, GIF, BMP or TIFF file")
    return header.height, header.width


def _check_image(given: FieldType) -> None:
    if given.kind != "bytes" and given.layout != "hwc":
        raise ValueError(f"needs an image with its channels last as the second field, not {given}")


def _check_source(given: FieldType, source: Source) -> None:
    if source != "array":
        check_bytes(given)
    elif given.kind == "bytes":
        return
    elif given.kind != "array" or np.dtype(given.dtype).kind not in "iuf" or not given.shape:
        raise ValueError(f"needs an array of numbers, not {given}; read one first, such as with npy or json")


def _corners(given: Floats, form: BoxFormat) -> Floats:
    first, second = given[:, :2], given[:, 2:]
    if form == "xywh":
        second = first + second
    elif form == "cxcywh":
        first, second = first - second / 2, first + second / 2
    return np.concatenate([first, second], axis=1)


@operation(
    "boxes",
    Parameter("source", choice("array", *FILE_FORMATS), "array"),
    Parameter("format", _FORMAT, "xyxy"),
    Parameter("normalized", flag, False),
    _DIFFICULT,
    inputs=("boxes", "image"),
    takes="an array [n, 4] or [4·n], or such a list as JSON; with another `source`, bytes of an annotation "
    "file; and the image",
    gives="boxes: float32 [n, 4]; the image as it was",
    refuses=f"{_MALFORMED}; a number that is not finite; right of left or below its top; no image",
)
class Boxes(msgspec.Struct, frozen=True):
    """Bounding boxes as [left, top, right, bottom] in pixels of the image, clipped to it. `ops.over` moves
    them with the image. `format` and `normalized` (shares of width and height) say what an array holds;
    `difficult` keeps objects marked iscrowd or difficult."""

    source: Source
    format: BoxFormat
    normalized: bool
    difficult: bool
    image_input: ClassVar[int] = 1

    def infer_all(self, fields: Sequence[FieldType]) -> tuple[FieldType, ...]:
        """See `MultiFieldOp.infer_all`."""
        if len(fields) != 2:
            raise ValueError(f"takes two fields, the boxes and their image, not {len(fields)}")
        _check_source(fields[0], self.source)
        _check_image(fields[1])
        shape = fields[0].shape
        if self.source == "array" and (len(shape) > 2 or (len(shape) == 2 and shape[1] not in (4, None))):
            raise ValueError(f"needs an array [n, 4], not {fields[0]}")
        return BOXES, fields[1]

    def apply_all(self, values: Sequence[Any], random: KeyedRandom) -> tuple[Any, ...]:
        """See `MultiFieldOp.apply_all`."""
        canvas = _canvas(values[1])
        height, width = canvas
        scale = np.array([width, height, width, height], np.float64)
        if self.source == "array":
            corners = _corners(_rows(values[0], 4), self.format)
            shares = self.normalized
        else:
            corners = read_objects(values[0], self.source, difficult=self.difficult).corners
            shares = self.source == "yolo"
        corners = corners * scale if shares else corners
        check_coordinates(corners)
        if (corners[:, 2:] < corners[:, :2]).any():
            raise BadSampleError("a box ends before it begins")
        return make_boxes(corners, canvas), values[1]


def _numbers(value: npt.NDArray[Any] | bytes) -> Floats:
    return read_numbers(value) if isinstance(value, bytes) else value.astype(np.float64)


def _rows(given: npt.NDArray[Any] | bytes, width: int) -> Floats:
    """Return the rows of an array [n, width] or [n·width]. Raises BadSampleError."""
    value = _numbers(given)
    if value.size % width or (value.ndim == 2 and value.shape[1] != width):
        raise BadSampleError(f"an array {list(value.shape)} is not rows of {width} numbers")
    return value.reshape(-1, width)


def _swap(value: Any, path: str) -> tuple[tuple[int, int], ...]:
    """Pairs of keypoints, by number from 0, that change places in a mirrored object."""
    if not isinstance(value, list) or len(value) > 1024:
        raise PlanError(path, f"expected a list of pairs such as [[1, 2], [3, 4]], got {shown_value(value)}")
    for at, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            raise PlanError(f"{path}[{at}]", f"expected two numbers, got {shown_value(pair)}")
    pairs = tuple(
        (checked_integer(a, f"{path}[{at}]", 0, 9999), checked_integer(b, f"{path}[{at}]", 0, 9999))
        for at, (a, b) in enumerate(value)
    )
    named = [each for pair in pairs for each in pair]
    if len(set(named)) != len(named):
        raise PlanError(path, "a keypoint is in two pairs")
    return pairs


@operation(
    "keypoints",
    Parameter("source", choice("array", "coco"), "array"),
    Parameter("count", whole(1, 10_000)),
    Parameter("swap", _swap, ()),
    _DIFFICULT,
    inputs=("keypoints", "image"),
    takes="an array [count, 2 or 3] or [n, count, 2 or 3], or such a list as JSON; with `source` "
    '"coco", bytes of an annotation file; and the image',
    gives="keypoints: float32 [n, `count`, 3]; the image as it was",
    refuses=f"{_MALFORMED}; another number of keypoints; no image",
)
@dataclass(frozen=True, slots=True)
class Keypoints:
    """Keypoints as [x, y, visibility] in pixels of the image: `count` for each object. `ops.over` moves them
    with the image; one that leaves it becomes [0, 0, 0], and `swap` names those that change places in a
    mirror image, such as the left and the right eye."""

    source: Literal["array", "coco"]
    count: int
    swap: tuple[tuple[int, int], ...]
    difficult: bool
    image_input: ClassVar[int] = 1
    _order: tuple[int, ...] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = list(range(self.count))
        for left, right in self.swap:
            if max(left, right) < self.count:
                order[left], order[right] = right, left
        object.__setattr__(self, "_order", tuple(order) if self.swap else None)

    def infer_all(self, fields: Sequence[FieldType]) -> tuple[FieldType, ...]:
        """See `MultiFieldOp.infer_all`."""
        if len(fields) != 2:
            raise ValueError(f"takes two fields, the keypoints and their image, not {len(fields)}")
        if any(max(pair) >= self.count for pair in self.swap):
            raise ValueError(f"swap names a keypoint beyond the {self.count}")
        _check_source(fields[0], self.source)
        _check_image(fields[1])
        return points_type(self.count), fields[1]

    def apply_all(self, values: Sequence[Any], random: KeyedRandom) -> tuple[Any, ...]:
        """See `MultiFieldOp.apply_all`."""
        canvas = _canvas(values[1])
        if self.source == "array":
            points = self._from_array(values[0])
        else:
            found = read_objects(values[0], self.source, difficult=self.difficult)
            points = np.zeros((len(found.corners), self.count, 3)) if found.points is None else found.points
        if points.shape[1] != self.count:
            raise BadSampleError(f"{points.shape[1]} keypoints an object, not {self.count}")
        check_coordinates(points)
        return make_points(points, canvas, self._order), values[1]

    def _from_array(self, given: npt.NDArray[Any] | bytes) -> Floats:
        value = _numbers(given)
        if not value.size:
            return np.zeros((0, self.count, 3))
        if value.ndim not in (2, 3) or value.shape[-1] not in (2, 3):
            raise BadSampleError(f"an array {list(value.shape)} is not keypoints [n, {self.count}, 2 or 3]")
        points = value if value.ndim == 3 else value[None]
        if points.shape[2] == 3:
            return points
        return np.concatenate([points, np.full((*points.shape[:2], 1), 2.0)], axis=2)


def _class_names(value: Any, path: str) -> tuple[str, ...] | None:
    """Distinct class names in the order of their numbers, or null for the numbers in the file."""
    if value is None:
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CLASSES:
        raise PlanError(path, f"expected a list of 1…{MAX_CLASSES} class names, or null")
    names = tuple(checked_text(item, f"{path}[{at}]", at_most=1000) for at, item in enumerate(value))
    if len(set(names)) != len(names):
        raise PlanError(path, "a class name is repeated; class names must be distinct")
    return names


@operation(
    "box_labels",
    Parameter("source", choice(*FILE_FORMATS)),
    Parameter("classes", _class_names, None),
    _DIFFICULT,
    takes=_FILES,
    gives="int64 [n]: the class of each box",
    refuses=f"{_MALFORMED}; a class that is not in `classes`",
)
@dataclass(frozen=True, slots=True)
class BoxLabels:
    """The classes of the boxes in an annotation file: the index of their name (of COCO and YOLO also of their
    number, as text) in `classes`, or the number in the file."""

    source: Literal["coco", "voc", "yolo"]
    classes: tuple[str, ...] | None
    difficult: bool
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", {name: at for at, name in enumerate(self.classes or ())})

    def infer(self, given: FieldType) -> FieldType:
        check_bytes(given)
        if self.source == "voc" and self.classes is None:
            raise ValueError("files of VOC name their classes: give `classes`, the names in order")
        return FieldType("array", "int64", (None,))

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[np.int64]:
        found = read_objects(value, self.source, difficult=self.difficult).classes
        return np.array([self._number(names) for names in found], np.int64)

    def _number(self, names: tuple[str, ...]) -> int:
        if self.classes is None:
            return int(names[0])
        known = next((self._numbers[name] for name in names if name in self._numbers), None)
        if known is None:
            raise BadSampleError(f"the class {names[-1][:80]!r} is not in classes")
        return known


@operation(
    "keep_boxes",
    Parameter("min_size", number(0.0, 1e6), 1.0),
    Parameter("min_area", number(0.0, 1e12), 0.0),
    Parameter("min_visibility", number(0.0, 1.0), 0.0),
    Parameter("at_least", whole(0, 1 << 14), 0),
    inputs=("boxes", "labels", "…"),
    takes="boxes, and arrays with a row for each of them: labels, keypoints",
    gives="the same, without the rows of the boxes that are dropped",
    refuses="another number of rows than boxes; fewer than `at_least` boxes are left",
)
class KeepBoxes(msgspec.Struct, frozen=True):
    """Boxes that are worth learning from, and their rows in the other fields: with sides of at least
    `min_size` pixels, at least `min_area` square pixels, and at least the share `min_visibility` of the area
    that they had before all crops."""

    min_size: float
    min_area: float
    min_visibility: float
    at_least: int

    def infer_all(self, fields: Sequence[FieldType]) -> tuple[FieldType, ...]:
        """See `MultiFieldOp.infer_all`."""
        if fields[0].layout != "boxes":
            raise ValueError(f"needs boxes as the first field, not {fields[0]}; put ops.boxes before it")
        for other in fields[1:]:
            if other.kind != "array" or not other.shape or other.shape[0] is not None:
                raise ValueError(f"needs an array with a row for each box, not {other}")
        return tuple(fields)

    def apply_all(self, values: Sequence[Any], random: KeyedRandom) -> tuple[Any, ...]:
        """See `MultiFieldOp.apply_all`."""
        boxes: Annotations = values[0]
        unequal = next((len(other) for other in values[1:] if len(other) != len(boxes)), None)
        if unequal is not None:
            raise BadSampleError(f"{len(boxes)} boxes, but a field with {unequal} rows")
        corners = np.asarray(boxes, np.float64)
        sides = corners[:, 2:] - corners[:, :2]
        kept = (
            (sides >= self.min_size).all(1)
            & (sides[:, 0] * sides[:, 1] >= self.min_area)
            & (boxes.seen >= self.min_visibility - _ROUNDING)
        )
        if kept.sum() < self.at_least:
            raise BadSampleError(f"{kept.sum()} boxes are left; at_least={self.at_least}")
        if kept.all():
            return tuple(values)
        seen = boxes.seen[kept]
        made = tuple(value[kept] for value in values)
        made[0].seen = seen
        return made


@operation(
    "convert_boxes",
    Parameter("format", _FORMAT),
    Parameter("normalized", flag, False),
    takes="boxes",
    gives="an array float32 [n, 4]",
)
class ConvertBoxes(msgspec.Struct, frozen=True):
    """Boxes in another format, as the last of their ops: [left, top, width, height] ("xywh"), [center x,
    center y, width, height] ("cxcywh"), and with `normalized` in shares of the image's width and height."""

    format: BoxFormat
    normalized: bool

    def infer(self, given: FieldType) -> FieldType:
        if given.layout != "boxes":
            raise ValueError(f"needs boxes, not {given}; put ops.boxes before it")
        return FieldType("array", "float32", given.shape)

    def apply(self, value: Annotations, random: KeyedRandom) -> npt.NDArray[np.float32]:
        corners = np.asarray(value, np.float64)
        first, second = corners[:, :2], corners[:, 2:]
        if self.format == "cxcywh":
            first, second = (first + second) / 2, second - first
        elif self.format == "xywh":
            second = second - first
        made = np.concatenate([first, second], axis=1)
        if self.normalized:
            height, width = value.canvas
            made = made / np.array([width, height, width, height], np.float64)
        return made.astype(np.float32)
