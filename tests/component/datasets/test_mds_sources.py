"""MDS datasets through a node: columns as fields, refusals by name."""

from __future__ import annotations

import gzip
import io
import struct
import sys
from typing import TYPE_CHECKING

import pytest
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError, InvalidPlanError, NotFoundError
from tests.support.daemons import Daemon
from tests.support.mds_writer import mds_files

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.client.s3_client import Client

    Packing = Callable[[bytes], bytes]

ROWS = 25
COLUMNS = {"image": "png", "label": "int", "weights": "ndarray:float32", "why": "pkl"}


def row(number: int) -> dict[str, bytes]:
    out = io.BytesIO()
    Image.new("RGB", (6, 6), (number, 0, 0)).save(out, "PNG")
    return {
        "image": out.getvalue(),
        "label": struct.pack("<q", -number),
        "weights": struct.pack(f"<{number}f", *range(number)),
        "why": b"a pickle",
    }


def put(client: Client, place: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        client.put("mds", f"{place}/{name}", data)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(args=("--transform-workers", "2")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("mds")
        put(client, "v1", mds_files(COLUMNS, [row(number) for number in range(ROWS)], shard=10))
        yield client


def opened(client: Client, place: str = "v1", **fields: str) -> mesh.Dataset:
    return mesh.open(f"s3://mds/{place}", fields=fields or None, kind="mds", client=client)


def test_columns_are_fields(client: Client) -> None:
    ds = opened(client, image="image", label="label", weights="weights")
    ds = ds.map(
        ops.decode("image"),
        ops.center_crop("image", 6),
        ops.frombuffer("label", "int64"),
        ops.frombuffer("weights", "float32", shape=[None]),
    )
    assert (len(ds), ds.snapshot.shards, ds.snapshot.skipped) == (ROWS, 3, 0)
    seen = set()
    with mesh.Loader(ds, global_batch=5, seed=1, output="numpy") as loader:
        for batch in loader:
            for at in range(5):
                number = -int(batch["label"][at])
                seen.add(number)
                assert batch["image"][at, 0, 0, 0] == number
                assert batch["weights"][at].tolist() == list(range(number))
    assert seen == set(range(ROWS))


def test_columns_are_guessed_without_pickles(client: Client) -> None:
    assert opened(client).fields == ("image", "label", "weights")
    with pytest.raises(InvalidPlanError, match="Python objects"):
        opened(client, x="why")
    with pytest.raises(InvalidPlanError, match="no column 'lable'; did you mean 'label'"):
        opened(client, x="lable")
    with pytest.raises(BadSampleError, match=r"8 bytes; an array of float32\[\] takes 4"):
        opened(client, x="label").map(ops.frombuffer("x", "float32"))[0]
    with pytest.raises(InvalidPlanError, match="at most one of them null"):
        opened(client, x="label").map(ops.frombuffer("x", "int64", shape=[None, None])).plan()


def test_refusals_name_the_shard_and_the_cause(client: Client) -> None:
    files = mds_files(COLUMNS, [row(number) for number in range(5)])
    shard = files["shard.00000.mds"]
    with pytest.raises(NotFoundError, match=r"no index\.json in s3://mds/; found one in s3://mds/v1/"):
        mesh.open("s3://mds", fields={"x": "label"}, kind="mds", client=client)
    with pytest.raises(NotFoundError, match="no index"):
        opened(client, "nothing", x="label")
    put(client, "torn", files | {"shard.00000.mds": shard[:-1]})
    with pytest.raises(BadSampleError, match=r"torn/shard\.00000\.mds does not match .*the index says"):
        opened(client, "torn", x="label")
    put(client, "other", files | {"shard.00000.mds": struct.pack("<I", 6) + shard[4:]})
    with pytest.raises(BadSampleError, match="header states 6 samples, but its index 5"):
        opened(client, "other", x="label")
    put(client, "missing", {"index.json": files["index.json"]})
    with pytest.raises(BadSampleError, match="does not exist, but the index lists it"):
        opened(client, "missing", x="label")
    begin = struct.unpack_from("<I", shard, 8)[0]
    longer = bytearray(shard)
    longer[begin] += 1
    put(client, "longer", files | {"shard.00000.mds": bytes(longer)})
    ds = opened(client, "longer", x="label").map(ops.frombuffer("x", "int64"))
    assert (len(ds), ds.snapshot.skipped) == (4, 1)
    assert [int(one["x"]) for one in ds.head(4)] == [0, -2, -3, -4]


@pytest.mark.parametrize(("ending", "pack"), [("zstd", zstd.compress), ("gz", gzip.compress)])
def test_packed_shards_are_read_through_a_copy(client: Client, ending: str, pack: Packing) -> None:
    files = mds_files(COLUMNS, [row(number) for number in range(ROWS)], shard=10, packing=(ending, pack))
    put(client, ending, files)
    ds = opened(client, ending, label="label", weights="weights").map(ops.frombuffer("label", "int64"))
    with mesh.Loader(ds, global_batch=ROWS, shuffle=False, output="numpy") as loader:
        assert loader.at(0)["label"].tolist() == [-number for number in range(ROWS)]
    assert ds.filter("weights_size == 12").head()[0]["label"] == -3
    name = f"shard.00001.mds.{ending}"
    put(client, f"torn-{ending}", files | {name: files[name][:-5] + b"\0" * 5})
    with pytest.raises(BadSampleError, match=name.replace(".", r"\.")):
        opened(client, f"torn-{ending}", x="label")


def test_a_copy_of_another_size_is_refused(client: Client) -> None:
    files = mds_files(COLUMNS, [row(number) for number in range(5)], packing=("zstd", zstd.compress))
    name = "shard.00000.mds.zstd"
    other = zstd.compress(zstd.decompress(files[name]) + b"more")
    index = files["index.json"].replace(
        f'"bytes": {len(files[name])}'.encode(), f'"bytes": {len(other)}'.encode()
    )
    put(client, "other-size", {name: other, "index.json": index})
    with pytest.raises(BadSampleError, match=r"decompressed, it has \d+ bytes; the index says"):
        opened(client, "other-size", x="label")
    put(client, "brotli", mds_files(COLUMNS, [row(1)], packing=("br", lambda data: data[:50])))
    with pytest.raises(BadSampleError, match="compression is not supported: use zstd, gz, or none"):
        opened(client, "brotli", x="label")
