"""Constructors of the ops on annotations: boxes, their classes, keypoints; and rotation by right angles.

Law: that of `meshsdk.ops`, through which users call them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from meshsdk.errors import ConfigurationError
from meshsdk.ops import arguments as _values
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

BoxFormat = Literal["xyxy", "xywh", "cxcywh"]
_SOURCES = ("array", "coco", "voc", "yolo")
SIZED_OPS = frozenset({"boxes", "keypoints"})
"""Ops that take the size of the image in their second field, and leave it as it is."""
JOINT_OPS = SIZED_OPS | {"keep_boxes"}
"""Ops of the library that take their fields together."""


def boxes(
    field: str,
    image: str,
    *,
    source: Literal["array", "coco", "voc", "yolo"] = "array",
    format: BoxFormat = "xyxy",
    normalized: bool = False,
    difficult: bool = False,
) -> OpSpec:
    """Make bounding boxes of an image: → float32 [n, 4], left, top, right and bottom in pixels.

    `ops.over` moves them with the image from then on, and clips them to it. Put it before `decode`, or right
    after it.

    Arguments:
        image: the field of the image, whose size the boxes need.
        source: "array" for numbers [n, 4], of `npy` or as a JSON list; "coco", "voc", "yolo" for such a file.
        format: of an array: "xyxy", "xywh" (left, top, width, height) or "cxcywh" (center, width, height).
        normalized: whether an array holds shares of the image's width and height.
        difficult: whether to keep objects that a file marks as iscrowd (COCO) or difficult (VOC).

    Example:
        ops.boxes("boxes", "image", source="voc")
    """
    if source not in _SOURCES:
        raise ConfigurationError(f"boxes({field!r}): source must be one of {', '.join(map(repr, _SOURCES))}")
    if source != "array" and (format, normalized) != ("xyxy", False):
        raise ConfigurationError(f"boxes({field!r}): format and normalized describe an array, not {source!r}")
    args: dict[str, Any] = {"source": source, "difficult": difficult}
    if source == "array":
        args = {"format": _box_format("boxes", format), "normalized": normalized}
    names = _values.fields("boxes", (field, image))
    return OpSpec("boxes", field, args, "", names)


def box_labels(
    field: str,
    source: Literal["coco", "voc", "yolo"],
    *,
    classes: Sequence[str] | None = None,
    difficult: bool = False,
) -> OpSpec:
    """Read the classes of the boxes in an annotation file: bytes → int64 [n].

    Arguments:
        source: the format of the file.
        classes: the names in the order of their numbers. Default: the numbers in the file; files of VOC have
            names only.
        difficult: as in `boxes`; give both the same.
    """
    if source not in _SOURCES[1:]:
        raise ConfigurationError(f"box_labels({field!r}): source must be 'coco', 'voc' or 'yolo'")
    names = None if classes is None else [str(name) for name in classes]
    if isinstance(classes, str) or names == [] or (source == "voc" and names is None):
        raise ConfigurationError(f"box_labels({field!r}): classes={classes!r} must be a list of class names")
    args = {"source": source, "classes": names, "difficult": difficult}
    return OpSpec("box_labels", _values.field("box_labels", field), args)


def keypoints(
    field: str,
    image: str,
    *,
    count: int,
    source: Literal["array", "coco"] = "array",
    swap: Sequence[Sequence[int]] = (),
    difficult: bool = False,
) -> OpSpec:
    """Make keypoints of an image: → float32 [n, count, 3], x, y and visibility (0: not there).

    `ops.over` moves them with the image from then on. A keypoint that leaves the image becomes [0, 0, 0].

    Arguments:
        image: the field of the image, whose size the keypoints need.
        count: keypoints of an object.
        source: "array" for numbers [n, count, 2 or 3], or [count, 2 or 3] of one object; "coco" for a file.
        swap: pairs of keypoints that change places in a mirror image, such as [(1, 2)] for the two eyes.
        difficult: as in `boxes`.
    """
    args = {
        "source": source,
        "count": count,
        "swap": [list(pair) for pair in swap],
        "difficult": difficult,
    }
    return OpSpec("keypoints", field, args, "", _values.fields("keypoints", (field, image)))


def keep_boxes(
    field: str,
    *others: str,
    min_size: float = 1.0,
    min_area: float = 0.0,
    min_visibility: float = 0.0,
    at_least: int = 0,
) -> OpSpec:
    """Drop boxes that are too small or too much cropped, with their rows in the other fields.

    Arguments:
        others: fields with a row for each box: labels, keypoints.
        min_size: pixels that both sides must have.
        min_area: square pixels.
        min_visibility: share of the box that all crops so far must have left of it, 0 to 1.
        at_least: a sample with fewer boxes left is bad.

    Example:
        ops.keep_boxes("boxes", "labels", min_size=2, min_visibility=0.25)
    """
    args = {
        "min_size": _values.number("keep_boxes", "min_size", min_size),
        "min_area": _values.number("keep_boxes", "min_area", min_area),
        "min_visibility": _values.probability("keep_boxes", min_visibility),
        "at_least": at_least,
    }
    names = _values.fields("keep_boxes", (field, *others)) if others else ()
    return OpSpec("keep_boxes", _values.field("keep_boxes", field), args, "", names)


def convert_boxes(field: str, format: BoxFormat, *, normalized: bool = False) -> OpSpec:
    """Convert boxes to another format, as the last op on them: → an array float32 [n, 4].

    Arguments:
        format: "xyxy", "xywh" (left, top, width, height) or "cxcywh" (center, width, height).
        normalized: whether to divide by the image's width and height.
    """
    args = {"format": _box_format("convert_boxes", format), "normalized": normalized}
    return OpSpec("convert_boxes", _values.field("convert_boxes", field), args)


def rotate90(field: str, turns: int | None = None) -> OpSpec:
    """Rotate an image counter-clockwise by `turns` right angles, which changes no value.

    None is a random number of them, which needs a square image.
    """
    return OpSpec("rotate90", _values.field("rotate90", field), {"turns": turns})


def _box_format(op: str, format: str) -> str:
    if format not in ("xyxy", "xywh", "cxcywh"):
        raise ConfigurationError(f"{op}: format must be 'xyxy', 'xywh' or 'cxcywh', not {format!r}")
    return format
