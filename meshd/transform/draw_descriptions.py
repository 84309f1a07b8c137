"""Descriptions of one row's ops: what they drew, and which part of the source image the result shows.

Law: the draws are those of the row itself, by the same keys, so that a description and the row agree. Nothing
is decoded: the size of an image comes from its header. What depends on more than the size is not described.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshd.transform import registry
from meshd.transform.errors import BadSampleError
from meshd.transform.image_annotations import MovesPixels
from meshd.transform.op_types import NamesDraws
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.op_declarations import is_user_op

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from meshd.transform.image_annotations import Motion
    from meshwire.plan.plan_spec import OpSpec, PlanSpec

    Matrix = npt.NDArray[np.float64]

Size = tuple[int, int]
UNKNOWN: Final = "its draws depend on the value"


class _Content:
    """The content of one image on its way through the ops: its size, and the motion from its source."""

    def __init__(self, size: Size) -> None:
        self.size = self.source = size
        self.motion: Matrix = np.eye(3)

    def move(self, motion: Motion) -> None:
        self.size = motion.height, motion.width
        self.motion = _matrix(motion) @ self.motion

    def describe(self) -> dict[str, Any]:
        height, width = self.source
        return {
            "source": {"height": height, "width": width},
            "height": self.size[0],
            "width": self.size[1],
            "corners": _corners(self.size, self.motion),
        }


def describe_row(spec: PlanSpec, sizes: Mapping[str, Size], epoch: int, position: int) -> dict[str, Any]:
    """Return what the ops of a plan drew for the row at a position of an epoch.

    `sizes`: (height, width) in pixels of the source of each field that is an image. `ops`: for each op and
    field that draws or moves an image, `drawn` (values by name), `moved` (`height` and `width` of the result,
    `corners` of it in the op's input as [x, y], `mirrored`, `degrees` counter-clockwise; null if the image
    stays), and a `note` on what is not known. `images`: by field, where the corners of the result lie in the
    source.
    """
    contents = {name: _Content(size) for name, size in sizes.items()}
    ops: list[dict[str, Any]] = []
    for index, op in enumerate(spec.ops):
        definition = None if is_user_op(op.op) else registry.find(op.op, op.version, f"ops[{index}]")
        if definition is None or definition.is_multi_field or definition.is_mixing:
            note = "the code of users is not run for a description" if definition is None else UNKNOWN
            for name in op.all_fields:
                contents.pop(name, None)
                ops.append({"index": index, "op": op.op, "field": name, "note": note})
            continue
        if not definition.random and not hasattr(definition.build, "motion"):
            continue
        for name in op.all_fields:
            single = op.for_field(name) if op.fields else op
            random = KeyedRandom(spec.seed, epoch, position, index)
            found = _describe_op(single, index, random, contents.get(name))
            if "note" in found and definition.moves:
                contents.pop(name, None)
            if len(found) > 0:
                ops.append({"index": index, "op": op.op, "field": name, **found})
    return {"ops": ops, "images": {name: content.describe() for name, content in contents.items()}}


def _describe_op(op: OpSpec, index: int, random: KeyedRandom, content: _Content | None) -> dict[str, Any]:
    _, operation = registry.build(op, f"ops[{index}]")
    if isinstance(operation, MovesPixels):
        if content is None:
            return {"note": "the size of its input is not known"}
        before = content.size
        try:
            motion = operation.motion(*before, random)
        except BadSampleError as error:
            return {"note": str(error)}
        if motion is None:
            return {"moved": None}
        content.move(motion)
        return {"moved": _describe_motion(motion)}
    if isinstance(operation, NamesDraws):
        drawn = {"drawn": dict(operation.draws(random))}
        moves = registry.find(op.op, op.version, "").moves
        return drawn | ({"note": "it may move the content, too"} if moves else {})
    return {"note": UNKNOWN}


def _describe_motion(motion: Motion) -> dict[str, Any]:
    degrees = 0.0 if motion.is_mirrored else round(math.degrees(math.atan2(motion.xy, motion.xx)), 2)
    return {
        "height": motion.height,
        "width": motion.width,
        "corners": _corners((motion.height, motion.width), _matrix(motion)),
        "mirrored": motion.is_mirrored,
        "degrees": degrees + 0.0,
    }


def _matrix(motion: Motion) -> Matrix:
    return np.array(
        [[motion.xx, motion.xy, motion.x0], [motion.yx, motion.yy, motion.y0], [0.0, 0.0, 1.0]], np.float64
    )


def _corners(size: Size, motion: Matrix) -> list[list[float]]:
    """Return where the corners of a result of this size were before the motion, as [x, y]: upper left, upper
    right, lower right, lower left."""
    height, width = size
    after = np.array([[0, width, width, 0], [0, 0, height, height], [1, 1, 1, 1]], np.float64)
    before = np.linalg.inv(motion) @ after
    return [[round(float(x), 2) + 0.0, round(float(y), 2) + 0.0] for x, y in before[:2].T]
