"""Mixup pairs: positions p and p ^ 1 of an epoch are mixed, whichever batch they are in.

Law: a row depends only on the samples and draws of its pair, so content does not depend on batch size
or world size. A row is not mixed (weight 1) when its partner is past the end of the epoch, or is bad in
the mixed field or a label. Invariant: within a slice, each member of a pair is prepared once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from meshd.transform import registry
from meshd.transform.errors import BadSampleError, OpFailedError, OutOfMemoryError
from meshd.transform.messages import value_bytes
from meshd.transform.multi_field_ops import RowInputs
from meshd.transform.op_chain import compile_chain, decode_hint
from meshd.transform.op_types import BYTES, LABEL, FieldType
from meshd.transform.resource_limits import is_out_of_memory
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.strict_json import PlanError, shown_value, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from meshd.transform.assets import AssetLoader
    from meshd.transform.compiler import Program
    from meshd.transform.messages import OpStats, Row
    from meshd.transform.op_chain import Draw, OpChain
    from meshd.transform.registry import MixingOp
    from meshwire.plan.plan_spec import OpSpec

    Pieces = Sequence[tuple[int, ...]]
    Read = Callable[[Pieces], bytes]

WEIGHT = FieldType("array", "float32", ())
_SOFT = ("float16", "float32", "float64")


def partner_position(position: int) -> int:
    """Return the other position of a pair."""
    return position ^ 1


@dataclass(frozen=True, slots=True)
class CompiledMixing:
    """A plan's mixing op, compiled. `before`: the chain of `field` before mixing.

    `soft`: labels that are float vectors, mixed as the field is. `others` (bytes fields) and `class_labels`
    (labels of the dataset): labels whose partner's value is delivered next to the row's own.
    """

    op: str
    index: int
    field: str
    before: OpChain
    mixing: MixingOp
    soft: tuple[str, ...]
    others: tuple[str, ...]
    class_labels: tuple[str, ...]

    @property
    def outputs(self) -> dict[str, FieldType]:
        """The columns that transform processes write in addition to the fields, ordered by name."""
        added = {self.weight_name: WEIGHT} | {partner_label_name(label): LABEL for label in self.others}
        return dict(sorted(added.items()))

    @property
    def weight_name(self) -> str:
        return f"{self.field}.weight"


def partner_label_name(label: str) -> str:
    """Return the name of the column with the partner's value of a label."""
    return f"{label}.other"


@dataclass(frozen=True, slots=True)
class SplitChain:
    """A field's chain, split at its mixing op: `after` is the chain of the mixed value."""

    op: str
    index: int
    before: OpChain
    mixing: MixingOp
    after: OpChain


def split_at_mixing(
    ops: Sequence[tuple[int, OpSpec]], *, fuse: bool, load: AssetLoader, start: FieldType = BYTES
) -> SplitChain | None:
    """Split a field's ops, which begin with the type `start`, at the mixing op.

    Returns None if none of them mixes. Raises PlanError.
    """
    at = [number for number, (index, op) in enumerate(ops) if _mixes(index, op)]
    if not at:
        return None
    if len(at) > 1:
        raise PlanError(
            f"ops[{ops[at[1]][0]}]",
            "a plan mixes rows only once; mixup_or_cutmix chooses one of the two at random",
        )
    index, op = ops[at[0]]
    before = compile_chain(ops[: at[0]], fuse=fuse, load=load, start=start)
    _, operation = registry.build(op, f"ops[{index}]", load)
    try:
        mixed = operation.infer(before.output)
    except ValueError as error:
        hint = decode_hint(operation, before.output)
        raise PlanError(f"ops[{index}]", f"{op.op}: {error}{hint}") from None
    after = compile_chain(ops[at[0] + 1 :], fuse=fuse, load=load, start=mixed)
    return SplitChain(op.op, index, before, cast("MixingOp", operation), after)


def _mixes(index: int, op: OpSpec) -> bool:
    return registry.find(op.op, op.version, f"ops[{index}]").is_mixing


def compile_mixing(
    field: str, halves: SplitChain, chains: Mapping[str, OpChain], class_labels: Sequence[str]
) -> CompiledMixing:
    """Compile the mixing of a program. Raises PlanError for labels that it does not support."""
    soft, others, own = list[str](), list[str](), list[str]()
    given = halves.mixing.labels
    for name in sorted({*chains, *class_labels}) if given is None else given:
        path = f"ops[{halves.index}].args.labels"
        if name in class_labels:
            own.append(name)
        elif name not in chains:
            known = suggestion(name, [*chains, *class_labels])
            raise PlanError(path, f"the dataset has no field {shown_value(name)}{known}")
        elif chains[name].output.kind == "label":
            others.append(name)
        elif given is not None and name != field and _is_soft(chains[name].output):
            soft.append(name)
        elif given is not None:
            found = chains[name].output
            raise PlanError(
                path, f"{name!r} is {found}; a label is an int64, or floats of a fixed shape (one_hot)"
            )
    return CompiledMixing(
        halves.op,
        halves.index,
        field,
        halves.before,
        halves.mixing,
        tuple(soft),
        tuple(sorted(others)),
        tuple(own),
    )


def _is_soft(field: FieldType) -> bool:
    return field.kind == "array" and field.dtype in _SOFT and field.fixed is not None


