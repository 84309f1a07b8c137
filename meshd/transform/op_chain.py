"""Op chain of one field: types are checked once, then each sample is a short loop of calls.

Law: compilation may skip work whose result is known (decode only what the next op keeps, write planes
straight into the row), but never changes a result. `render` and `render_into` give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from meshd.transform import builtin, registry
from meshd.transform.assets import no_assets
from meshd.transform.errors import BadSampleError, OpFailedError, OutOfMemoryError, WrongOutputError
from meshd.transform.messages import OpStats, value_bytes
from meshd.transform.op_types import BYTES, image, mismatch
from meshd.transform.resource_limits import is_out_of_memory
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from meshd.transform.assets import AssetLoader
    from meshd.transform.op_types import FieldType
    from meshwire.plan.plan_spec import OpSpec

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

    `output`: the type that it declares.
    """

    label: str
    index: int
    operation: registry.Operation
    output: FieldType

    def random(self, draw: Draw) -> KeyedRandom:
        """Return its draws for one sample."""
        return draw(self.index) if self.index >= 0 else _NO_DRAWS

    def run(self, value: Any, draw: Draw) -> Any:
        made = self.operation.apply(value, self.random(draw))
        wrong = mismatch(self.output, made)
        if wrong:
            raise WrongOutputError(f"returned {wrong}, declared {self.output}")
        return made


class OpChain:
    """The compiled ops of one field, from its bytes to its `output` type."""

    __slots__ = ("_row_writer", "_steps", "_steps_before_write", "_write_row", "output")

    def __init__(self, steps: Sequence[Step], output: FieldType) -> None:
        self.output = output
        self._steps = tuple(steps)
        self._row_writer: Step | None
        self._steps_before_write, self._row_writer, self._write_row = self._steps, None, _copy
        if steps and isinstance(steps[-1].operation, RowWriter):
            self._steps_before_write, self._row_writer = self._steps[:-1], steps[-1]
            self._write_row = steps[-1].operation.write_row

    def __repr__(self) -> str:
        return f"<OpChain {' → '.join(step.label for step in self._steps) or 'bytes'}: {self.output}>"

    def render(self, data: bytes, draw: Draw, tally: OpStats = _UNTIMED) -> Any:
        """Return the value of one sample: an array, or bytes if there are no ops. Records steps in `tally`.

        Raises BadSampleError (the data is at fault) or OpFailedError (the op is), both naming the op.
        """
        return self._run(self._steps, data, draw, tally)

    def render_into(self, data: bytes, draw: Draw, row: npt.NDArray[Any], tally: OpStats = _UNTIMED) -> None:
        """Write the value of one sample of a fixed type into `row`.

        After an error, `row` may be partly written.
        """
        value = self._run(self._steps_before_write, data, draw, tally)
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
        except Exception as error:
            tally.record_call(label, tally.clock() - began, taken, 0, failed=True)
            if is_out_of_memory(error):
                raise OutOfMemoryError(label) from error
            if isinstance(error, BadSampleError):
                error.op = label
                raise
            raise OpFailedError(label, error) from error
        return value


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
        try:
            field = operation.infer(field)
        except ValueError as error:
            raise PlanError(path, f"{op.op}: {error}{decode_hint(operation, field)}") from None
        _append(steps, Step(op.op, index if definition.random else -1, operation, field), fuse=fuse)
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
            steps[-1] = Step(f"{last.label}+{step.label}", index, fused, step.output)
            return
    steps.append(step)
