"""What a dataset is, holds, and whether a job with it would work, through the SDK and the command."""

from __future__ import annotations

import io
import json
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from meshsdk.datasets import preflight
from meshsdk.errors import ConfigurationError, InvalidPlanError, PreflightError
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.client.s3_client import Client

COUNT = 40


def jpeg(number: int, width: int = 40) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, 30), (number, 0, 0)).save(out, "JPEG")
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(args=("--transform-workers", "2", "--disk-type", "solid-state")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket("data")
        for number in range(COUNT):
            kind = "dog" if number < 10 else "cat"
            client.put("data", f"photos/{kind}/{number:03}.jpg", jpeg(number, 40 + number % 2))
            client.put("data", f"arrays/{number:03}.npy", npy(np.zeros(100_000)))
            client.put("data", f"torn/{number:03}.jpg", jpeg(number)[: 300 if number % 2 else None])
        for number in range(3):
            client.put("data", f"lines/{number}.jsonl", b'{"x": 1}\n{"x": 2}\n')
        yield client


@pytest.fixture
def command(client: Client, mesh: Callable[..., str]) -> Callable[..., str]:
    """`mesh …`, with the samples of `client` in place."""
    return mesh


def photos(client: Client) -> mesh.Dataset:
    return mesh.open("s3://data/photos", fields={"image": "jpg", "label": "@class"}, client=client)


def test_head_and_stats(client: Client) -> None:
    ds = photos(client)
    assert [int(row["label"]) for row in ds.head(3)] == [0, 0, 0]
    assert len(ds.head(1000)) == COUNT
    found = ds.stats()
    sizes = sorted(len(jpeg(number, 40 + number % 2)) for number in range(COUNT))
    spread = found.sizes["image"]
    assert (spread.least, spread.median, spread.most) == (sizes[0], sizes[19], sizes[-1])
    assert (spread.total, found.bytes) == (sum(sizes), sum(sizes))
    assert found.classes == {"label": {"cat": 30, "dog": 10}}
    assert (found.samples, found.objects, found.shards.total) == (COUNT, COUNT, COUNT)
    assert ds.filter("label == 'dog'").stats().classes == {"label": {"cat": 0, "dog": 10}}


def test_what_works_is_told_with_its_size(client: Client) -> None:
    ds = photos(client).map(ops.decode("image"), ops.center_crop("image", 16))
    found = ds.preflight(64, world=4)
    assert (found.samples, found.rows, found.bad) == (COUNT, 8, ())
    assert found.row_bytes == 16 * 16 * 3 + 8
    assert found.batch_bytes == 16 * found.row_bytes
    assert found.notes == ("global_batch=64 is more than the 40 samples: most rows are padding",)
    assert str(found).splitlines() == [
        "40 samples; 8 of 8 tried can be prepared",
        "  image: uint8 [16, 16, 3], decoded as rgb",
        "  label: int64 []",
        "  a row takes 776 B; a rank's batch takes 12.1 KiB",
        "note: global_batch=64 is more than the 40 samples: most rows are padding",
    ]
    assert repr(found).startswith("Preflight(samples=40, schema=")
    assert (
        photos(client)
        .map(ops.decode("image"))
        .preflight()
        .notes[0]
        .startswith("'image' has rows of different shapes, such as [30, 40, 3] and [30, 41, 3]")
    )


@pytest.mark.parametrize(
    ("place", "field", "chosen", "cause"),
    [
        ("arrays", "npy", ops.decode, r"'x' is a \.npy file: put ops\.npy\('x'\)"),
        ("photos", "jpg", ops.npy, r"not an npy file.*'x' is a JPEG file: put ops\.decode"),
        ("lines", "jsonl", ops.int_label, "'x' is lines of JSON: open the source with kind='lines'"),
    ],
)
def test_what_cannot_work_says_why_and_what_to_do(
    client: Client, place: str, field: str, chosen: Any, cause: str
) -> None:
    ds = mesh.open(f"s3://data/{place}", fields={"x": field}, client=client).map(chosen("x"))
    with pytest.raises(PreflightError, match=cause):
        ds.preflight()


def test_an_op_that_failed_is_not_what_to_put(client: Client) -> None:
    client.put("data", "cut/0.jpg", jpeg(0)[:200])
    cut = mesh.open("s3://data/cut", fields={"x": "jpg"}, client=client)
    with pytest.raises(PreflightError, match="not a readable JPEG") as told:
        cut.map(ops.decode("x")).preflight()
    assert "put ops.decode" not in str(told.value)


def test_chunks_of_zarr_are_no_compressed_files(client: Client) -> None:
    stored: dict[str, Any] = {}
    group = zarr.open_group(zarr.storage.MemoryStore(stored), mode="w", zarr_format=3)
    group.create_array("heat", data=np.arange(40.0).reshape(4, 10), chunks=(2, 5))
    for key, value in stored.items():
        client.put("data", f"series/{key}", value.to_bytes())
    ds = mesh.open("s3://data/series", {"x": "heat"}, kind="chunks", client=client)
    assert ds.snapshot.kind == "zarr"
    [note] = ds.preflight().notes
    assert "put ops.zarr_chunk('x', 's3://data/series/ARRAY/zarr.json')" in note
    whole = ds.map(ops.zarr_chunk("x", "s3://data/series/heat/zarr.json")).preflight()
    assert (whole.schema["x"].shape, whole.notes) == ((2, 5), ())


def test_rows_that_happen_to_be_alike_may_be_dense(client: Client) -> None:
    for number in range(3):
        client.put("data", f"alike/{number}.npy", npy(np.ones((2, 3))))
    ds = mesh.open("s3://data/alike", {"x": "npy"}, client=client)
    [note] = ds.map(ops.npy("x")).preflight().notes
    assert "all rows tried are [2, 3]" in note
    assert note.endswith("pass shape=[2, 3] to ops.npy")
    dense = ds.map(ops.npy("x", shape=[2, 3])).preflight()
    assert (dense.schema["x"].shape, dense.notes) == ((2, 3), ())


def test_a_schema_is_a_table_and_a_mapping(client: Client) -> None:
    ds = photos(client)
    told = ds.schema()
    assert repr(told).splitlines() == [
        "field  kind   dtype  shape",
        "image  bytes  uint8  ragged",
        "label  label  int64  []      2 classes",
    ]
    small = ds.map(ops.decode("image", mode="gray"), ops.resize("image", [8, 8])).schema()
    assert str(small).splitlines()[1] == "image  image  uint8  [8, 8, 1]  decoded as gray"
    assert small == dict(small.items())
    assert (list(small), small["image"].shape, small.get("other")) == (["image", "label"], (8, 8, 1), None)
    lossy = Image.new("P", (4, 4))
    lossy.putpalette(range(30))
    out = io.BytesIO()
    lossy.save(out, "PNG")
    client.put("data", "palettes/0.png", out.getvalue())
    masks = mesh.open("s3://data/palettes", {"mask": "png"}, client=client).map(ops.decode("mask"))
    *_, last = str(masks.schema()).splitlines()
    assert last.startswith("note: ")
    assert "mode='index'" in last


def test_statistics_of_samples_that_differ_in_size(client: Client) -> None:
    random = np.random.default_rng(3)
    rows = [random.normal(number, 2, (2, 1 + 7 * number)).astype(np.float32) for number in range(6)]
    rows[4][1, 3] = np.nan
    for number, row in enumerate(rows):
        client.put("data", f"unlike/{number}.npy", npy(row))
    ds = mesh.open("s3://data/unlike", {"x": "npy"}, client=client).map(ops.npy("x"))
    assert ds.schema()["x"].shape is None
    whole = np.concatenate(rows, axis=1).astype(np.float64)
    found = mesh.field_statistics(ds)["x"]
    assert (found.samples, found.missing, found.count) == (6, 1, whole.size - 1)
    expected = [np.nanmean(whole), np.nanstd(whole), np.nanmin(whole), np.nanmax(whole)]
    np.testing.assert_allclose([found.mean, found.std, found.low, found.high], expected)
    by_row = mesh.field_statistics(ds, "x", axis=0)["x"]
    np.testing.assert_allclose(by_row.mean, np.nanmean(whole, axis=1))
    np.testing.assert_allclose(by_row.std, np.nanstd(whole, axis=1))
    with pytest.raises(ConfigurationError, match="samples of 'x' have 1 to 36 indices along it"):
        mesh.field_statistics(ds, "x", axis=1)
    with pytest.raises(ConfigurationError, match="a sample of 'x' has 2 axes"):
        mesh.field_statistics(ds, "x", axis=2)
    some = mesh.field_statistics(ds, "x", samples=2)["x"]
    assert some.samples == 2


def test_how_a_field_is_stored_is_no_cause_where_its_first_op_did(client: Client) -> None:
    with pytest.raises(PreflightError, match=r"smaller than the crop of 224×224; resize\.$"):
        photos(client).map(ops.decode("image"), ops.center_crop("image", 224)).preflight()


def test_some_bad_samples_are_a_note(client: Client) -> None:
    ds = mesh.open("s3://data/torn", fields={"x": "jpg"}, client=client).map(ops.decode("x"))
    found = ds.preflight(rows=COUNT)
    assert len(found.bad) == COUNT // 2
    assert found.notes[0].startswith("20 of 40 samples are bad, the first: torn/001:")
    assert str(found).startswith("40 samples; 20 of 40 tried can be prepared\n")


def test_rows_that_cannot_be_packed(client: Client) -> None:
    ds = photos(client)
    with pytest.raises(
        PreflightError, match=r"cannot carry 'label': ds\.select\('image'\)\.pack\('image', …\)"
    ):
        ds.pack("image", length=64).preflight()
    only = ds.select("image")
    assert only.pack("image", length=64).preflight().samples == len(only)
    with pytest.raises(PreflightError, match="only ragged sequences can be packed"):
        only.map(ops.decode("image"), ops.resize("image", [8, 8])).pack("image", length=64).preflight()
    with pytest.raises(ConfigurationError, match="pack: no field 'x'; this dataset has image, label"):
        ds.pack("x", length=64)
    with pytest.raises(ConfigurationError, match=r"pack: length: 0 is outside 1…"):
        only.pack("image", length=0)
    with pytest.raises(ConfigurationError, match="pack: fields: expected 1"):
        only.pack(length=64)


def test_ops_that_do_not_fit_are_told_before_any_sample(client: Client) -> None:
    with pytest.raises(InvalidPlanError, match=r"ops\[0\]"):
        photos(client).map(ops.center_crop("image", 8)).preflight()


def test_batches_that_cannot_be(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ds = photos(client)
    with pytest.raises(ConfigurationError, match="global_batch=3 is less than 4 ranks"):
        ds.preflight(3, world=4)
    arrays = mesh.open("s3://data/arrays", fields={"x": "npy"}, client=client).map(ops.npy("x"))
    monkeypatch.setattr(preflight, "_free_memory", lambda: 64 << 20)
    with pytest.raises(
        PreflightError, match="takes 30 MiB and a loader holds 4, but this machine has only 64 MiB"
    ):
        arrays.preflight(40)
    assert arrays.preflight(8).batch_bytes == 8 * 800_000


def test_the_commands(command: Callable[..., str]) -> None:
    crop = ("--op", "decode:image", "--op", "center_crop:image:16")
    assert command("schema", "s3://data/photos/", *crop).splitlines() == [
        "image: uint8 [16, 16, 3], decoded as rgb",
        "label: int64 []",
    ]
    assert json.loads(command("stats", "--json", "s3://data/photos/"))["classes"]["label"]["dog"] == 10
    assert "2 classes, rarest first: dog 10, cat 30" in command("stats", "s3://data/photos/")
    told = json.loads(command("preflight", "--json", "s3://data/photos/", *crop, "-b", "8"))
    assert (told["rows"], told["bad"], told["batch_bytes"]) == (8, [], 8 * (16 * 16 * 3 + 8))
    assert "'npy' has no op and is a .npy file" in command("preflight", "s3://data/arrays/")
    wrong = command("preflight", "s3://data/arrays/", "--op", "decode:npy", code=1)
    assert "none of 8 samples from across it can be prepared" in wrong
    assert "mesh ls" in command("preflight", "s3://nothing/", code=3)


def test_a_server_that_is_not_there_is_told_at_once(
    command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        monkeypatch.setenv("MESH_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert "refused" in command("preflight", "s3://data/photos/", code=1)