@dataclass(slots=True)
class _Partner:
    """The partner: its value of the mixed field, its soft labels by field number, its others by name."""

    value: Any
    soft: dict[int, Any]
    labels: dict[str, Any]


class PairedRow:
    """One mixed row. `value` is the input of the rest of its field's chain."""

    __slots__ = ("_other", "_pairing", "value", "weight")

    def __init__(self, pairing: CompiledMixing, value: Any, weight: float, other: _Partner | None) -> None:
        self.value, self.weight = value, weight
        self._pairing, self._other = pairing, other

    def mix_soft_label(self, field: int, row: npt.NDArray[Any]) -> None:
        """Mix the field of this number, which was rendered into `row`, if it is a soft label."""
        if self._other is not None and field in self._other.soft:
            weight = np.float32(self.weight)
            row[...] = row * weight + self._other.soft[field] * (np.float32(1.0) - weight)

    def columns(self, own: Mapping[str, Any]) -> list[Any]:
        """Return the values of `CompiledMixing.outputs`; `own` are the row's labels."""
        labels = own if self._other is None or self.weight == 1.0 else self._other.labels
        pairing = self._pairing
        added = {pairing.weight_name: self.weight}
        added |= {partner_label_name(name): labels[name] for name in pairing.others}
        return [value for _, value in sorted(added.items())]


class PairRenderer:
    """Prepares the pairs of one slice; caches the values and draws of the current pair."""

    def __init__(
        self, program: Program, pairing: CompiledMixing, epoch: int, read: Read, tally: OpStats
    ) -> None:
        self.pairing = pairing
        self._program, self._epoch, self._read, self._tally = program, epoch, read, tally
        self._names = list(program.chains)
        self.number = self._names.index(pairing.field)
        self._beside: RowInputs | None = None
        self._known: dict[tuple[int, Any], Any] = {}
        self._draws: dict[tuple[int, Any], Draw] = {}

    def draw(self, position: int, sources: Sequence[Pieces]) -> Draw:
        """Return the draws of a row, the same object for the row itself and for its use as a partner.

        Ops over several fields store in it what they drew for the first field.
        """
        key = position, sources[self.number]
        found = self._draws.get(key)
        if found is None:
            found = self._draws[key] = self._program.draw(self._epoch, position)
        return found

    def begin(self, row: Row, draw: Draw, start: RowInputs) -> PairedRow:
        """Return the row with its field mixed; `start` has its inputs.

        Raises BadSampleError for the row's own field, OpFailedError, SourceGoneError.
        """
        position = row.position & ~1
        self._known = {key: value for key, value in self._known.items() if key[0] & ~1 == position}
        self._draws = {key: draws for key, draws in self._draws.items() if key[0] & ~1 == position}
        pairing = self.pairing
        value = self._prepared(row.position, row.sources, draw, start)
        other = self._other(row) if row.partner else None
        if other is None:
            return PairedRow(pairing, value, 1.0, None)
        random = KeyedRandom(self._program.seed, self._epoch, position, pairing.index)
        return PairedRow(pairing, *self._mixed(value, other.value, random), other)

    def _mixed(self, value: Any, other: Any, random: KeyedRandom) -> tuple[Any, float]:
        tally, op = self._tally, self.pairing.op
        began, taken = tally.clock(), value_bytes(value) + value_bytes(other)
        try:
            mixed, weight = self.pairing.mixing.mix(value, other, random)
        except Exception as error:
            tally.record_call(op, tally.clock() - began, taken, 0, failed=True)
            if is_out_of_memory(error):
                raise OutOfMemoryError(op) from error
            raise OpFailedError(op, error) from error
        tally.record_call(op, tally.clock() - began, taken, value_bytes(mixed))
        return mixed, weight

    def _prepared(self, position: int, sources: Sequence[Pieces], draw: Draw, start: RowInputs) -> Any:
        """Return the value of the field before mixing. Raises as rendering does."""
        pieces = sources[self.number]
        key = position, pieces
        known = self._known.get(key)
        if known is None:
            try:
                known = self.pairing.before.render(start.field_value(self.number), draw, self._tally)
            except BadSampleError as error:
                known = error
            self._known[key] = known
        if isinstance(known, BadSampleError):
            raise known
        return known

    def _other(self, row: Row) -> _Partner | None:
        position = partner_position(row.position)
        draw = self.draw(position, row.partner)
        pairing = self.pairing
        self._beside = start = RowInputs(self._program.joints, row.partner, self._read, draw, self._tally)
        start.number = self.number
        try:
            value = self._prepared(position, row.partner, draw, start)
            soft = {self._names.index(name): self._label(name, draw, start) for name in pairing.soft}
            labels = {name: self._label(name, draw, start) for name in pairing.others}
        except BadSampleError:  # reported by the partner's own row
            self._beside = None
            return None
        self._beside = None
        return _Partner(value, soft, labels)

    def through(self) -> int | None:
        """Return which field of the partner was being prepared when a row failed, and reset.

        None if the failure was in the row itself.
        """
        beside, self._beside = self._beside, None
        return None if beside is None else beside.number

    def _label(self, name: str, draw: Draw, start: RowInputs) -> Any:
        value = start.field_value(self._names.index(name))
        return self._program.chains[name].render(value, draw, self._tally)
