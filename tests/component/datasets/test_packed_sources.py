"""Files of lines and of TFRecords that are stored packed: the same samples as unpacked, in the same order."""

from __future__ import annotations

import gzip
import json
import sys
from typing import TYPE_CHECKING

import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError, ConfigurationError
from tests.support.daemons import Daemon
from tests.support.tf_example_writer import BytesList, Int64List, example, record

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshsdk.client.s3_client import Client

ROWS = 40
PACKINGS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}


def text(number: int) -> str:
    return f"the cat sat on mat {number}. " * (1 + number % 5)


def files() -> Iterator[tuple[str, bytes]]:
    """Two files of each kind."""
    for part in range(2):
        numbers = range(part * ROWS // 2, (part + 1) * ROWS // 2)
        rows = [json.dumps({"text": text(number), "id": number}) for number in numbers]
        yield f"lines/part-{part}.jsonl", "\n".join(rows).encode()
        records = [
            record(example({"text": BytesList([text(number).encode()]), "id": Int64List([number])}))
            for number in numbers
        ]
        yield f"records/x-{part:05}-of-00002", b"".join(records)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        Daemon.start(args=("--transform-workers", "2")) as daemon,
        mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client,
    ):
        client.create_bucket("corpus")
        for name, data in files():
            for ending, pack in PACKINGS.items():
                client.put("corpus", f"v1{ending}/{name}{ending}", pack(data))
        yield client


def opened(client: Client, kind: str, place: str) -> mesh.Dataset:
    if kind == "lines":
        fields = {"text": "jsonl", "id": "jsonl"}
        ds = mesh.open(f"s3://corpus/{place}/lines", fields=fields, kind="lines", client=client)
        return ds.map(ops.json("text", "text"), ops.json("id", "id", type="integer"))
    fields = {"text": "text", "id": "id"}
    ds = mesh.open(f"s3://corpus/{place}/records", fields=fields, kind="tfrecord", client=client)
    return ds.map(ops.feature("id", "integer"))


@pytest.mark.parametrize("kind", ["lines", "tfrecord"])
@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_files_give_the_samples_of_unpacked_ones(client: Client, kind: str, ending: str) -> None:
    ds, plain = opened(client, kind, f"v1{ending}"), opened(client, kind, "v1")
    assert (len(ds), ds.snapshot.shards, ds.snapshot.skipped) == (ROWS, 2, 0)
    orders = []
    for one in (ds, plain):
        with mesh.Loader(one, 8, seed=3, shuffle=mesh.Blocks(shards=1), output="numpy") as loader:
            orders.append([(int(b["id"][i]), bytes(b["text"][i])) for b in loader for i in range(8)])
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == [(number, text(number).encode()) for number in range(ROWS)]
    assert ds.schema() == plain.schema()
    assert ds.preflight(global_batch=8).row_bytes == plain.preflight(global_batch=8).row_bytes
    wanted = "text.id == 7" if kind == "lines" else f"text_size == {len(text(7))} and index < 8"
    assert int(ds.filter(wanted).head()[-1]["id"]) == 7


def test_of_a_file_in_both_forms_the_plain_one_is_read(client: Client) -> None:
    line = b'{"text": "a", "id": 1}\n'
    client.put("corpus", "both/lines/a.jsonl", line)
    client.put("corpus", "both/lines/a.jsonl.gz", gzip.compress(line * 50))
    client.put("corpus", "both/lines/b.jsonl.gz", gzip.compress(line * 20))
    ds = opened(client, "lines", "both")
    assert len(ds) == 21
    assert list(ds.manifest().objects.keys) == ["both/lines/a.jsonl", "both/lines/b.jsonl.gz"]


@pytest.mark.parametrize("kind", ["lines", "tfrecord"])
def test_damaged_and_hostile_files_are_refused_by_name(client: Client, kind: str) -> None:
    folder, name = ("lines", "x.jsonl.gz") if kind == "lines" else ("records", "x.tfrecord.gz")
    data = dict(files())[f"{folder}/" + ("part-0.jsonl" if kind == "lines" else "x-00000-of-00002")]
    packed = gzip.compress(data)
    for number, (body, complaint) in enumerate(
        [
            (packed[:-4], "the gzip stream is truncated"),
            (packed[:40] + b"\0" + packed[41:], "damaged|CRC|truncated"),
            (data, "damaged"),
            (gzip.compress(b"\1" * 3_000_000), "not a valid TFRecord file"),
        ]
    ):
        client.put("corpus", f"bad-{kind}-{number}/{folder}/{name}", body)
        if number == 3 and kind == "lines":
            ds = opened(client, kind, f"bad-{kind}-{number}")
            with pytest.raises(BadSampleError):
                ds[0]
            continue
        with pytest.raises(BadSampleError, match=complaint) as told:
            opened(client, kind, f"bad-{kind}-{number}")
        assert name in str(told.value)


def test_what_cannot_be_guessed_says_so(client: Client) -> None:
    with pytest.raises(ConfigurationError, match=r"is compressed.*name them"):
        mesh.open("s3://corpus/v1.gz/records", kind="tfrecord", client=client)
