"""Arrays that zarr-python wrote, read by rows through the node: plain, encoded, sharded, with holes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ZstdCodec

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError, NotFoundError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshsdk.client.s3_client import Client

ROWS = 23
IMAGES = np.random.default_rng(3).integers(0, 256, (ROWS, 6, 5, 3), np.uint8)
WAVES = np.random.default_rng(4).standard_normal((ROWS, 40)).astype(np.float32)
LABELS = np.arange(ROWS, dtype=np.int64) * 7


def write(folder: Path) -> None:
    group = zarr.open_group(folder, mode="w", zarr_format=3)

    def add(name: str, data: Any, **how: Any) -> None:
        array = group.create_array(name, shape=data.shape, dtype=data.dtype, **how)
        array[:] = data

    add("plain", IMAGES, chunks=(4, 6, 5, 3), compressors=None)
    add("alone", IMAGES, chunks=(1, 6, 5, 3), compressors=ZstdCodec())
    add("sharded", IMAGES, chunks=(1, 6, 5, 3), shards=(8, 6, 5, 3), compressors=[GzipCodec(), Crc32cCodec()])
    add("shards/plain", WAVES, chunks=(2, 40), shards=(6, 40), compressors=None)
    add("big", WAVES, chunks=(1, 40), compressors=None, serializer=BytesCodec(endian="big"))
    add("labels", LABELS, chunks=(10,), compressors=None)
    add("together", IMAGES, chunks=(4, 6, 5, 3), compressors=ZstdCodec())
    add("cut", IMAGES, chunks=(4, 3, 5, 3), compressors=None)
    add("short", LABELS[:5], chunks=(5,), compressors=None)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("zarr") / "data.zarr"
    write(folder)
    with Daemon.start(args=("--transform-workers", "2")) as daemon, contextlib.closing(daemon.client()) as s3:
        s3.create_bucket(Bucket="arrays")
        for file in folder.rglob("*"):
            if file.is_file():
                key = f"v1/{file.relative_to(folder)}"
                s3.put_object(Bucket="arrays", Key=key, Body=file.read_bytes())
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


def metadata(name: str) -> str:
    return f"s3://arrays/v1/{name}/zarr.json"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", IMAGES),
        ("alone", IMAGES),
        ("sharded", IMAGES),
        ("shards/plain", WAVES),
        ("big", WAVES),
        ("labels", LABELS),
    ],
)
def test_rows_are_those_that_were_written(client: Client, name: str, expected: Any) -> None:
    ds = mesh.open("s3://arrays/v1", fields={"x": name}, kind="zarr", client=client)
    ds = ds.map(ops.zarr("x", metadata(name)))
    assert (len(ds), ds.snapshot.skipped) == (ROWS, 0)
    with mesh.Loader(ds, global_batch=ROWS, shuffle=False, output="numpy") as loader:
        got = loader.at(0)["x"]
    assert got.dtype == expected.dtype
    assert np.array_equal(got, expected)


def test_an_array_of_its_own_is_opened_without_a_name(client: Client) -> None:
    ds = mesh.open("s3://arrays/v1/labels", fields={"x": ""}, kind="zarr", client=client)
    assert int(ds.map(ops.zarr("x", metadata("labels")))[3]["x"]) == 21


def test_several_arrays_are_one_sample_and_take_further_ops(client: Client) -> None:
    fields = {"image": "sharded", "label": "labels", "wave": "shards/plain"}
    ds = mesh.open("s3://arrays/v1", fields=fields, kind="zarr", client=client).map(
        ops.zarr("image", metadata("sharded")),
        ops.zarr("label", metadata("labels")),
        ops.zarr("wave", metadata("shards/plain")),
        ops.gather_columns("wave", [0, -1]),
    )
    with mesh.Loader(ds, global_batch=8, seed=1, shuffle=mesh.Blocks(shards=2), output="numpy") as loader:
        seen = 0
        for batch in loader:
            rows = batch["label"][batch.status == 0] // 7
            seen += len(rows)
            assert np.array_equal(batch["image"][batch.status == 0], IMAGES[rows])
            assert np.array_equal(batch["wave"][batch.status == 0], WAVES[rows][:, [0, -1]])
    assert seen == ROWS
    few = ds.filter("index < 3 or name == '000000020'")
    assert [int(row["label"]) for row in few.__getitems__(range(len(few)))] == [0, 7, 14, 140]


def test_what_cannot_be_read_by_rows_says_what_to_do(client: Client) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"x": "together"}, "4 rows are encoded together"),
        ({"x": "cut"}, "cut into several chunks"),
        ({"x": "label"}, "did you mean 'labels'"),
        ({"x": "labels", "y": "short"}, "23 and 5 rows|5 and 23 rows"),
        ({"x": {"ext": ["jpg"]}}, "of the kind zarr"),
    ]
    for fields, complaint in wrong:
        with pytest.raises(InvalidPlanError, match=complaint):
            mesh.open("s3://arrays/v1", fields=fields, kind="zarr", client=client)
    with pytest.raises(ConfigurationError, match="arrays that fields= names"):
        mesh.open("s3://arrays/v1", kind="zarr", client=client)


def test_holes_are_left_out_and_lies_are_named(daemon: Daemon, client: Client) -> None:
    with contextlib.closing(daemon.client()) as s3:
        s3.create_bucket(Bucket="holes")
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket="arrays", Prefix="v1/"):
            for entry in page["Contents"]:
                s3.copy_object(Bucket="holes", Key=entry["Key"], CopySource=f"arrays/{entry['Key']}")
        s3.delete_object(Bucket="holes", Key="v1/plain/c/1/0/0/0")

        def opened(name: str, *more: str) -> Any:
            fields = {"x": name, **{other: other for other in more}}
            return mesh.open("s3://holes/v1", fields=fields, kind="zarr", client=client)

        ds = opened("plain", "labels").map(ops.zarr("labels", metadata("labels")))
        assert (len(ds), ds.snapshot.skipped) == (ROWS - 4, 4)
        assert [int(row["labels"]) for row in ds.__getitems__([3, 4])] == [21, 56]
        s3.put_object(Bucket="holes", Key="v1/plain/c/2/0/0/0", Body=b"short")
        with pytest.raises(
            BadSampleError, match="c/2/0/0/0 is not a valid chunk of its array: a chunk has 5 bytes"
        ):
            opened("plain")
        whole = s3.get_object(Bucket="holes", Key="v1/sharded/c/0/0/0/0")["Body"].read()
        for body in (whole[:-1] + b"\x00", whole[:50]):
            s3.put_object(Bucket="holes", Key="v1/sharded/c/0/0/0/0", Body=body)
            with pytest.raises(BadSampleError, match="index"):
                opened("sharded")
        s3.put_object(Bucket="holes", Key="v1/alone/c/4/0/0/0", Body=b"\x28\xb5\x2f\xfd garbage")
        bad = opened("alone").map(ops.zarr("x", metadata("alone")))
        with pytest.raises(BadSampleError, match="not zstd"):
            bad[4]
        for number in range(-(-ROWS // 10)):
            s3.delete_object(Bucket="holes", Key=f"v1/labels/c/{number}")
        with pytest.raises(NotFoundError, match="none of the 23 rows"):
            opened("labels")
