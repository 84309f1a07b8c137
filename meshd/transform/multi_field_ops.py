"""Ops over several fields: joint ops over all values, and ops applied to each field with shared draws.

Law: a row depends only on its own values and draws. An op applied to each field draws once for all of
them; a row whose fields need different ranges is a bad sample. Invariant: a multi-field op receives
each value as the preceding ops left it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from meshd.transform import registry
from meshd.transform.errors import BadSampleError, OpFailedError, OutOfMemoryError, WrongOutputError
from meshd.transform.messages import value_bytes
from meshd.transform.op_chain import OpChain, compile_chain
from meshd.transform.op_types import BYTES, describe_mismatch
from meshd.transform.resource_limits import is_out_of_memory
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from meshd.transform.assets import AssetLoader
    from meshd.transform.decoded_cache.row_prefixes import RowPrefixes
    from meshd.transform.messages import OpStats
    from meshd.transform.op_chain import Draw
    from meshd.transform.op_types import FieldType
    from meshwire.plan.plan_spec import OpSpec

    Pieces = Sequence[tuple[int, ...]]

_NO_DRAWS = KeyedRandom(0, 0, 0)


class MultiFieldOp(Protocol):
    """An op over the values of several fields."""

    def infer_all(self, fields: Sequence[FieldType]) -> tuple[FieldType, ...]:
        """Return the types of all fields after the op, in their order. Raises ValueError."""
        ...

    def apply_all(self, values: Sequence[Any], random: KeyedRandom) -> tuple[Any, ...]:
        """Return the values of all fields after the op; unchanged values are the same objects."""
        ...


@runtime_checkable
class ReadsImage(Protocol):
    """A multi-field op that needs the size of an image only, and leaves the image as it is."""

    image_input: int
    """Which of its inputs is the image: the bytes of its file, or [height, width, channels]."""


class CompiledMultiFieldOp(msgspec.Struct, frozen=True):
    """A multi-field op of a plan. `before`: for each of its fields, the number and the preceding chain.

    `outputs`: the types after the op. `draws`: whether it uses randomness. `reads`: the numbers of fields
    whose bytes it reads and leaves to their own chain.
    """

    op: str
    index: int
    before: tuple[tuple[int, OpChain], ...]
    outputs: tuple[FieldType, ...]
    operation: MultiFieldOp
    draws: bool
    reads: frozenset[int] = frozenset()

    def run(self, values: Sequence[Any], draw: Draw, tally: OpStats) -> tuple[Any, ...]:
        """Apply the op to the values. Raises BadSampleError, OpFailedError, OutOfMemoryError."""
        began, taken = tally.clock(), sum(map(value_bytes, values))
        try:
            made = self.operation.apply_all(values, draw(self.index) if self.draws else _NO_DRAWS)
            self._check(made)
        except Exception as error:
            tally.record_call(self.op, tally.clock() - began, taken, 0, failed=True)
            if is_out_of_memory(error):
                raise OutOfMemoryError(self.op) from error
            if isinstance(error, BadSampleError):
                error.op = self.op
                raise
            raise OpFailedError(self.op, error) from error
        tally.record_call(self.op, tally.clock() - began, taken, sum(map(value_bytes, made)))
        return made

    def _check(self, made: tuple[Any, ...]) -> None:
        for output, value in zip(self.outputs, made, strict=True):
            if wrong := describe_mismatch(output, value):
                raise WrongOutputError(wrong)


class FieldOps:
    """Sorts the ops of a plan by field: the ops still to compile for each, and the type they begin with."""

    def __init__(self, names: Collection[str], *, fuse: bool, load: AssetLoader) -> None:
        self.ops: dict[str, list[tuple[int, OpSpec]]] = {name: [] for name in sorted(names)}
        self.starts: dict[str, FieldType] = dict.fromkeys(self.ops, BYTES)
        self.joints: list[CompiledMultiFieldOp] = []
        self.shared: dict[int, tuple[str, ...]] = {}
        self._fuse, self._load = fuse, load
        self._made: set[str] = set()  # fields whose value an op over several fields made

    def add_op(self, index: int, op: OpSpec) -> None:
        """Add the next op of the plan. Raises PlanError."""
        definition = registry.find(op.op, op.version, f"ops[{index}]")
        if definition.is_multi_field:
            self._join(index, op)
            return
        if op.fields:
            self._check_shared(index, op, definition)
        for name in op.all_fields:
            self.ops[name].append((index, op.for_field(name) if op.fields else op))

    def _check_shared(self, index: int, op: OpSpec, definition: registry.OpDefinition) -> None:
        if definition.is_mixing:
            raise PlanError(f"ops[{index}].fields", f"{op.op} mixes one field; name its labels in `labels`")
        if definition.random:
            self.shared[index] = op.fields

    def _join(self, index: int, op: OpSpec) -> None:
        path = f"ops[{index}]"
        if op.each:
            raise PlanError(f"{path}.each", f"{op.op} takes its fields together and has one set of arguments")
        definition, operation = registry.build(op, path, self._load)
        joining: MultiFieldOp = operation  # type: ignore[assignment]  # `is_multi_field` guarantees it
        read = self._read_field(op, joining, path)
        chains = []
        for name in op.all_fields:
            if name == read:
                chains.append(OpChain((), BYTES))
                continue
            mixing = [
                at for at, each in self.ops[name] if registry.find(each.op, each.version, path).is_mixing
            ]
            if mixing:
                raise PlanError(
                    path, f"{op.op} works on rows before they are mixed: move it before the mixing op"
                )
            chains.append(
                compile_chain(self.ops[name], fuse=self._fuse, load=self._load, start=self.starts[name])
            )
        try:
            outputs = joining.infer_all([chain.output for chain in chains])
        except ValueError as error:
            raise PlanError(path, f"{op.op}: {error}") from None
        numbers = [list(self.ops).index(name) for name in op.all_fields]
        before = tuple(zip(numbers, chains, strict=True))
        reads = frozenset(number for number, name in zip(numbers, op.all_fields, strict=True) if name == read)
        self.joints.append(
            CompiledMultiFieldOp(op.op, index, before, outputs, joining, definition.random, reads)
        )
        for name, output in zip(op.all_fields, outputs, strict=True):
            if name != read:
                self.ops[name], self.starts[name] = [], output
                self._made.add(name)

    def _read_field(self, op: OpSpec, joining: MultiFieldOp, path: str) -> str:
        """Return the field whose file tells the size of an image, "" if there is none. Raises PlanError."""
        if not isinstance(joining, ReadsImage) or len(op.all_fields) <= joining.image_input:
            return ""
        name = op.all_fields[joining.image_input]
        if name in self._made:
            return ""
        other = next((each.op for _, each in self.ops[name] if each.op != "decode"), "")
        if other:
            raise PlanError(
                path, f"{op.op} takes the size of the file in {name!r}: move it before {other} of that field"
            )
        return name


class RowInputs:
    """The inputs of the last part of each field's chain, for one row.

    An input is the bytes of the field, or the output of an op over several fields.
    """

    def __init__(
        self,
        joints: Sequence[CompiledMultiFieldOp],
        sources: Sequence[Pieces],
        read: Callable[[Pieces], bytes],
        draw: Draw,
        tally: OpStats,
        prefixes: RowPrefixes | None = None,
    ) -> None:
        self._joints, self._sources, self._read = joints, sources, read
        self._draw, self._tally, self._prefixes = draw, tally, prefixes
        self._made: dict[int, Any] = {}
        self._kept: dict[int, bytes] = {}
        self._joined = not joints
        self.number = joints[0].before[0][0] if joints else 0
        """The current field, which an error is attributed to."""

    def run_multi_field_ops(self) -> None:
        """Run the multi-field ops, once. Raises as rendering does."""
        if self._joined:
            return
        for joint in self._joints:
            values = []
            for number, chain in joint.before:
                self.number = number
                if number in joint.reads:
                    values.append(self._kept.setdefault(number, self._source(number)))
                else:
                    values.append(self.render_chain(number, chain))
            self.number = joint.before[0][0]
            made = joint.run(values, self._draw, self._tally)
            for (number, _), value in zip(joint.before, made, strict=True):
                if number not in joint.reads:
                    self._made[number] = value
        self._joined = True

    def _source(self, number: int) -> bytes:
        """Return the bytes of a field, which are read once for all ops that need them."""
        kept = self._kept.get(number)
        return self._read(self._sources[number]) if kept is None else kept

    def begin_chain(self, number: int, chain: OpChain) -> tuple[Any, int]:
        """Return (value, done): the result of the first `done` steps of the last part of a field's chain.

        Raises as rendering does.
        """
        self.run_multi_field_ops()
        self.number = number
        return self._begin(number, chain)

    def render_chain(self, number: int, chain: OpChain) -> Any:
        """Return the value of a field's chain, or of its part before the next op that joins fields."""
        value, done = self._begin(number, chain)
        return chain.render(value, self._draw, self._tally, done)

    def _begin(self, number: int, chain: OpChain) -> tuple[Any, int]:
        if number in self._made:
            return self._made[number], 0
        if self._prefixes is None:
            return self._source(number), 0
        return self._prefixes.begin(number, chain, self._draw, lambda: self._source(number))


