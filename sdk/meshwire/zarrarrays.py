"""Zarr v3 arrays of samples: their metadata, their keys, and how large each stored object is.

Law: as the Zarr v3 core specification has it: a regular chunk grid, the default chunk key encoding, little
endian bytes without compression; `sharding_indexed` with its index at the end. Every chunk is whole: rows
beyond the last sample are the fill value, 0. Consolidated metadata is zarr-python's inline form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.crcs import crc32c
from meshwire.documents import canonical_json
from meshwire.numbered import Level, Numbered

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

METADATA = "zarr.json"
SAMPLE = "sample"
_DTYPES = frozenset(
    ["bool", "float16", "float32", "float64"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
_ENTRY = 16  # of a shard's index: offset and length
_CRC = 4
_MISSING = (1 << 64) - 1


def carried(dtype: str) -> bool:
    """Whether Zarr's core has the type."""
    return dtype in _DTYPES


@dataclass(frozen=True)
class ZarrArray:
    """`samples` rows of shape `row`; `chunk` rows a chunk, `shard` chunks a stored object (0: each chunk is
    one). `dimensions`: names of the row's."""

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
        """Stored objects."""
        return -(-self.chunks // max(1, self.shard))

    @property
    def keys(self) -> Numbered:
        """Of the stored objects, one number each."""
        return Numbered((Level(f"{self.name}/c/", self.objects),), "/0" * len(self.row))

    def held(self, number: int) -> range:
        """The chunks a stored object holds."""
        each = max(1, self.shard)
        return range(number * each, min((number + 1) * each, self.chunks))

    def rows(self, chunk: int) -> range:
        """The samples of a chunk; the last may have fewer than `chunk`."""
        return range(chunk * self.chunk, min((chunk + 1) * self.chunk, self.samples))

    def object_bytes(self, number: int) -> int:
        """The size of a stored object."""
        whole = len(self.held(number)) * self.chunk_bytes
        return whole + self.shard * _ENTRY + _CRC if self.shard else whole

    def index(self, number: int) -> bytes:
        """What ends a shard: where its chunks lie; empty without shards."""
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
        """The array's metadata."""
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
    """Every `zarr.json` of a group of these arrays, by key."""
    documents = {array.name: array.document() for array in arrays}
    group = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": dict(attributes),
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": documents},
    }
    found = {f"{name}/{METADATA}": canonical_json(document) for name, document in documents.items()}
    return found | {METADATA: canonical_json(group)}
