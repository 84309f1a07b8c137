"""Plan compiler: turns the ops of a plan into a program that renders one row of a batch.

A field that is mixed has two chains, before and after its mixing op. Invariant: a canonical plan compiles
to the same program on every node that has its op versions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec

from meshd.transform import registry
from meshd.transform.assets import PREFIX, no_assets
from meshd.transform.errors import BadSampleError, MissingLibraryError
from meshd.transform.multi_field_ops import FieldOps, SharedDraws
from meshd.transform.op_chain import compile_chain, decode_hint
from meshd.transform.op_types import BYTES, LABEL, FieldType
from meshd.transform.sandbox.user_op_definitions import MODULES
from meshwire.plan.keyed_random import KeyedRandom
from meshwire.plan.op_declarations import is_user_op
from meshwire.plan.plan_spec import parse_spec
from meshwire.strict_json import PlanError, shown_value, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from meshd.transform.assets import AssetLoader
    from meshd.transform.multi_field_ops import CompiledMultiFieldOp
    from meshd.transform.op_chain import Draw, OpChain
    from meshd.transform.registry import Complete, MixingOp
    from meshwire.plan.plan_spec import OpSpec, PlanSpec

__all__ = [
    "CompiledMixing",
    "Program",
    "asset_digests",
    "compile_program",
    "complete_spec",
    "load_program",
    "partner_label_name",
]


WEIGHT = FieldType("array", "float32", ())
_SOFT = ("float16", "float32", "float64")


class CompiledMixing(msgspec.Struct, frozen=True):
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


class Program(msgspec.Struct, frozen=True):
    """A compiled plan. `chains` by field, ordered by name: the bytes fields of the dataset.

    With a `pairing`, the chain of the mixed field begins with the mixed value. The chain of a field that a
    multi-field op in `joints` takes begins with the output of that op. `shared`: by index, the ops that use
    the same draws for several fields.
    """

    seed: int
    chains: Mapping[str, OpChain]
    pairing: CompiledMixing | None = None
    joints: tuple[CompiledMultiFieldOp, ...] = ()
    shared: Mapping[int, tuple[str, ...]] = msgspec.field(default_factory=dict)

    @property
    def outputs(self) -> dict[str, FieldType]:
        return {name: chain.output for name, chain in self.chains.items()}

    @property
    def first_chains(self) -> tuple[tuple[int, OpChain], ...]:
        """For each field, its number and the part of its ops that begins with its bytes.

        In the order in which rows are rendered: fields of multi-field ops first.
        """
        found: dict[int, OpChain] = {}
        for joint in self.joints:
            for number, chain in joint.before:
                if number not in joint.reads:
                    found.setdefault(number, chain)
        for number, (name, chain) in enumerate(self.chains.items()):
            mixed = self.pairing is not None and name == self.pairing.field
            found.setdefault(number, self.pairing.before if mixed and self.pairing else chain)
        return tuple(found.items())

    def require_unmixed(self, why: str) -> None:
        """Raises PlanError if the program mixes rows; `why` is the end of the message."""
        if self.pairing is not None:
            raise PlanError(
                f"ops[{self.pairing.index}]", f"{self.pairing.op} mixes two rows of a batch; {why}"
            )

    def draw(self, epoch: int, position: int) -> Draw:
        """Return the randomness for the row at a position: op index → draws. Use it for that row only."""
        if self.shared:
            return SharedDraws(self.seed, epoch, position, self.shared)
        return partial(KeyedRandom, self.seed, epoch, position)


def complete_spec(spec: PlanSpec, first: Callable[[str], bytes]) -> PlanSpec:
    """Return the spec with everything that its hash must cover.

    Adds the latest version to ops without one, and arguments that are taken from the data. `first` reads the
    bytes of a field of the dataset's first sample (KeyError if the field is not a bytes field). Raises
    UnknownOpError, UnknownBuildError, and PlanError if the first sample does not determine the arguments.
    """
    ops = tuple(_complete_op(op, f"ops[{index}]", first) for index, op in enumerate(spec.ops))
    return replace(spec, ops=ops)


def _complete_op(op: OpSpec, path: str, first: Callable[[str], bytes]) -> OpSpec:
    definition = registry.find(op.op, op.version, path)
    op = replace(op, version=definition.version, args=dict(op.args))
    if definition.complete is None:
        return op
    if not op.fields:
        return replace(op, args=_completed_args(definition.complete, op, path, first))
    each = dict(op.each)
    for name in op.fields:
        single = op.for_field(name)
        args = _completed_args(definition.complete, single, path, first)
        added = {key: value for key, value in args.items() if key not in single.args}
        if added:
            each[name] = {**each.get(name, {}), **added}
    return replace(op, each=each)


def _completed_args(
    complete: Complete, op: OpSpec, path: str, first: Callable[[str], bytes]
) -> dict[str, Any]:
    """Return the arguments of an op on one field. Raises PlanError."""
    try:
        return complete(op.args, lambda: first(op.field))
    except (KeyError, MissingLibraryError):  # no such field, no library: compiling the plan reports it
        return dict(op.args)
    except BadSampleError as error:
        raise PlanError(
            f"{path}.args",
            f"give all arguments of {op.op!r}; the first sample does not tell: {error}",
        ) from error


def compile_program(
    spec: PlanSpec,
    fields: Sequence[str],
    labels: Sequence[str] = (),
    *,
    fuse: bool = True,
    load: AssetLoader = no_assets,
) -> Program:
    """Compile the program over the bytes fields `fields`; `labels` are known to the plan but take no ops.

    Raises PlanError with the path of the bad field. `fuse=False` compiles the plain chain (the tests'
    oracle); `load` returns the assets that ops are built with.
    """
    sorted_ = FieldOps(fields, fuse=fuse, load=load)
    for index, op in enumerate(spec.ops):
        for name in op.all_fields:
            _check_field(name, f"ops[{index}].{'fields' if op.fields else 'field'}", sorted_.ops, labels)
        sorted_.add_op(index, op)
    starts = sorted_.starts
    halves = {
        name: split_at_mixing(ops, fuse=fuse, load=load, start=starts[name])
        for name, ops in sorted_.ops.items()
    }
    mixed = {name: cut for name, cut in halves.items() if cut is not None}
    chains = {
        name: mixed[name].after
        if name in mixed
        else compile_chain(ops, fuse=fuse, load=load, start=starts[name])
        for name, ops in sorted_.ops.items()
    }
    pairing = _pairing(mixed, chains, labels)
    return Program(spec.seed, chains, pairing, tuple(sorted_.joints), sorted_.shared)


def _check_field(name: str, path: str, known: Collection[str], labels: Sequence[str]) -> None:
    if name in labels:
        raise PlanError(path, f"{name!r} is a class label, which is an integer and takes no ops")
    if name not in known:
        raise PlanError(path, f"the dataset has no field {name!r}{suggestion(name, known)}")


class SplitChain(msgspec.Struct, frozen=True):
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
    at = [
        number
        for number, (index, op) in enumerate(ops)
        if registry.find(op.op, op.version, f"ops[{index}]").is_mixing
    ]
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


def _pairing(
    mixed: Mapping[str, SplitChain], chains: Mapping[str, OpChain], labels: Sequence[str]
) -> CompiledMixing | None:
    if not mixed:
        return None
    (field, halves), *more = sorted(mixed.items(), key=lambda item: item[1].index)
    if more:
        raise PlanError(
            f"ops[{more[0][1].index}]", f"a plan mixes only one field, and this one already mixes {field!r}"
        )
    return compile_mixing(field, halves, chains, labels)


def _is_soft(field: FieldType) -> bool:
    return field.kind == "array" and field.dtype in _SOFT and field.fixed is not None


def asset_digests(spec: PlanSpec) -> tuple[str, ...]:
    """Return the assets of a pinned spec, including modules of user ops, sorted and without duplicates.

    Raises UnknownOpError, UnknownBuildError.
    """
    modules = {op.version.removeprefix(PREFIX) for op in spec.ops if is_user_op(op.op)}
    found = modules | {
        str(op.args[name]).removeprefix(PREFIX)
        for index, op in enumerate(spec.ops)
        for name in registry.find(op.op, op.version, f"ops[{index}]").assets
        if op.args.get(name) is not None
    }
    return tuple(sorted(found))


def load_program(text: str, load: AssetLoader = no_assets) -> Program:
    """Compile the program of canonical JSON {"spec", "fields", "labels"?}.

    Raises as `compile_program` does.
    """
    document = json.loads(text)
    spec, labels = parse_spec(document["spec"]), document.get("labels", ())
    for index, op in enumerate(spec.ops):
        if is_user_op(op.op):  # from here on, `registry.find` finds the op by its name
            MODULES.find_op(op.op, op.version, f"ops[{index}]", load)
    return compile_program(spec, document["fields"], labels, load=load)
