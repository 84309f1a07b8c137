"""Hostile files of datasets against a real daemon: refused by name or read right, within bounds, and other
clients are served meanwhile. `pytest -s` prints what each costs."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from meshd.core.api_errors import BatchError
from meshd.datasets.snapshot_capacity import FIELD_BYTES, SAMPLE_BYTES, SnapshotCapacity
from meshwire.checksums.crc import crc32c
from meshwire.formats.shard_encoding import masked_crc
from tests.support.archive_files import zstd
from tests.support.attack_costs import costs
from tests.support.daemons import Daemon
from tests.support.mds_writer import mds_files
from tests.support.required import required_module
from tests.unit.datasets.test_zarr_sources import document, grid, sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.daemons import Answer

MIB = 1 << 20
NO_CHECKSUM: dict[str, Any] = {"index_codecs": [{"name": "bytes"}]}
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    """Its own limits of lines, records and shards are looked for, not that of archives, which is lower."""
    with Daemon.start(args=("--view-cache", "300MiB", "--archive-ratio", "1000000")) as running:
        running.request("PUT", "/box")
        yield running
        assert "Traceback" not in running.output()


def snapshot(
    node: Daemon, name: str, kind: str, fields: Any, files: Files, memory: int, cpu: float
) -> Answer:
    """What the node says of these files; `memory` in MiB and `cpu` in seconds bound what that costs it."""
    for key, data in files.items():
        assert node.request("PUT", f"/box/{name}/{key}", data).status == 200
    asked: dict[str, Any] = {"source": f"s3://box/{name}/", "kind": kind}
    body = json.dumps(asked | ({"fields": fields} if fields else {})).encode()
    workers = node.children()
    with costs(node, f"{name} ({sum(map(len, files.values()))} bytes)") as cost:
        answer = node.request("POST", "/-/snapshots", body)
        while b'"Busy"' in answer.body:
            answer = node.request("POST", "/-/snapshots", body)
    assert answer.status in (200, 400, 404, 413, 422), answer
    assert len(answer.body) < 2000
    assert node.children() == workers
    assert cost.memory < memory
    assert cost.cpu < cpu
    return answer


# --- Zarr -------------------------------------------------------------------------------------------------


def zarr(**changes: Any) -> bytes:
    plain = {"shape": [10], "data_type": "uint8", "chunk_grid": grid(1)}
    return json.dumps(document(**(plain | changes))).encode()


def overlapping() -> Files:
    """32 KiB that would be 16 million rows: every piece of the shard is the same bytes."""
    pieces, inner = 1 << 10, 1 << 14
    index = struct.pack("<QQ", 0, inner) * pieces
    rows = pieces * inner
    meta = zarr(shape=[rows], chunk_grid=grid(rows), codecs=sharded([inner], **NO_CHECKSUM))
    return {"zarr.json": meta, "c/0": bytes(inner) + index}


def missing() -> Files:
    """Sixteen bytes that say of 16 million rows that they are not there."""
    rows = 1 << 24
    meta = zarr(shape=[rows], chunk_grid=grid(rows), codecs=sharded([rows], **NO_CHECKSUM))
    return {"zarr.json": meta, "c/0": b"\xff" * 16}


def lying(index: bytes) -> Files:
    return {
        "zarr.json": zarr(shape=[2], chunk_grid=grid(2), codecs=sharded([1], **NO_CHECKSUM)),
        "c/0": b"abc" + index,
    }


LARGEST = (1 << 48) - 1
ZARR: dict[str, tuple[Callable[[], Files | bytes], str]] = {
    "no-object-of-4-million": (lambda: zarr(shape=[1 << 22]), "none of the"),
    "no-object-of-many-axes": (
        lambda: zarr(shape=[1 << 22, *[1] * 30], chunk_grid=grid(*[1] * 31)),
        "none of the",
    ),
    "axes-33": (lambda: zarr(shape=[1] * 33, chunk_grid=grid(*[1] * 33)), "32 axes"),
    "axes-60000": (lambda: zarr(shape=[2] * 60_000, chunk_grid=grid(*[1] * 60_000)), "32 axes"),
    "axes-whose-product-is-huge": (
        lambda: zarr(shape=[LARGEST] * 30_000, chunk_grid=grid(*[LARGEST] * 30_000)),
        "32 axes",
    ),
    "extent-2-to-63": (lambda: zarr(shape=[1 << 63]), "outside"),
    "extent-negative": (lambda: zarr(shape=[-1]), "of 0 or more"),
    "extent-true": (lambda: zarr(shape=[True]), "of 0 or more"),
    "extents-text": (lambda: zarr(shape="10"), "of 0 or more"),
    "chunks-of-nothing": (lambda: zarr(chunk_grid=grid(0)), "have no rows"),
    "python-objects": (lambda: zarr(data_type="object"), "no rows of numbers"),
    "pickles": (lambda: zarr(codecs=[{"name": "bytes"}, {"name": "numcodecs.pickle"}]), "is not supported"),
    "codecs-30000": (lambda: zarr(codecs=[{"name": "bytes"}, *[{"name": "gzip"}] * 30_000]), "30001 codecs"),
    "attributes-deep": (lambda: b'{"attributes":' + b"[" * 400_000, "not a JSON document"),
    "attributes-many": (lambda: zarr(attributes={"a": [0] * (1 << 18)}), "values"),
    "fill-nan": (lambda: zarr(fill_value=float("nan")), "NaN"),
    "keys-dot-dot": (
        lambda: zarr(chunk_key_encoding={"name": "default", "configuration": {"separator": "../"}}),
        "unknown kind",
    ),
    "version-2": (lambda: zarr(zarr_format=2), "Zarr v3"),
    "a-group": (lambda: zarr(node_type="group"), "Zarr v3"),
    "nothing": (lambda: b"null", "not the metadata"),
    "utf-16": (lambda: "{}".encode("utf-16"), "JSON document|not the metadata"),
    "pieces-overlap": (overlapping, "overlap"),
    "pieces-missing": (missing, "none of the"),
    "piece-beyond": (lambda: lying(struct.pack("<4Q", 0, 1, 1 << 62, 1 << 62)), "beyond its end"),
    "piece-overflows": (lambda: lying(struct.pack("<4Q", 0, 1, (1 << 64) - 2, 4)), "beyond its end"),
    "index-cut": (lambda: lying(b"\xff" * 20), "too small for its index"),
}


@pytest.mark.parametrize("chunks", [False, True], ids=["rows", "chunks"])
@pytest.mark.parametrize("name", ZARR)
def test_arrays_that_lie(node: Daemon, name: str, chunks: bool) -> None:
    make, complaint = ZARR[name]
    made = make()
    files = made if isinstance(made, dict) else {"zarr.json": made}
    field = {"array": "", "chunks": True} if chunks else {"array": ""}
    answer = snapshot(node, f"{name}-{chunks:d}", "zarr", {"x": field}, files, memory=150, cpu=2.5)
    assert answer.status != 200
    assert any(each in answer.body.decode() for each in complaint.split("|")), answer


# --- files of lines and records ---------------------------------------------------------------------------


def packed(megabytes: int, piece: bytes) -> bytes:
    """That many MiB of this, packed by gzip."""
    packing = zlib.compressobj(9, wbits=31)
    whole = piece * (MIB // len(piece))
    return b"".join(packing.compress(whole) for _ in range(megabytes)) + packing.flush()


def record(data: bytes) -> bytes:
    size = struct.pack("<Q", len(data))
    return size + masked_crc(crc32c(size)) + data + masked_crc(crc32c(data))


def size_of(length: int) -> bytes:
    size = struct.pack("<Q", length)
    return size + masked_crc(crc32c(size))


WIDE_TEXT = b"\xfe\xff" + "a\nb\n".encode("utf-16-be")
FILES: dict[str, tuple[str, Callable[[], Files], str, int]] = {
    "blank-lines": ("lines", lambda: {"a.jsonl.gz": packed(16, b"\n")}, "no line of text", 60),
    "utf-16": ("lines", lambda: {"a.jsonl": "a\nb\n".encode("utf-16")}, "mark says UTF-16", 60),
    "utf-16-gz": ("lines", lambda: {"a.jsonl.gz": gzip.compress(WIDE_TEXT)}, "mark says UTF-16", 60),
    "utf-32": ("lines", lambda: {"a.jsonl": "a\nb\n".encode("utf-32")}, "mark says UTF-32", 60),
    "line-without-end": ("lines", lambda: {"a.jsonl.gz": packed(80, b"a" * 64)}, "line 1 has more", 60),
    "record-of-2-to-63": ("tfrecord", lambda: {"a.tfrecord": size_of(1 << 63)}, "at most 134217728", 50),
    "record-cut": ("tfrecord", lambda: {"a.tfrecord": size_of(127 << 20) + b"x"}, "is truncated", 50),
    "records-of-zeros": ("tfrecord", lambda: {"a.tfrecord.gz": packed(16, bytes(64))}, "a length", 100),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_grow(node: Daemon, name: str) -> None:
    kind, make, complaint, memory = FILES[name]
    fields = {"x": {"ext": ["jsonl"]} if kind == "lines" else {"feature": ""}}
    answer = snapshot(node, name, kind, fields, make(), memory=memory, cpu=30.0)
    assert answer.status != 200
    assert complaint in answer.body.decode(), answer


# --- MDS and Parquet --------------------------------------------------------------------------------------

GOOD = mds_files({"label": "int", "text": "str"}, [{"label": bytes(8), "text": b"x" * n} for n in range(20)])
SHARD = GOOD["shard.00000.mds"]


def mds(shard: bytes = SHARD, basename: str = "shard.00000.mds", **changes: Any) -> Files:
    index = json.loads(GOOD["index.json"])
    index["shards"][0] |= changes
    index["shards"][0]["raw_data"] |= {"basename": basename}
    return {"index.json": json.dumps(index).encode(), "shard.00000.mds": shard}


def bomb() -> Files:
    """150 MiB of zeros, packed by zstd."""
    files, packing = mds(), zstd.ZstdCompressor()
    data = b"".join(packing.compress(bytes(MIB)) for _ in range(150)) + packing.flush()
    index = json.loads(files["index.json"])
    index["shards"][0] |= {"compression": "zstd", "zip_data": {"basename": "s.zstd", "bytes": len(data)}}
    return {"index.json": json.dumps(index).encode(), "s.zstd": data}


WIDE = [f"c{number}" for number in range(1000)]
MDS: dict[str, tuple[Callable[[], Files], str]] = {
    "negative-size": (lambda: mds(raw_data={"bytes": -1}), "outside"),
    "negative-count": (lambda: mds(samples=-5), "outside"),
    "huge-count": (lambda: mds(samples=1 << 40), "outside"),
    "count-beyond-the-file": (lambda: mds(samples=1 << 25), "ends before the offsets"),
    "offset-beyond-the-file": (
        lambda: mds(SHARD[:4] + b"\xff" * 4 + SHARD[8:]),
        "out of order or extend beyond",
    ),
    "offsets-out-of-order": (
        lambda: mds(SHARD[:8] + SHARD[12:16] + SHARD[8:12] + SHARD[16:]),
        "out of order",
    ),
    "dot-dot": (lambda: mds(basename="../box/secret"), "does not exist"),
    "deep": (lambda: {"index.json": b'{"shards":' + b"[" * 300_000}, "not a JSON document"),
    "columns": (
        lambda: mds(column_names=WIDE, column_encodings=["int"] * 1000, column_sizes=[(1 << 32) - 1] * 1000),
        "no column",
    ),
    "zstd": (bomb, "decompressed, it has 157286400 bytes"),
}


@pytest.mark.parametrize("name", MDS)
def test_mds_that_lies(node: Daemon, name: str) -> None:
    make, complaint = MDS[name]
    fields = {"x": {"column": "label"}}
    answer = snapshot(node, f"mds-{name}", "mds", fields, make(), memory=100, cpu=5.0)
    assert answer.status != 200
    said = answer.body.decode()
    # A node with little memory free refuses so many samples before it looks whether they are there.
    too_many = name == "count-beyond-the-file" and '"code": "TooLarge"' in said
    assert complaint in said or too_many, answer


def footer(thrift: bytes) -> bytes:
    return b"PAR1" + thrift + struct.pack("<I", len(thrift)) + b"PAR1"


PARQUET = {
    "length-beyond-the-file": b"PAR1" + b"\xff" * 4 + b"PAR1",
    "encrypted": footer(b"\0" * 16)[:-4] + b"PARE",
    "recursion": footer(b"\x1c" * MIB),
    "list-of-2-to-31": footer(b"\x15\x02\x29\xfc\xff\xff\xff\xff\x07"),
}


@pytest.mark.parametrize("name", PARQUET)
def test_footers_that_lie(node: Daemon, name: str) -> None:
    required_module("pyarrow")
    files = {"a.parquet": PARQUET[name]}
    answer = snapshot(node, f"parquet-{name}", "parquet", None, files, memory=300, cpu=10.0)
    assert answer.status == 422
    assert "cannot be read as Parquet" in answer.body.decode(), answer


# --- memory -----------------------------------------------------------------------------------------------


def test_a_snapshot_takes_no_more_memory_than_is_free() -> None:
    """Copies of a file cost nothing; their samples do."""
    capacity = SnapshotCapacity(lambda: 2 * 1000 * (SAMPLE_BYTES + FIELD_BYTES))
    capacity.require_room(1000, 1, "s3://box/a/")
    with pytest.raises(BatchError, match=r"s3://box/a/ has at least 1001 samples") as caught:
        capacity.require_room(1001, 1, "s3://box/a/")
    assert caught.value.code == "TooLarge"
    SnapshotCapacity().require_room(1 << 40, 1, "")
