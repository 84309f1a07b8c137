"""Op chain of one field: types are checked once, then each sample is a short loop of calls.

Law: compilation may skip work whose result is known (decode only what the next op keeps, write planes
straight into the row), but never changes a result. `render` and `render_into` give the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from meshd.transform import builtin, registry
from meshd.transform.assets import no_assets
from meshd.transform.errors import EMPTY, BadSampleError, OpFailedError, OutOfMemoryError, WrongOutputError
from meshd.transform.image_annotations import ANNOTATION_LAYOUTS, AnnotationMotion, MovesPixels
from meshd.transform.messages import OpStats, value_bytes
from meshd.transform.op_types import BYTES, BoundToType, WindowedDecoder, describe_mismatch, image
from meshd.transform.resource_limits import is_out_of_memory
from meshd.transform.source_files import SourceDamagedError, SourceGoneError
from meshd.transform.video_frames import by_frame
from meshwire.formats.content_sniffing import identify_foreign
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.strict_json import PlanError, canonical_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from meshd.transform.assets import AssetLoader
    from meshd.transform.op_types import FieldType
    from meshwire.plan.plan_spec import OpSpec

_LOOKED_AT = 128
Draw = Callable[[int], KeyedRandom]
"""Randomness of one sample: maps the op's index in the plan to its own sequence of draws."""

builtin.load()

_DECODED = image(None, None, 3)
_NO_DRAWS = KeyedRandom(0, 0, 0)
_UNTIMED = OpStats(lambda: 0.0)


@runtime_checkable
class Fusible(Protocol):
    """An op that can include the work of the next op, at a lower cost than running both."""

    def fuse(self, following: registry.Operation) -> registry.Operation | None:
        """Return an op equal to both, or None if fusing gains nothing.

        At most one of the two draws; the fused op draws as that one does.
        """
        ...


@runtime_checkable
class RowWriter(Protocol):
    """A last op that can write its result into the row instead of a new array."""

    def write_row(self, value: Any, row: npt.NDArray[Any], random: KeyedRandom) -> None:
        """Write what `apply(value, random)` would return."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One call. `index`: the op's index in the plan, which keys its draws; -1 if it does not draw.

    `output`: the type that it declares; `ops`: the ops of the plan that it consists of.
    """

    label: str
    index: int
    operation: registry.Operation
    output: FieldType
    ops: tuple[OpSpec, ...] = ()

    def random(self, draw: Draw) -> KeyedRandom:
        """Return its draws for one sample."""
        return draw(self.index) if self.index >= 0 else _NO_DRAWS

    def run(self, value: Any, draw: Draw) -> Any:
        made = self.operation.apply(value, self.random(draw))
        if wrong := describe_mismatch(self.output, made):
            raise WrongOutputError(wrong)
        return made


class _Call(msgspec.Struct, frozen=True):
    """An operation that calls a function with its draws, whatever its value is."""

    function: Callable[[KeyedRandom], Any]

    def infer(self, field: FieldType) -> FieldType:
        raise NotImplementedError("types are inferred when a chain is compiled")

    def apply(self, value: Any, random: KeyedRandom) -> Any:
        return self.function(random)


