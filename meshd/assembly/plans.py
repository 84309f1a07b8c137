"""A registered plan as the node keeps it: spec, snapshot, and what its rows are made of.

Invariant: everything follows from (snapshot, spec); `outputs` is kept so that a layout needs no compiler.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from meshwire.documents import canonical_json
from meshwire.plans import parse_spec, spec_document

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.plans import PlanSpec


@dataclass(frozen=True, slots=True)
class Output:
    """What a field is delivered as. `shape`: of one row; None for a ragged field, `ndim` its dimensions
    then.
    """

    dtype: str
    shape: tuple[int, ...] | None
    ndim: int = 1

    def describe(self) -> dict[str, Any]:
        """As the protocol says it: {"dtype", "shape"} or {"dtype", "ragged": true}."""
        if self.shape is None:
            return {"dtype": self.dtype, "ragged": True}
        return {"dtype": self.dtype, "shape": list(self.shape)}


@dataclass(frozen=True)
class Plan:
    """`outputs`: of the bytes fields, by name in order. Label fields are int64 scalars and need no op.
    `bucket`, `samples`: of the snapshot, so that requests are admitted without loading it. `assets`: sha256
    of what the ops are built with.
    """

    hash: str
    snapshot: str
    bucket: str
    samples: int
    spec: PlanSpec
    outputs: Mapping[str, Output]
    assets: tuple[str, ...] = ()

    @cached_property
    def program_text(self) -> str:
        """What a transform process compiles."""
        return canonical_json({"spec": spec_document(self.spec), "fields": sorted(self.outputs)}).decode()

    def describe(self) -> dict[str, Any]:
        """What `GET /-/plans/{hash}` answers."""
        return {"plan": self.hash, "snapshot": self.snapshot, "spec": spec_document(self.spec)}

    def to_bytes(self) -> bytes:
        outputs = {
            name: {"dtype": output.dtype, "shape": output.shape, "ndim": output.ndim}
            for name, output in self.outputs.items()
        }
        return canonical_json(
            {
                "snapshot": self.snapshot,
                "bucket": self.bucket,
                "samples": self.samples,
                "spec": spec_document(self.spec),
                "outputs": outputs,
                "assets": list(self.assets),
            }
        )

    @classmethod
    def from_bytes(cls, digest: str, document: bytes) -> Plan:
        """The plan of a document this node wrote."""
        value = json.loads(document)
        outputs = {
            name: Output(item["dtype"], None if item["shape"] is None else tuple(item["shape"]), item["ndim"])
            for name, item in sorted(value["outputs"].items())
        }
        spec = parse_spec(value["spec"])
        assets = tuple(value.get("assets", ()))
        return cls(digest, value["snapshot"], value["bucket"], value["samples"], spec, outputs, assets)
