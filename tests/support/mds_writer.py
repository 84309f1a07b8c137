"""Writes MDS datasets as mosaicml-streaming does, for tests and examples.

Law: shares nothing with the reader.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FIXED: Final = {"int": 8, "int64": 8, "float64": 8, "int32": 4, "float32": 4, "uint16": 2, "uint8": 1}
"""Encodings with a length of their own, in bytes."""


def mds_files(
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, bytes]],
    *,
    shard: int = 100,
    packing: tuple[str, Callable[[bytes], bytes]] | None = None,
) -> dict[str, bytes]:
    """The files of a dataset by name: `columns` are encodings, of rows already encoded; so many rows a
    shard. `packing`: an ending, as "zstd", and what compresses so; without it shards are plain."""
    names = sorted(columns)
    described = {
        "column_encodings": [columns[name] for name in names],
        "column_names": names,
        "column_sizes": [FIXED.get(columns[name]) for name in names],
        "compression": None,
        "format": "mds",
        "hashes": [],
        "size_limit": 1 << 26,
        "version": 2,
    }
    files, shards = {}, []
    for number, start in enumerate(range(0, len(rows), shard)):
        name = f"shard.{number:05}.mds"
        some = rows[start : start + shard]
        data = _shard(json.dumps(described).encode(), names, columns, some)
        raw, packed = {"basename": name, "bytes": len(data), "hashes": {}}, None
        if packing is not None:
            name, data = f"{name}.{packing[0]}", packing[1](data)
            packed = {"basename": name, "bytes": len(data), "hashes": {}}
        files[name] = data
        shards.append({**described, "raw_data": raw, "samples": len(some), "zip_data": packed})
    return files | {"index.json": json.dumps({"version": 2, "shards": shards}).encode()}


def _shard(
    described: bytes, names: Sequence[str], columns: Mapping[str, str], rows: Sequence[Mapping[str, bytes]]
) -> bytes:
    samples = []
    for row in rows:
        values = [row[name] for name in names]
        sizes = [len(row[name]) for name in names if columns[name] not in FIXED]
        samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values))
    at = 4 * (len(rows) + 2) + len(described)
    bounds = [at]
    for sample in samples:
        at += len(sample)
        bounds.append(at)
    head = struct.pack(f"<{len(bounds) + 1}I", len(rows), *bounds)
    return head + described + b"".join(samples)
