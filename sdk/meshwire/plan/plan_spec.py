"""The plan: ops, seed, shuffle, tail and bad-sample policy, as one canonical document.

Law: content and order of a global batch depend on (snapshot, plan, epoch, step, G) alone. Batch size and
world size are not part of a plan or of its hash. A fault in a spec raises PlanError with its path.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from meshwire.plan.mix import mix_document, parse_mix
from meshwire.plan.rank_slices import TAILS
from meshwire.plan.sequence_packing import pack_document, parse_pack
from meshwire.plan.shuffle import (
    ShuffleSpec,
    buckets_document,
    parse_buckets,
    parse_shuffle,
    shuffle_document,
)
from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    canonical_json,
    checked_choice,
    checked_hash,
    checked_integer,
    checked_json,
    checked_number,
    checked_object,
    checked_text,
    join_path,
    read_json,
    required_field,
    shown_value,
    suggestion,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.plan.mix import Mix
    from meshwire.plan.rank_slices import Tail
    from meshwire.plan.sequence_packing import Pack
    from meshwire.plan.shuffle import BucketSpec

SPEC_VERSION = 1
MAX_OPS = 256
MAX_FIELDS = 16  # of one op
OnBad = Literal["substitute", "raise", "mask", "drop"]
ON_BAD: tuple[OnBad, ...] = ("substitute", "raise", "mask", "drop")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-/]{0,99}")


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One op on one field. `args`: plain JSON values by name; `version` is "" until a node has chosen the
    build. `fields`: all fields of an op over several, of which `field` is the first; `each`: arguments by
    field that differ from `args`.
    """

    op: str
    field: str
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    version: str = ""
    fields: tuple[str, ...] = ()
    each: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def all_fields(self) -> tuple[str, ...]:
        """All fields the op applies to."""
        return self.fields or (self.field,)

    def for_field(self, field: str) -> OpSpec:
        """Return the part of an op over several fields that applies to one of them, as an op on that field
        alone."""
        return OpSpec(self.op, field, {**self.args, **self.each.get(field, {})}, self.version)


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """A plan. `max_bad`: the share of an epoch's samples, 0…1, above which a job stops whatever `on_bad`
    is. `pack`: rows hold several samples, and positions count rows. `mix`: parts of the samples have their
    own shares. `buckets`: rows of similar length are grouped.
    """

    ops: tuple[OpSpec, ...] = ()
    seed: int = 0
    shuffle: ShuffleSpec = dataclasses.field(default_factory=ShuffleSpec)
    tail: Tail = "pad"
    on_bad: OnBad = "substitute"
    max_bad: float = 0.01
    pack: Pack | None = None
    mix: Mix | None = None
    buckets: BucketSpec | None = None


def parse_spec(source: bytes | str | Mapping[str, Any]) -> PlanSpec:
    """Parse a plan from JSON text or a parsed value. Raises PlanError for unknown names, types, ranges and
    sizes.
    """
    value = read_json(source) if isinstance(source, (bytes, str)) else checked_json(dict(source), "")
    known = ("version", "ops", "seed", "shuffle", "tail", "on_bad", "max_bad", "pack", "mix", "buckets")
    document = checked_object(value, "", known)
    version = checked_integer(document.get("version", SPEC_VERSION), "version", 1, MAX_INTEGER)
    if version != SPEC_VERSION:
        raise PlanError(
            "version", f"{version} is newer than this node supports ({SPEC_VERSION}); upgrade the node"
        )
    return PlanSpec(
        ops=_parse_ops(document.get("ops", [])),
        seed=checked_integer(document.get("seed", 0), "seed", 0, MAX_INTEGER),
        shuffle=parse_shuffle(document.get("shuffle", {"kind": "global"})),
        tail=cast("Tail", checked_choice(document.get("tail", "pad"), "tail", TAILS)),
        on_bad=cast("OnBad", checked_choice(document.get("on_bad", "substitute"), "on_bad", ON_BAD)),
        max_bad=checked_number(document.get("max_bad", 0.01), "max_bad", 0.0, 1.0),
        pack=None if document.get("pack") is None else parse_pack(document["pack"]),
        mix=None if document.get("mix") is None else parse_mix(document["mix"]),
        buckets=None if document.get("buckets") is None else parse_buckets(document["buckets"]),
    )


