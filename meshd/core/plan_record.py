"""Plan: a registered plan as the node stores it, with its spec, snapshot and output layout.

Invariant: a plan is a function of (snapshot, spec). It stores `outputs` so that a frame can be laid out
without a compiler.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from meshwire.plan.plan_spec import parse_spec, spec_document
from meshwire.plan.rank_slices import step_count
from meshwire.strict_json import canonical_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.plan.plan_spec import PlanSpec


class FieldOutput(msgspec.Struct, frozen=True):
    """The form in which a field is delivered. `shape`: of one row; None for a ragged field, which has `ndim`
    dimensions."""

    dtype: str
    shape: tuple[int, ...] | None
    ndim: int = 1

    def describe(self) -> dict[str, Any]:
        """Returns the form that the protocol uses: {"dtype", "shape"} or {"dtype", "ragged": true}."""
        if self.shape is None:
            return {"dtype": self.dtype, "ragged": True}
        return {"dtype": self.dtype, "shape": list(self.shape)}


class MixColumns(msgspec.Struct, frozen=True):
    """The columns that mixing adds to a frame. `outputs`: columns that transform processes write after the
    fields; `weight`: the one with the share of a row's own sample; `class_labels`: labels that are also
    delivered for the partner row."""

    weight: str
    outputs: Mapping[str, FieldOutput]
    class_labels: tuple[str, ...]

    @property
    def others(self) -> dict[str, str]:
        """Maps the column of the partner's value to its class label."""
        return {f"{label}.other": label for label in self.class_labels}


@dataclass(frozen=True)
class Plan:
    """A registered plan. `outputs`: the bytes fields in order of name; label fields are int64 scalars and
    need no op. `bucket`, `samples`: those of the snapshot, so that requests can be admitted without loading
    it. `assets`: the sha256 of what the ops are built with. `pairs`: set if rows are mixed. `others`: further
    buckets of a joined snapshot. `within`: for a packed plan, the plan that renders its samples; `samples`
    then counts its rows. `positions`: those of an epoch, equal to `samples` unless a mix sets them."""

    hash: str
    snapshot: str
    bucket: str
    samples: int
    spec: PlanSpec
    outputs: Mapping[str, FieldOutput]
    assets: tuple[str, ...] = ()
    pairs: MixColumns | None = None
    others: tuple[str, ...] = ()
    within: str = ""

    @property
    def buckets(self) -> tuple[str, ...]:
        """Every bucket that holds samples."""
        return (self.bucket, *self.others)

    @property
    def positions(self) -> int:
        return self.samples if self.spec.mix is None else self.spec.mix.positions or self.samples

    def step_count(self, batch: int, origin: int = 0) -> int:
        """Return the steps of an epoch in batches of `batch` rows, from position `origin` on. Raises
        PlanError."""
        return step_count(self.positions, batch, origin, self.spec.tail)

    @cached_property
    def program_text(self) -> str:
        """The text that a transform process compiles."""
        document = {"spec": spec_document(self.spec), "fields": sorted(self.outputs)}
        if self.pairs is not None:
            document["labels"] = list(self.pairs.class_labels)
        return canonical_json(document).decode()

    @property
    def columns(self) -> dict[str, FieldOutput]:
        """All columns that transform processes write, in order: the fields, then those that mixing adds."""
        return dict(self.outputs) | dict(self.pairs.outputs if self.pairs is not None else {})

    def describe(self) -> dict[str, Any]:
        """Returns the reply to `GET /-/plans/{hash}`."""
        return {"plan": self.hash, "snapshot": self.snapshot, "spec": spec_document(self.spec)}

    def to_bytes(self) -> bytes:
        document: dict[str, Any] = {
            "snapshot": self.snapshot,
            "bucket": self.bucket,
            "samples": self.samples,
            "spec": spec_document(self.spec),
            "outputs": _documents(self.outputs),
            "assets": list(self.assets),
            "others": list(self.others),
            "within": self.within,
        }
        if self.pairs is not None:
            pairs = self.pairs
            document["pairs"] = {
                "weight": pairs.weight,
                "outputs": _documents(pairs.outputs),
                "class_labels": list(pairs.class_labels),
            }
        return canonical_json(document)

    @classmethod
    def from_bytes(cls, digest: str, document: bytes) -> Plan:
        """Decodes a plan document that a node wrote."""
        value = json.loads(document)
        outputs, spec = _outputs(value["outputs"]), parse_spec(value["spec"])
        assets, mixed = tuple(value.get("assets", ())), value.get("pairs")
        pairs = None
        if mixed is not None:
            pairs = MixColumns(mixed["weight"], _outputs(mixed["outputs"]), tuple(mixed["class_labels"]))
        others = tuple(value.get("others", ()))
        place = value["snapshot"], value["bucket"], value["samples"]
        return cls(digest, *place, spec, outputs, assets, pairs, others, value.get("within", ""))


def _documents(outputs: Mapping[str, FieldOutput]) -> dict[str, Any]:
    return {
        name: {"dtype": output.dtype, "shape": output.shape, "ndim": output.ndim}
        for name, output in outputs.items()
    }


def _outputs(documents: Mapping[str, Any]) -> dict[str, FieldOutput]:
    return {
        name: FieldOutput(
            item["dtype"], None if item["shape"] is None else tuple(item["shape"]), item["ndim"]
        )
        for name, item in sorted(documents.items())
    }
