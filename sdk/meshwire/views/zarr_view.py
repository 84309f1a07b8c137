"""Views of kind `zarr`: a bucket's samples as one Zarr v3 group, one array per field; metadata and keys.

Law: the document states everything the arrays depend on besides the source. Sample i is row i of every
array, in order of the samples' names; no row is repeated or omitted.
Law: as in the Zarr v3 core specification: a regular chunk grid, default key encoding, little-endian bytes
without compression, `sharding_indexed` with the index at the end, and consolidated metadata in
zarr-python's inline form. Every chunk is whole: rows beyond the last sample hold the fill value 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from meshwire.checksums.crc import crc32c
from meshwire.dataset.fields import fields_document, parse_fields
from meshwire.plan.plan_spec import PlanSpec, parse_spec, spec_document
from meshwire.plan.shuffle import ShuffleSpec
from meshwire.strict_json import (
    MAX_INTEGER,
    PlanError,
    canonical_json,
    checked_choice,
    checked_hash,
    checked_integer,
    checked_number,
    checked_object,
    required_field,
)
from meshwire.views.numbered_keys import KeyLevel, NumberedKeys
from meshwire.views.view_fields import checked_also, checked_prefix, checked_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshwire.dataset.fields import FieldSpec
    from meshwire.plan.plan_spec import OpSpec


METADATA = "zarr.json"
SAMPLE = "sample"
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_ENTRY = 16  # bytes per entry of a shard's index: offset and length
_CRC = 4
_MISSING = (1 << 64) - 1


def is_zarr_dtype(dtype: str) -> bool:
    """Whether Zarr's core specification has the type."""
    return dtype in _DTYPES


@dataclass(frozen=True)
class ZarrArray:
    """An array of `samples` rows of shape `row`; `chunk` rows per chunk, `shard` chunks per stored object
    (0: each chunk is one object). `dimensions`: names of the row's dimensions."""

    name: str
    dtype: str
    row: tuple[int, ...]
    samples: int
    chunk: int
    shard: int = 0
    dimensions: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row) * np.dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        return self.chunk * self.row_bytes

    @property
    def chunks(self) -> int:
        return -(-self.samples // self.chunk)

    @property
    def objects(self) -> int:
        """Number of stored objects."""
        return -(-self.chunks // max(1, self.shard))

    @property
    def keys(self) -> NumberedKeys:
        """Keys of the stored objects, one number each."""
        return NumberedKeys((KeyLevel(f"{self.name}/c/", self.objects),), "/0" * len(self.row))

    def held(self, number: int) -> range:
        """Return the chunks of a stored object."""
        each = max(1, self.shard)
        return range(number * each, min((number + 1) * each, self.chunks))

    def rows(self, chunk: int) -> range:
        """Return the samples of a chunk; the last chunk may have fewer than `chunk`."""
        return range(chunk * self.chunk, min((chunk + 1) * self.chunk, self.samples))

    def object_bytes(self, number: int) -> int:
        """Return the size of a stored object."""
        whole = len(self.held(number)) * self.chunk_bytes
        return whole + self.shard * _ENTRY + _CRC if self.shard else whole

    def index(self, number: int) -> bytes:
        """Return the index at the end of a shard with the positions of its chunks; empty without shards."""
        if not self.shard:
            return b""
        entries = np.full((self.shard, 2), _MISSING, dtype="<u8")
        count = len(self.held(number))
        entries[:count, 0] = np.arange(count, dtype=np.uint64) * self.chunk_bytes
        entries[:count, 1] = self.chunk_bytes
        data: bytes = entries.tobytes()
        crc: int = crc32c(data)
        return data + crc.to_bytes(_CRC, "little")

    def document(self) -> dict[str, Any]:
        """Return the array's metadata."""
        inner = [self.chunk, *self.row]
        outer = [self.chunk * max(1, self.shard), *self.row]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [self.samples, *self.row],
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if self.dtype == "bool" else 0,
            "codecs": [_sharding(inner)] if self.shard else [_BYTES],
            "attributes": dict(self.attributes),
            "dimension_names": [SAMPLE, *self.dimensions],
            "storage_transformers": [],
        }


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def _sharding(inner: Sequence[int]) -> dict[str, Any]:
    configuration = {
        "chunk_shape": list(inner),
        "codecs": [_BYTES],
        "index_codecs": [_BYTES, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {"name": "sharding_indexed", "configuration": configuration}


def metadata_objects(arrays: Sequence[ZarrArray], attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return every `zarr.json` of a group of these arrays, by key."""
    documents = {array.name: array.document() for array in arrays}
    group = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": dict(attributes),
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": documents},
    }
    found = {f"{name}/{METADATA}": canonical_json(document) for name, document in documents.items()}
    return found | {METADATA: canonical_json(group)}


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
    """Samples under `prefix` (a folder) with these `fields`, passed through `ops`: those of `snapshot` (a
    hash; with the snapshot's fields), or with `follow` those that exist when the view is read.

    `chunk`: samples per chunk; `shard`: chunks per shard (`sharding_indexed`), 0 for none. `on_bad`:
    whether a bad sample fails its chunk or becomes a row of zeros, marked in the array `FIELD_status`.
    `also`: further buckets that contain the snapshot's samples.
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
        """Encode the canonical document."""
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
        """The source as a dataset URL."""
        return f"s3://{self.source}/{self.prefix}"

    @property
    def plan(self) -> PlanSpec:
        """The ops as a plan in stored order."""
        return PlanSpec(
            self.ops, self.seed, ShuffleSpec("none"), "ragged", on_bad=self.on_bad, max_bad=self.max_bad
        )


def status_name(field: str) -> str:
    """Return the name of the array that marks the bad rows of a field."""
    return field + _STATUS


def parse_zarr(value: Mapping[str, Any], bucket: str) -> ZarrView:
    """Parse a document. Raises PlanError with the path of the bad field."""
    known = ("kind", "source", "prefix", "samples", "fields", "snapshot", "follow", "ops", "chunk", "shard")
    document = checked_object(dict(value), "", (*known, "seed", "on_bad", "max_bad", "also"))
    snapshot, follow = _parse_pin(document)
    fields = document.get("fields", {}) if snapshot else required_field(document, "fields", "")
    if not isinstance(fields, dict):
        raise PlanError("fields", 'expected an object such as {"image": {"ext": ["jpg"]}}')
    specs = parse_fields(fields) if fields or not snapshot else {}
    prefix = checked_prefix(document)
    if prefix and not prefix.endswith("/"):
        raise PlanError("prefix", f"a folder must end in a slash: {prefix + '/'!r}")
    chunk = checked_integer(document.get("chunk", _CHUNK), "chunk", 1, MAX_CHUNK)
    shard = checked_integer(document.get("shard", 0), "shard", 0, MAX_SHARD)
    if chunk * shard > MAX_SHARD_SAMPLES:
        raise PlanError(
            "shard", f"{chunk * shard} samples per shard; at most {MAX_SHARD_SAMPLES} are allowed"
        )
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
    """Parse the pin as (snapshot, follow)."""
    follow = document.get("follow", False)
    if not isinstance(follow, bool):
        raise PlanError("follow", "expected true or false")
    snapshot = document.get("snapshot", "")
    if snapshot != "":
        checked_hash(snapshot, "snapshot")
    if follow and snapshot:
        raise PlanError("follow", "a snapshot does not change; leave out follow or snapshot")
    return snapshot, follow
