"""Annotations of an image: boxes and keypoints that follow its geometry.

Law: an annotation holds the size of its image (its canvas), and an op moves it by the draws with which it
moves the pixels. Coordinates are computed in float64 by exact IEEE 754 operations and kept as float32.
Invariant: boxes lie within their canvas; a keypoint outside it is [0, 0, 0].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from meshd.transform.op_types import FieldType

if TYPE_CHECKING:
    from meshwire.plan.keyed_random import KeyedRandom

Floats = npt.NDArray[np.float64]

BOXES = FieldType("array", "float32", (None, 4), "boxes")
ANNOTATION_LAYOUTS = ("boxes", "points")


def points_type(count: int | None) -> FieldType:
    """Return the type of keypoints: `count` for each object, None if objects differ."""
    return FieldType("array", "float32", (None, count, 3), "points")


class Motion(NamedTuple):
    """Where the content of an image goes: to x' = xx·x + xy·y + x0, y' = yx·x + yy·y + y0.

    In pixels from the upper left corner, so that the first pixel is 0…1. `height`, `width`: the size of the
    result.
    """

    height: int
    width: int
    xx: float = 1.0
    xy: float = 0.0
    x0: float = 0.0
    yx: float = 0.0
    yy: float = 1.0
    y0: float = 0.0

    @property
    def is_mirrored(self) -> bool:
        """Whether left and right of an object change places."""
        return self.xx * self.yy - self.xy * self.yx < 0

    @property
    def is_scaled(self) -> bool:
        """Whether the motion changes lengths."""
        return self.xy == 0 == self.yx and not abs(self.xx) == 1 == abs(self.yy)

    def apply(self, x: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return the coordinates after the motion."""
        return self.xx * x + self.xy * y + self.x0, self.yx * x + self.yy * y + self.y0


@runtime_checkable
class MovesPixels(Protocol):
    """An op on images that boxes and keypoints can follow."""

    def motion(self, height: int, width: int, random: KeyedRandom) -> Motion | None:
        """Return where an image of this size goes, with the draws of `apply`; None if it stays.

        Raises BadSampleError if the op does not take an image of this size.
        """
        ...


class Annotations(np.ndarray[Any, np.dtype[np.float32]]):
    """Boxes [n, 4] (left, top, right, bottom) or keypoints [n, points, 3] (x, y, visibility), in pixels.

    `canvas`: height and width of the image. `seen`: for each box, the share of its area that crops left of
    it. `swap`: the order of the keypoints of a mirrored object, None to keep theirs.
    """

    canvas: tuple[int, int]
    seen: Floats
    swap: tuple[int, ...] | None

    def __array_finalize__(self, source: object) -> None:
        self.canvas = getattr(source, "canvas", (0, 0))
        self.seen = getattr(source, "seen", _NOTHING)
        self.swap = getattr(source, "swap", None)


_NOTHING: Floats = np.zeros(0)


def make_boxes(corners: Floats, canvas: tuple[int, int]) -> Annotations:
    """Return boxes of [left, top, right, bottom], clipped to the canvas."""
    return _clip(corners, np.ones(len(corners)), canvas)


def make_points(points: Floats, canvas: tuple[int, int], swap: tuple[int, ...] | None) -> Annotations:
    """Return keypoints of (x, y, visibility); those outside the canvas, or not labelled, become zeros."""
    height, width = canvas
    x, y, visible = points[..., 0], points[..., 1], points[..., 2]
    inside = (visible > 0) & (x >= 0) & (y >= 0) & (x < width) & (y < height)
    made = np.where(inside[..., None], points, 0.0).astype(np.float32).view(Annotations)
    made.canvas, made.swap = canvas, swap
    return made


def _clip(corners: Floats, seen: Floats, canvas: tuple[int, int]) -> Annotations:
    height, width = canvas
    kept = np.clip(corners, 0.0, np.array([width, height, width, height], np.float64))
    whole, left = _areas(corners), _areas(kept)
    made = kept.astype(np.float32).view(Annotations)
    made.canvas = canvas
    made.seen = seen * np.divide(left, whole, out=np.ones_like(whole), where=whole > 0)
    return made


def _areas(corners: Floats) -> Floats:
    areas: Floats = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    return areas


def move_boxes(boxes: Annotations, motion: Motion) -> Annotations:
    """Return the boxes around the moved ones, clipped to the new canvas."""
    corners = np.asarray(boxes, np.float64)
    x, y = motion.apply(corners[:, [0, 2, 2, 0]], corners[:, [1, 1, 3, 3]])
    around = np.stack([x.min(1), y.min(1), x.max(1), y.max(1)], axis=1)
    return _clip(around, boxes.seen, (motion.height, motion.width))


def move_points(points: Annotations, motion: Motion) -> Annotations:
    """Return the moved keypoints.

    Their coordinates number pixels, as in COCO: a point in the first pixel is at 0, and its mirror image at
    width − 1. A change of scale multiplies them, as torchvision and Albumentations do.
    """
    given = np.asarray(points, np.float64)
    center = 0.0 if motion.is_scaled else 0.5
    x, y = motion.apply(given[..., 0] + center, given[..., 1] + center)
    moved = np.stack([x - center, y - center, given[..., 2]], axis=-1)
    moved[given[..., 2] == 0] = 0.0
    if motion.is_mirrored and points.swap is not None:
        moved = moved[..., list(points.swap), :]
    return make_points(moved, (motion.height, motion.width), points.swap)


class AnnotationMotion(msgspec.Struct, frozen=True):
    """An op on images, applied to annotations."""

    operation: MovesPixels

    def infer(self, field: FieldType) -> FieldType:
        """Return the type, which does not change."""
        return field

    def apply(self, value: Annotations, random: KeyedRandom) -> Annotations:
        """Return the annotations, moved as the op moves the image. Raises BadSampleError."""
        motion = self.operation.motion(*value.canvas, random)
        if motion is None:
            return value
        return move_boxes(value, motion) if value.ndim == 2 else move_points(value, motion)
