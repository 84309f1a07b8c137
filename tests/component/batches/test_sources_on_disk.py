"""Cold epochs of each kind of source: what reaches a rotational disk, counted below the file system."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

import meshsdk as mesh
from meshsdk import ops
from meshwire.formats.token_index import encode_token_index
from tests.component.batches.test_read_ahead_on_disk import Node
from tests.support.mds_writer import mds_files
from tests.support.rotational_disk import rotational_disk
from tests.support.tf_example_writer import BytesList, example, record
from tests.unit.transform.test_transform_texts import small_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.client.s3_client import Client
    from tests.support.rotational_disk import RotationalDisk

FILES, ROWS, SIZE = 6, 120, 12 << 10
BATCH, TRIES = 32, 3
ORDERS: dict[str, Any] = {"blocks": mesh.Blocks(shards=2), "global": True, "stored": False}


def row(number: int) -> bytes:
    """Of about SIZE bytes, an even number."""
    return random.Random(number).randbytes(SIZE - 2 * random.Random(-number).randrange(2048))


def rows_of(file: int) -> list[bytes]:
    return [row(number) for number in range(file * ROWS, (file + 1) * ROWS)]


def put_tables(client: Client) -> None:
    for file in range(FILES):
        out = io.BytesIO()
        table = pa.table({"x": pa.array(rows_of(file), pa.binary()), "n": np.arange(ROWS)})
        pq.write_table(table, out, row_group_size=ROWS // 4, compression="none")
        client.put("table", f"v1/{file}.parquet", out.getvalue())


def put_lines(client: Client) -> None:
    client.put("lines", "tokenizer.json", small_tokenizer())
    for file in range(FILES):
        lines = "\n".join(json.dumps({"text": each[: SIZE // 6].hex()}) for each in rows_of(file))
        client.put("lines", f"v1/{file}.jsonl", lines.encode())


def put_tokens(client: Client) -> None:
    for file in range(FILES):
        rows = rows_of(file)
        client.put("tokens", f"v1/{file}.bin", b"".join(rows))
        lengths = np.array([len(each) // 2 for each in rows])
        client.put("tokens", f"v1/{file}.idx", encode_token_index(lengths, "uint16"))


def put_records(client: Client) -> None:
    for file in range(FILES):
        records = b"".join(record(example({"x": BytesList([each])})) for each in rows_of(file))
        client.put("tfrecord", f"v1/train-{file:05}-of-{FILES:05}", records)


def put_mds(client: Client) -> None:
    rows = [
        {"x": each, "n": struct.pack("<q", number)}
        for number, each in enumerate(sum(map(rows_of, range(FILES)), list[bytes]()))
    ]
    for name, data in mds_files({"x": "bytes", "n": "int"}, rows, shard=ROWS).items():
        client.put("mds", f"v1/{name}", data)


def put_zarr(client: Client) -> None:
    stored: dict[str, Any] = {}
    group = zarr.open_group(zarr.storage.MemoryStore(stored), mode="w", zarr_format=3)
    values = np.random.default_rng(2).random((FILES * ROWS, SIZE // 4), np.float32)
    for name, how in (
        ("chunks", {"chunks": (4, 768)}),
        ("shards", {"chunks": (1, 3072), "shards": (72, 3072)}),
    ):
        made = group.create_array(name, shape=values.shape, dtype="f4", dimension_names=("time", "x"), **how)
        made[:] = values
    for key, value in stored.items():
        client.put("zarr", f"v1/{key}", value.to_bytes())


@dataclass(frozen=True)
class Source:
    """`put` writes it into the bucket `bucket`, `open` opens it."""

    bucket: str
    put: Callable[[Client], None]
    open: Callable[[Client], mesh.Dataset]


def packed_lines(client: Client) -> mesh.Dataset:
    lines = mesh.open("s3://lines/v1", {"text": "jsonl"}, kind="lines", client=client)
    lines = lines.map(ops.json("text", "text"), ops.tokenize("text", "s3://lines/tokenizer.json"))
    return lines.pack("text", length=2048)


SOURCES = {
    "table": Source("table", put_tables, lambda c: mesh.open("s3://table/v1", kind="table", client=c)),
    "columns": Source(
        "table", put_tables, lambda c: mesh.open("s3://table/v1", kind="table", columns=["x"], client=c)
    ),
    "lines": Source(
        "lines", put_lines, lambda c: mesh.open("s3://lines/v1", {"x": "jsonl"}, kind="lines", client=c)
    ),
    "packed lines": Source("lines", put_lines, packed_lines),
    "tokens": Source("tokens", put_tokens, lambda c: mesh.open("s3://tokens/v1", kind="tokens", client=c)),
    "packed tokens": Source(
        "tokens",
        put_tokens,
        lambda c: mesh.open("s3://tokens/v1", kind="tokens", client=c).pack("tokens", length=4096),
    ),
    "records": Source(
        "tfrecord",
        put_records,
        lambda c: mesh.open("s3://tfrecord/v1", {"x": "x"}, kind="tfrecord", client=c),
    ),
    "mds": Source("mds", put_mds, lambda c: mesh.open("s3://mds/v1", {"x": "x"}, kind="mds", client=c)),
    "zarr rows": Source(
        "zarr",
        put_zarr,
        lambda c: mesh.open("s3://zarr/v1", {"x": "shards"}, kind="zarr", client=c).map(
            ops.zarr("x", "s3://zarr/v1/shards/zarr.json")
        ),
    ),
    "zarr windows": Source(
        "zarr", put_zarr, lambda c: mesh.open_zarr("s3://zarr/v1", ["chunks"], window={"time": 6}, client=c)
    ),
    "zarr windows of shards": Source(
        "zarr", put_zarr, lambda c: mesh.open_zarr("s3://zarr/v1", ["shards"], window={"time": 4}, client=c)
    ),
}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RotationalDisk]:
    with rotational_disk(tmp_path_factory.mktemp("drive")) as made:
        yield made


@pytest.fixture(scope="module")
def node(disk: RotationalDisk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(disk, tmp_path_factory.mktemp("node"), "--read-ahead", "64MiB")
    with contextlib.closing(made.daemon):
        yield made


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[Client]:
    daemon = node.daemon
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        for bucket, put in {each.bucket: each.put for each in SOURCES.values()}.items():
            client.create_bucket(bucket)
            put(client)
        yield client


def delivered(dataset: mesh.Dataset, order: str, seed: int, begin: Callable[[], None]) -> int:
    """Read an epoch, and return the number of its rows; `begin` is called before the first request."""
    options: dict[str, Any] = {"shuffle": ORDERS[order], "output": "numpy"}
    with mesh.Loader(dataset, BATCH, seed=seed, **options) as loader:
        begin()
        return sum(int((np.asarray(batch.status) == 0).sum()) for batch in loader)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_cold_epoch_is_one_pass_over_the_disk(node: Node, client: Client, name: str, order: str) -> None:
    dataset = SOURCES[name].open(client)
    count, seen = len(dataset), list[Any]()

    def begin() -> None:
        node.await_rest()
        node.disk.drop_caches()

    for number in range(TRIES):  # some kernels take pages away before their batches are built
        assert delivered(dataset, order, 100 * number + len(name), begin) == count
        seen.append(node.disk.stats())
        if seen[-1].seeks < FILES * ROWS / 20 and seen[-1].bytes < 1.3 * FILES * ROWS * SIZE:
            return
    raise AssertionError(seen)


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_is_opened_again_without_its_files(node: Node, client: Client, name: str) -> None:
    count = len(SOURCES[name].open(client))
    node.await_rest()
    node.disk.drop_caches()
    assert len(SOURCES[name].open(client)) == count
    seen = node.disk.stats()
    # Records, and for windows the object with their places.
    assert seen.seeks <= 6, seen
    assert seen.bytes < FILES * ROWS * SIZE // 20, seen