def _parse_ops(value: Any) -> tuple[OpSpec, ...]:
    if not isinstance(value, list):
        raise PlanError("ops", f"expected a list of ops, got {shown_value(value)}")
    if len(value) > MAX_OPS:
        raise PlanError("ops", f"{len(value)} ops; a plan can have at most {MAX_OPS}")
    return tuple(_parse_op(item, f"ops[{index}]") for index, item in enumerate(value))


def _parse_op(value: Any, path: str) -> OpSpec:
    document = checked_object(value, path, ("op", "field", "fields", "args", "each", "version"))
    args = _checked_args(document.get("args", {}), join_path(path, "args"))
    name = _checked_name(required_field(document, "op", path), join_path(path, "op"))
    version = checked_text(document.get("version", ""), join_path(path, "version"), at_most=100)
    if "fields" in document:
        if "field" in document:
            raise PlanError(join_path(path, "fields"), "an op can have `field` or `fields`, not both")
        fields = _checked_fields(document["fields"], join_path(path, "fields"))
        each = _checked_each(document.get("each", {}), fields, join_path(path, "each"))
        return OpSpec(name, fields[0], args, version, fields, each)
    if "each" in document:
        raise PlanError(join_path(path, "each"), "only an op over several `fields` can have `each`")
    field = _checked_name(required_field(document, "field", path), join_path(path, "field"))
    return OpSpec(name, field, args, version)


def _checked_args(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(path, f"expected an object, got {shown_value(value)}")
    return value


def _checked_fields(value: Any, path: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not 2 <= len(value) <= MAX_FIELDS:
        raise PlanError(path, f"expected a list of 2…{MAX_FIELDS} fields, got {shown_value(value)}")
    fields = tuple(_checked_name(item, f"{path}[{number}]") for number, item in enumerate(value))
    if len(set(fields)) != len(fields):
        raise PlanError(path, "a field appears twice")
    return fields


def _checked_each(value: Any, fields: tuple[str, ...], path: str) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise PlanError(path, f"expected an object of arguments by field, got {shown_value(value)}")
    for name in value:
        if name not in fields:
            raise PlanError(
                join_path(path, name),
                f"the op does not apply to {shown_value(name)}{suggestion(name, fields)}",
            )
    return {name: _checked_args(args, join_path(path, name)) for name, args in value.items() if args != {}}


def _checked_name(value: Any, path: str) -> str:
    text = checked_text(value, path, at_most=100)
    if not _NAME.fullmatch(text):
        raise PlanError(path, f"{shown_value(text)} is not a valid name; use letters, digits and _ . - /")
    return text


def spec_document(spec: PlanSpec) -> dict[str, Any]:
    """Return the plan as plain JSON values; `parse_spec` restores it."""
    document: dict[str, Any] = {
        "version": SPEC_VERSION,
        "ops": [op_document(op) for op in spec.ops],
        "seed": spec.seed,
        "shuffle": shuffle_document(spec.shuffle),
        "tail": spec.tail,
        "on_bad": spec.on_bad,
        "max_bad": spec.max_bad,
    }
    if spec.pack is not None:
        document["pack"] = pack_document(spec.pack)
    if spec.mix is not None:
        document["mix"] = mix_document(spec.mix)
    if spec.buckets is not None:
        document["buckets"] = buckets_document(spec.buckets)
    return document


def op_document(op: OpSpec) -> dict[str, Any]:
    """Return the op as plain JSON values."""
    document: dict[str, Any] = {"op": op.op, "args": dict(op.args)}
    document |= {"fields": list(op.fields)} if op.fields else {"field": op.field}
    if op.each:
        document["each"] = {name: dict(args) for name, args in op.each.items()}
    if op.version:
        document["version"] = op.version
    return document


def canonical_spec(spec: PlanSpec) -> bytes:
    """Encode the plan as canonical JSON: equal plans have equal bytes."""
    return canonical_json(spec_document(spec))


def plan_hash(snapshot: str, spec: PlanSpec) -> str:
    """Return the SHA-256 (hex) of the canonical JSON of {snapshot, spec}.

    Raises PlanError if an op has no version yet (a node fills it in) or `snapshot` is not a hash.
    """
    checked_hash(snapshot, "snapshot")
    for index, op in enumerate(spec.ops):
        if not op.version:
            raise PlanError(
                f"ops[{index}].version", f"{op.op!r} has no version; register the plan with a node"
            )
    document = {"snapshot": snapshot, "spec": spec_document(spec)}
    return hashlib.sha256(canonical_json(document)).hexdigest()
