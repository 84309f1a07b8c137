"""Descriptions of the rows of a batch: the sample, the bytes and objects it consists of, and the random draws
of the ops, such as which crop of which file. Slice and order are computed as for the batch itself.

Law: the draws are those of the row itself, by the same keys, so a description always matches the row. Nothing
is decoded: only the first bytes of the row's sources are read, for the sizes of images. Results that depend
on more than the size are not described.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshd.core.api_errors import BatchError, busy
from meshd.core.sample_locations import bytes_columns
from meshd.transform import registry
from meshd.transform.errors import BadSampleError
from meshd.transform.image_annotations import MovesPixels
from meshd.transform.op_types import NamesDraws
from meshd.transform.source_files import SourceDamagedError, SourceGoneError
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.formats.image_headers import read_image_header
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.op_declarations import is_user_op

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from meshd.auth.identity import Caller
    from meshd.batches.service import BatchService
    from meshd.core.frame_address import FrameAddress
    from meshd.transform.image_annotations import Motion
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.plan.plan_spec import OpSpec, PlanSpec

    Matrix = npt.NDArray[np.float64]

MAX_ROWS = 4096
"""Rows of one description."""
_HEAD: Final = 1 << 20
"""Bytes of a source in which the header of an image is looked for."""


class RowDescriptions:
    """Describes the rows of batches. One per worker."""

    def __init__(self, batches: BatchService) -> None:
        self._batches = batches

    async def describe_sources(self, caller: Caller, address: FrameAddress) -> dict[str, Any]:
        """Return `steps` of the epoch and `rows`: of each, `position` in the epoch, `sample`, its `name`,
        whether it is a `pad` row, `labels` (number and name of the class) and `sources` (bucket, key, offset
        and length) by field.

        Raises BatchError NoSuchPlan, AccessDenied, BadRequest (a packed plan; too many rows), InvalidPlan.
        """
        plan, snapshot, piece, samples = await self._batches.resolve_rows(caller, address)
        if len(piece) > MAX_ROWS:
            raise BatchError("BadRequest", f"a description has at most {MAX_ROWS} rows, not {len(piece)}")
        numbers = zip(piece.positions.tolist(), samples.tolist(), piece.pad.tolist(), strict=True)
        return {
            "steps": plan.step_count(address.batch, address.origin),
            "samples": plan.positions,
            "rows": [
                {"position": position, "sample": sample, "pad": pad, **_sources(snapshot, sample)}
                for position, sample, pad in numbers
            ],
        }

    async def describe_draws(self, caller: Caller, address: FrameAddress, row: int) -> dict[str, Any]:
        """Return `sample`, `position`, and `ops` and `images` as `describe_row` does, for a row of a batch.

        Raises BatchError NoSuchPlan, AccessDenied, BadRequest (a packed plan; no such row), InvalidPlan,
        SnapshotChanged, Busy.
        """
        plan, snapshot, piece, samples = await self._batches.resolve_rows(caller, address)
        if not 0 <= row < len(piece):
            raise BatchError("BadRequest", f"row must be a number from 0 to {len(piece) - 1}, not {row}")
        position, sample = int(piece.positions[row]), int(samples[row])
        sizes = await self._image_sizes(snapshot, sample)
        described = await asyncio.to_thread(describe_row, plan.spec, sizes, address.epoch, position)
        return {"sample": sample, "position": position, **described}

    async def _image_sizes(self, snapshot: Snapshot, sample: int) -> dict[str, tuple[int, int]]:
        """Return (height, width) of each field of the sample that is an image."""
        pinned = self._batches.pin(snapshot)
        columns = bytes_columns(snapshot)
        try:
            await pinned.look_up([sample])
            places = {
                name: (
                    int(column.objects_at(sample)),
                    int(column.offsets_at(sample)),
                    min(_HEAD, int(column.lengths_at(sample))),
                )
                for name, column in columns.items()
            }
            await pinned.fetch_ranges(list(places.values()))
            heads = [await asyncio.to_thread(pinned.read_range, *place) for place in places.values()]
        except (SourceGoneError, SourceDamagedError) as error:
            raise busy(str(error)) from error
        finally:
            pinned.close()
        headers = zip(places, map(read_image_header, heads), strict=True)
        return {name: (header.height, header.width) for name, header in headers if header is not None}


def _sources(snapshot: Snapshot, sample: int) -> dict[str, Any]:
    labels: dict[str, Any] = {}
    sources: dict[str, Any] = {}
    for name in snapshot.own_fields():
        column = snapshot.fields[name]
        if isinstance(column, LabelColumn):
            number = int(column.values_at(sample))
            classes = column.classes
            known = 0 <= number < len(classes)
            labels[name] = {"value": number, "class": classes[number] if known else ""}
            continue
        place = int(column.objects_at(sample))
        sources[name] = {
            "bucket": snapshot.objects.bucket_of(place),
            "key": snapshot.objects.keys[place],
            "offset": int(column.offsets_at(sample)),
            "length": int(column.lengths_at(sample)),
            "size": int(snapshot.objects.sizes[place]),
        }
    return {"name": snapshot.sample_name(sample), "labels": labels, "sources": sources}


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