class OpChain:
    """The compiled ops of one field, from its bytes to its `output` type.

    `prefix_length`: the number of steps at its beginning that draw nothing, so that their result is the same
    in every epoch. `windowed`: its first op, if that draws a window of an image that it decodes.
    """

    __slots__ = (
        "_row_writer",
        "_steps",
        "_steps_before_write",
        "_write_row",
        "output",
        "prefix_length",
        "windowed",
    )

    def __init__(self, steps: Sequence[Step], output: FieldType) -> None:
        self.output = output
        self._steps = tuple(steps)
        self._row_writer: Step | None
        self._steps_before_write, self._row_writer, self._write_row = self._steps, None, _copy
        if steps and isinstance(steps[-1].operation, RowWriter):
            self._steps_before_write, self._row_writer = self._steps[:-1], steps[-1]
            self._write_row = steps[-1].operation.write_row
        drawing = (number for number, step in enumerate(self._steps_before_write) if step.index >= 0)
        self.prefix_length = next(drawing, len(self._steps_before_write))
        first = steps[0].operation if steps and steps[0].index >= 0 else None
        self.windowed: WindowedDecoder | None = first if isinstance(first, WindowedDecoder) else None

    def __repr__(self) -> str:
        return f"<OpChain {' → '.join(step.label for step in self._steps) or 'bytes'}: {self.output}>"

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps, the one that writes the row included."""
        return self._steps

    def prefix_digest(self, steps: int, variant: int) -> str:
        """Return the name of the result of the first steps: a hash of their ops, versions and arguments.

        `variant`: the reduction at which the windowed op's image is decoded, 0 for the result of whole steps.
        """
        ops = [op for step in self._steps[:steps] for op in step.ops]
        named = [
            {"op": op.op, "version": op.version, "args": dict(op.args)}
            for op in (ops[:1] if variant else ops)
        ]
        return hashlib.sha256(canonical_json({"ops": named, "variant": variant})).hexdigest()

    def render(self, data: Any, draw: Draw, tally: OpStats = _UNTIMED, done: int = 0) -> Any:
        """Return the value of one sample: an array, or bytes if there are no ops. Records steps in `tally`.

        `data`: its bytes, or the result of the first `done` steps. Raises BadSampleError (the data is at
        fault) or OpFailedError (the op is), both naming the op.
        """
        return self._run(self._steps[done:] if done else self._steps, data, draw, tally)

    def run_steps(self, value: Any, first: int, end: int, draw: Draw, tally: OpStats = _UNTIMED) -> Any:
        """Return the result of steps first…end for the result of those before. Raises as `render` does."""
        return self._run(self._steps[first:end], value, draw, tally)

    def run_windowed(
        self, decode: Callable[[KeyedRandom], Any], draw: Draw, tally: OpStats = _UNTIMED
    ) -> Any:
        """Return the result of the windowed first step, made by `decode`. Raises as `render` does, and
        SourceGoneError, SourceDamagedError.
        """
        first = self._steps[0]
        call = Step(first.label, first.index, _Call(decode), first.output, first.ops)
        return self._run((call,), None, draw, tally)

    def keep_windowed(
        self, keep: Callable[[KeyedRandom], object], draw: Draw, tally: OpStats = _UNTIMED
    ) -> None:
        """Run `keep` with the draws of the windowed first step, in its place and without a result.

        Raises as `run_windowed` does.
        """

        def run(random: KeyedRandom) -> bytes:
            keep(random)
            return b""

        self._run((replace(self._steps[0], operation=_Call(run), output=BYTES),), None, draw, tally)

    def render_into(
        self, data: Any, draw: Draw, row: npt.NDArray[Any], tally: OpStats = _UNTIMED, done: int = 0
    ) -> None:
        """Write the value of one sample of a fixed type into `row`; `data`, `done`: see `render`.

        After an error, `row` may be partly written.
        """
        value = self._run(self._steps_before_write[done:], data, draw, tally)
        began, last = tally.clock(), self._row_writer
        label = last.label if last else "row"
        try:
            self._write_row(value, row, last.random(draw) if last else _NO_DRAWS)
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemoryError(label) from error
            raise OpFailedError(label, error) from error
        if last:
            tally.record_call(label, tally.clock() - began, value_bytes(value), row.nbytes)

    @staticmethod
    def _run(steps: tuple[Step, ...], value: Any, draw: Draw, tally: OpStats) -> Any:
        began, taken, label = tally.clock(), value_bytes(value), ""
        try:
            for step in steps:
                label = step.label
                value = step.run(value, draw)
                now, made = tally.clock(), value_bytes(value)
                tally.record_call(label, now - began, taken, made)
                began, taken = now, made
        except (SourceGoneError, SourceDamagedError):
            raise
        except Exception as error:
            tally.record_call(label, tally.clock() - began, taken, 0, failed=True)
            if is_out_of_memory(error):
                raise OutOfMemoryError(label) from error
            if isinstance(error, BadSampleError):
                raise _describe_error(error, value, label) from error
            raise OpFailedError(label, error) from error
        return value


def _describe_error(error: BadSampleError, value: Any, op: str) -> BadSampleError:
    """Return the error of an op, with what the bytes are that it was given, if they are nothing that ops
    read."""
    reason = error.reason
    if isinstance(value, bytes | bytearray | memoryview):
        found = identify_foreign(bytes(value[:_LOOKED_AT]))
        if not value:
            reason = f"{EMPTY}: {reason}"
        elif found is not None:
            reason = f"{reason}; it is {found.what}: {found.fix}"
    return BadSampleError(reason, op=op)


def _copy(value: Any, row: npt.NDArray[Any], random: KeyedRandom) -> None:
    np.copyto(row, value, casting="no")


def compile_chain(
    ops: Sequence[tuple[int, OpSpec]],
    *,
    fuse: bool = True,
    load: AssetLoader = no_assets,
    start: FieldType = BYTES,
) -> OpChain:
    """Compile the ops of a field, each with its index in the plan; `start` is the type it begins with.

    Raises PlanError with the path of the bad field: unknown ops, arguments, types that do not fit together.
    """
    field, steps = start, list[Step]()
    for index, op in ops:
        path = f"ops[{index}]"
        definition, operation = registry.build(op, path, load)
        if field.layout in ANNOTATION_LAYOUTS and isinstance(operation, MovesPixels):
            operation = AnnotationMotion(operation)
        elif field.layout == "video":
            operation = by_frame(operation, field)
        try:
            output = operation.infer(field)
        except ValueError as error:
            raise PlanError(path, f"{op.op}: {error}{decode_hint(operation, field)}") from None
        if isinstance(operation, BoundToType):
            operation = operation.bind(field)
        field = output
        _append(steps, Step(op.op, index if definition.random else -1, operation, field, (op,)), fuse=fuse)
    return OpChain(steps, field)


def decode_hint(operation: registry.Operation, field: FieldType) -> str:
    """Return a hint for a plan that applies an op of images to bytes; "" if that is not the case."""
    if field.kind != "bytes":
        return ""
    try:
        operation.infer(_DECODED)
    except ValueError:
        return ""
    return ". Put decode before it (mesh op test: --before decode)"


def _append(steps: list[Step], step: Step, *, fuse: bool) -> None:
    last = steps[-1] if steps else None
    if fuse and last is not None and min(last.index, step.index) < 0 and isinstance(last.operation, Fusible):
        fused = last.operation.fuse(step.operation)
        if fused is not None:
            index = max(last.index, step.index)
            steps[-1] = Step(f"{last.label}+{step.label}", index, fused, step.output, last.ops + step.ops)
            return
    steps.append(step)
