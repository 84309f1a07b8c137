"""A plan's ops compiled for all fields: what one row of a batch is made of.

Invariant: the same canonical plan compiles to the same program on every node that has its op versions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from meshd.transform import registry
from meshd.transform.chains import compile_chain
from meshwire.documents import PlanError, suggestion
from meshwire.plans import parse_spec
from meshwire.randomness import KeyedRandom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.transform.chains import Chain
    from meshd.transform.fieldtypes import FieldType
    from meshwire.plans import OpSpec, PlanSpec

__all__ = ["Program", "compile_program", "load_program", "with_versions"]


@dataclass(frozen=True, slots=True)
class Program:
    """`chains` by field, in order of name: the bytes fields of the dataset."""

    seed: int
    chains: Mapping[str, Chain]

    @property
    def outputs(self) -> dict[str, FieldType]:
        return {name: chain.output for name, chain in self.chains.items()}

    def draw(self, epoch: int, position: int) -> partial[KeyedRandom]:
        """The randomness of one position: op index → draws."""
        return partial(KeyedRandom, self.seed, epoch, position)


def with_versions(spec: PlanSpec) -> PlanSpec:
    """The spec with the latest version filled in where an op has none. Raises UnknownOpError,
    UnknownBuildError.
    """
    ops = tuple(
        replace(op, version=registry.find(op.op, op.version, f"ops[{index}]").version)
        for index, op in enumerate(spec.ops)
    )
    return replace(spec, ops=ops)


def compile_program(
    spec: PlanSpec, fields: Sequence[str], labels: Sequence[str] = (), *, fuse: bool = True
) -> Program:
    """The program over the bytes fields `fields`; `labels` are known to the plan but take no ops.

    Raises PlanError with the path of the bad field. `fuse=False` compiles the plain chain (the tests'
    oracle).
    """
    by_field: dict[str, list[tuple[int, OpSpec]]] = {name: [] for name in sorted(fields)}
    for index, op in enumerate(spec.ops):
        path = f"ops[{index}].field"
        if op.field in labels:
            raise PlanError(path, f"{op.field!r} is a class label, an integer already; it takes no ops")
        if op.field not in by_field:
            raise PlanError(path, f"the dataset has no field {op.field!r}{suggestion(op.field, by_field)}")
        by_field[op.field].append((index, op))
    chains = {name: compile_chain(ops, fuse=fuse) for name, ops in by_field.items()}
    return Program(spec.seed, chains)


def load_program(text: str) -> Program:
    """The program of canonical JSON {"spec", "fields"}. Raises PlanError as `compile_program` does."""
    document = json.loads(text)
    return compile_program(parse_spec(document["spec"]), document["fields"])
