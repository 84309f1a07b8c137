"""Views of kind `zarr`: a bucket's samples as one Zarr v3 group, an array a field.

Law: the document says all that the arrays depend on besides the source. Sample i is row i of every array, in
order of the samples' names; rows are neither drawn twice nor left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from meshwire.documents import (
    MAX_INTEGER,
    PlanError,
    canonical_json,
    checked_choice,
    checked_integer,
    checked_number,
    checked_object,
    required,
)
from meshwire.fields import fields_document, parse_fields
from meshwire.loaderstate import checked_hash
from meshwire.plans import PlanSpec, ShuffleSpec, parse_spec, spec_document
from meshwire.viewfields import checked_also, checked_prefix, checked_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.fields import FieldSpec
    from meshwire.plans import OpSpec

Samples = Literal["auto", "objects", "tar", "lines", "zarr"]
SAMPLES: tuple[Samples, ...] = ("auto", "objects", "tar", "lines", "zarr")
OnBad = Literal["raise", "mask"]
MAX_CHUNK = 1 << 14
MAX_SHARD = 1 << 12
MAX_SHARD_SAMPLES = 1 << 20
_CHUNK = 64
_STATUS = "_status"


@dataclass(frozen=True)
class ZarrView:
    """Samples under `prefix` (a folder) with these `fields`, through `ops`: those of `snapshot` (a hash; its
    own fields), or with `follow` those that are there when the view is read.

    `chunk`: samples of a chunk; `shard`: chunks of a shard (`sharding_indexed`), 0 for none. `on_bad`:
    whether a bad sample fails its chunk or is a row of zeros, marked in the array `FIELD_status`. `also`:
    further buckets that the snapshot's samples lie in.
    """

    source: str
    fields: tuple[FieldSpec, ...] = ()
    ops: tuple[OpSpec, ...] = ()
    snapshot: str = ""
    follow: bool = False
    prefix: str = ""
    samples: Samples = "auto"
    chunk: int = _CHUNK
    shard: int = 0
    seed: int = 0
    on_bad: OnBad = "raise"
    max_bad: float = 0.01
    also: tuple[str, ...] = ()
    kind: Literal["zarr"] = "zarr"

    def to_json(self) -> bytes:
        """The canonical document."""
        return canonical_json(
            {
                "kind": self.kind,
                "source": self.source,
                "prefix": self.prefix,
                "samples": self.samples,
                "fields": fields_document(self.specs),
                "snapshot": self.snapshot,
                "follow": self.follow,
                "ops": spec_document(PlanSpec(ops=self.ops))["ops"],
                "chunk": self.chunk,
                "shard": self.shard,
                "seed": self.seed,
                "on_bad": self.on_bad,
                "max_bad": self.max_bad,
                "also": list(self.also),
            }
        )

    @property
    def specs(self) -> dict[str, FieldSpec]:
        """The fields by name."""
        return {field.name: field for field in self.fields}

    @property
    def url(self) -> str:
        """The source as a dataset's."""
        return f"s3://{self.source}/{self.prefix}"

    @property
    def plan(self) -> PlanSpec:
        """The ops as a plan in stored order."""
        return PlanSpec(
            self.ops, self.seed, ShuffleSpec("none"), "ragged", on_bad=self.on_bad, max_bad=self.max_bad
        )


def status_name(field: str) -> str:
    """The array that says which rows of a field are bad."""
    return field + _STATUS


def parse_zarr(value: Mapping[str, Any], bucket: str) -> ZarrView:
    """Raises PlanError with the path of the bad field."""
    known = ("kind", "source", "prefix", "samples", "fields", "snapshot", "follow", "ops", "chunk", "shard")
    document = checked_object(dict(value), "", (*known, "seed", "on_bad", "max_bad", "also"))
    snapshot, follow = _parse_pin(document)
    fields = document.get("fields", {}) if snapshot else required(document, "fields", "")
    if not isinstance(fields, dict):
        raise PlanError("fields", 'expected an object, as {"image": {"ext": ["jpg"]}}')
    specs = parse_fields(fields) if fields or not snapshot else {}
    prefix = checked_prefix(document)
    if prefix and not prefix.endswith("/"):
        raise PlanError("prefix", f"a folder ends in a slash: {prefix + '/'!r}")
    chunk = checked_integer(document.get("chunk", _CHUNK), "chunk", 1, MAX_CHUNK)
    shard = checked_integer(document.get("shard", 0), "shard", 0, MAX_SHARD)
    if chunk * shard > MAX_SHARD_SAMPLES:
        raise PlanError("shard", f"{chunk * shard} samples a shard; at most {MAX_SHARD_SAMPLES}")
    return ZarrView(
        checked_source(document, bucket),
        tuple(specs.values()),
        parse_spec({"ops": document.get("ops", [])}).ops,
        snapshot,
        follow,
        prefix,
        cast("Samples", checked_choice(document.get("samples", "auto"), "samples", SAMPLES)),
        chunk,
        shard,
        checked_integer(document.get("seed", 0), "seed", 0, MAX_INTEGER),
        cast("OnBad", checked_choice(document.get("on_bad", "raise"), "on_bad", ("raise", "mask"))),
        checked_number(document.get("max_bad", 0.01), "max_bad", 0.0, 1.0),
        checked_also(document),
    )


def _parse_pin(document: Mapping[str, Any]) -> tuple[str, bool]:
    """(snapshot, follow)"""
    follow = document.get("follow", False)
    if not isinstance(follow, bool):
        raise PlanError("follow", "expected true or false")
    snapshot = document.get("snapshot", "")
    if snapshot != "":
        checked_hash(snapshot, "snapshot")
    if follow and snapshot:
        raise PlanError("follow", "a snapshot does not change; leave one of the two out")
    return snapshot, follow