class _TracedDraws(KeyedRandom):
    """Draws that record the ranges of their integers, or compare them with those of another field."""

    __slots__ = ("_again", "_at", "_fields", "_ranges")

    def begin(self, ranges: list[int], fields: tuple[str, ...], *, again: bool) -> None:
        self._ranges, self._fields, self._again, self._at = ranges, fields, again, 0

    def integer(self, n: int) -> int:
        if not self._again:
            self._ranges.append(n)
        elif self._at >= len(self._ranges) or self._ranges[self._at] != n:
            names = " and ".join(map(repr, self._fields))
            raise BadSampleError(
                f"the fields {names} differ in size: an op that draws once for all needs one size"
            )
        self._at += 1
        return super().integer(n)


class SharedDraws:
    """The draws of one row if ops over several fields draw once for all of them."""

    def __init__(self, seed: int, epoch: int, position: int, shared: Mapping[int, tuple[str, ...]]) -> None:
        self._key, self._shared = (seed, epoch, position), shared
        self._ranges: dict[int, list[int]] = {}

    def __call__(self, index: int) -> KeyedRandom:
        fields = self._shared.get(index)
        if fields is None:
            return KeyedRandom(*self._key, index)
        again = index in self._ranges
        traced = _TracedDraws(*self._key, index)
        traced.begin(self._ranges.setdefault(index, []), fields, again=again)
        return traced
