"""Datasets of TFRecords through a node: features as fields, folders as classes, refusals by name."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

import meshsdk as mesh
from meshsdk import ops
from meshsdk.cli import run
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError, NotFoundError
from tests.support.daemons import Daemon
from tests.support.tf_example_writer import BytesList, FloatList, Int64List, example, record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client

ROWS = 12


def picture(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 6), (number, 0, 0)).save(out, "PNG")
    return out.getvalue()


def message(number: int) -> bytes:
    return example(
        {
            "image/encoded": BytesList([picture(number)]),
            "image/class/label": Int64List([-number]),
            "box": FloatList([number, 0.5, 1, 2]),
            "tokens": Int64List(range(number)),
            "text": BytesList([b"even" if number % 2 == 0 else b"odd"]),
        }
    )


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(args=("--transform-workers", "2")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket("records")
        for part in range(3):
            rows = range(part * 4, part * 4 + 4)
            name = f"v1/{'ab'[part % 2]}/train-{part:05}-of-00003"
            client.put("records", name, b"".join(record(message(row)) for row in rows))
        client.put("records", "v1/features.json", b"{}")
        yield client


def test_features_are_fields(client: Client) -> None:
    fields = {
        "image": "image/encoded",
        "label": "image/class/label",
        "box": "box",
        "tokens": "tokens",
        "folder": "@class",
    }
    ds = mesh.open("s3://records/v1", fields=fields, kind="tfrecord", client=client)
    ds = ds.map(
        ops.decode("image"),
        ops.center_crop("image", 6),
        ops.feature("label", "integer"),
        ops.feature("box", "numbers", length=4),
        ops.feature("tokens", "integers"),
    )
    assert (len(ds), ds.snapshot.skipped, ds.classes) == (ROWS, 0, ("a", "b"))
    seen = set()
    with mesh.Loader(ds, global_batch=4, seed=3, output="numpy") as loader:
        for batch in loader:
            for row in range(4):
                number = -int(batch["label"][row])
                seen.add(number)
                assert batch["image"][row, 0, 0, 0] == number
                assert batch["box"][row].tolist() == [number, 0.5, 1, 2]
                assert batch["tokens"][row].tolist() == list(range(number))
                assert batch["folder"][row] == (4 <= number < 8)
    assert seen == set(range(ROWS))


def test_what_is_there_is_guessed_and_filtered(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ds = mesh.open("s3://records/v1", kind="tfrecord", client=client)
    assert ds.fields == ("box", "image_class_label", "image_encoded", "text", "tokens")
    odd = ds.filter('text == "odd"').select("image_class_label").rename(image_class_label="n")
    assert [int(row["n"]) for row in odd.map(ops.feature("n", "integer")).__getitems__(range(6))] == [
        -number
        for number in (1, 3, 9, 11, 5, 7)  # files in the order of their names
    ]
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    assert run(["head", "s3://records/v1/", "--kind", "tfrecord", "--json"]) == 0
    told = capfd.readouterr().out
    assert json.loads(told.splitlines()[0])["samples"] == ROWS


def test_numbers_of_another_kind_are_bad_samples(client: Client) -> None:
    fields = {"box": "box", "text": "text"}
    ds = mesh.open("s3://records/v1", fields=fields, kind="tfrecord", client=client)
    for op, complaint in [
        (ops.feature("box", "numbers", length=3), "4 values, not of 3"),
        (ops.feature("box", "integers"), "a feature of float32, not of integers"),
        (ops.feature("text", "number"), "not a numeric feature"),
    ]:
        with pytest.raises(BadSampleError, match=complaint):
            ds.map(op)[0]


def test_refusals_name_the_cause(client: Client) -> None:
    def opened(place: str, **fields: str) -> mesh.Dataset:
        return mesh.open(f"s3://records/{place}", fields=fields, kind="tfrecord", client=client)

    with pytest.raises(NotFoundError, match=r"image: 'img'.*image/encoded \(bytes\)"):
        opened("v1", image="img")
    with pytest.raises(NotFoundError, match="no TFRecord file"):
        opened("nothing", image="img")
    with pytest.raises(InvalidPlanError, match="of the kind tfrecord"):
        mesh.open("s3://records/v1", fields={"x": {"feature": "x"}}, client=client)
    whole = record(message(1)) + record(message(2))
    client.put("records", "torn/x.tfrecord", whole[:-3])
    with pytest.raises(
        BadSampleError, match=r"torn/x\.tfrecord is not a valid TFRecord file: record 1.*is truncated"
    ):
        opened("torn", box="box")
    client.put("records", "zipped/x.tfrecord", b"\x1f\x8b" + whole)
    with pytest.raises(ConfigurationError, match="compressed with gzip"):
        mesh.open("s3://records/zipped", kind="tfrecord", client=client)
    damaged = bytearray(whole)
    damaged[40] ^= 1
    client.put("records", "damaged/x.tfrecord", bytes(damaged))
    ds = opened("damaged", box="box")
    assert (len(ds), ds.snapshot.skipped) == (1, 1)
    assert np.array_equal(ds.map(ops.feature("box", "numbers"))[0]["box"], [2, 0.5, 1, 2])
