"""Registration of a plan: parses its request, compiles its spec for the snapshot, and describes the plan.

Law: pure but for `first`, which reads a field of the first sample, and `load`, which reads an asset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshd.core.api_errors import busy
from meshd.core.plan_record import FieldOutput, MixColumns, Plan
from meshd.core.sample_locations import own_columns
from meshd.datasets.service import invalid_plan
from meshd.transform.compiler import asset_digests, compile_program, complete_spec
from meshd.transform.plan_notes import decode_mode, sound_format
from meshd.transform.source_files import SourceGoneError
from meshwire.dataset.build_snapshot import LabelColumn
from meshwire.plan.epoch_order import mix_bounds
from meshwire.plan.plan_spec import parse_spec, plan_hash
from meshwire.strict_json import (
    PlanError,
    checked_hash,
    checked_integer,
    checked_object,
    read_json,
    required_field,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.transform.assets import AssetLoader
    from meshd.transform.compiler import CompiledMixing
    from meshd.transform.op_types import FieldType
    from meshwire.dataset.build_snapshot import Snapshot
    from meshwire.plan.plan_spec import PlanSpec


class Registration(msgspec.Struct, frozen=True):
    """A parsed plan request. `batch` is None if the request does not give a batch size."""

    snapshot: str
    spec: PlanSpec
    batch: int | None


def parse_registration(body: bytes) -> Registration:
    """Parses the body of a plan request. Raises BatchError InvalidPlan."""
    try:
        document = checked_object(read_json(body), "", ("snapshot", "spec", "batch"))
        spec = _checked_spec(required_field(document, "spec", ""))
        batch = document.get("batch")
        return Registration(
            checked_hash(required_field(document, "snapshot", ""), "snapshot"),
            parse_spec(spec),
            None if batch is None else checked_integer(batch, "batch", 1, 1 << 24),
        )
    except PlanError as error:
        raise invalid_plan(error) from error


def _checked_spec(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PlanError("spec", "expected an object")
    return value


def check_mix(snapshot: Snapshot, spec: PlanSpec) -> None:
    """Raises PlanError if the parts of a mix do not match the snapshot."""
    if spec.mix is None:
        return
    bounds = mix_bounds(spec.mix)
    if bounds[-1] != snapshot.samples or not np.isin(bounds, snapshot.shard_starts).all():
        raise PlanError(
            "mix.parts",
            f"the parts do not match the snapshot's {snapshot.samples} samples, or a part does not begin at "
            "a shard; concatenate the parts' snapshots and give the number of samples of each",
        )


def compile_plan(
    snapshot: Snapshot, spec: PlanSpec, first: Callable[[str], bytes], load: AssetLoader
) -> Plan:
    """Return the plan with versions and outputs filled in. Raises BatchError."""
    labels = [name for name, column in snapshot.fields.items() if isinstance(column, LabelColumn)]
    try:
        spec = complete_spec(spec, first)
        program = compile_program(spec, list(own_columns(snapshot)), labels, load=load)
        digest = plan_hash(snapshot.hash, spec)
        assets = asset_digests(spec)
    except SourceGoneError as error:
        raise busy(str(error)) from error
    except PlanError as error:
        raise invalid_plan(error) from error
    outputs = {name: _output(found) for name, found in program.outputs.items()}
    objects = snapshot.objects
    return Plan(
        digest,
        snapshot.hash,
        objects.bucket,
        snapshot.samples,
        spec,
        outputs,
        assets,
        _pairs(program.pairing),
        objects.others,
    )


def _pairs(pairing: CompiledMixing | None) -> MixColumns | None:
    if pairing is None:
        return None
    outputs = {name: _output(found) for name, found in pairing.outputs.items()}
    return MixColumns(pairing.weight_name, outputs, pairing.class_labels)


def _output(field: FieldType) -> FieldOutput:
    return FieldOutput(field.dtype, field.fixed, len(field.shape))


def _described_column(plan: Plan, name: str) -> dict[str, Any]:
    mode = decode_mode(plan.spec, name)
    return plan.columns[name].describe() | ({"decoded": mode} if mode else {}) | sound_format(plan.spec, name)


def describe_plan(plan: Plan, snapshot: Snapshot, batch: int | None) -> dict[str, Any]:
    """Return the answer to a registration: fields, ops, and the steps of an epoch in batches of `batch`."""
    label: dict[str, Any] = {"dtype": "int64", "shape": []}
    others = plan.pairs.others if plan.pairs is not None else {}
    document = {
        "plan": plan.hash,
        "snapshot": plan.snapshot,
        "positions": plan.positions,
        "samples": snapshot.samples,
        "fields": {
            name: _described_column(plan, name) if name in plan.columns else label
            for name in sorted({*snapshot.own_fields(), *plan.columns, *others})
        },
        "ops": [{"op": op.op, "version": op.version} for op in plan.spec.ops],
    }
    if batch is not None:
        document["steps"] = plan.step_count(batch)
    return document
