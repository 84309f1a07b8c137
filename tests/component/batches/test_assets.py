"""Assets over a running daemon: read once with the caller's rights, pinned by content, refused when gone."""

from __future__ import annotations

import hashlib
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import AccessError, InvalidPlanError, NotFoundError, ServerError
from tests.support.daemons import Daemon
from tests.unit.transform.test_transform_texts import small_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset

TEXTS = ["the cat sat", "on the mat", "", "déjà vu 猫 " * 40, "the the the cat"]
FILE = small_tokenizer()
ORACLE = Tokenizer.from_buffer(FILE)


@pytest.fixture(scope="module", params=[1, 2])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon.start(workers=request.param, args=("--transform-workers", "2")) as daemon:
        s3 = daemon.client()
        s3.create_bucket(Bucket="texts")
        s3.create_bucket(Bucket="models")
        s3.put_object(Bucket="models", Key="tiny/tokenizer.json", Body=FILE)
        for number, text in enumerate(TEXTS):
            s3.put_object(Bucket="texts", Key=f"a/{number}.txt", Body=text.encode())
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


@pytest.fixture
def dataset(client: Client) -> Dataset:
    return mesh.open("s3://texts/a", fields={"text": "txt"}, client=client)


def test_texts_are_tokenized_on_the_node(dataset: Dataset) -> None:
    ds = dataset.map(ops.tokenize("text", "s3://models/tiny/tokenizer.json"))
    for number, text in enumerate(TEXTS):
        assert ds[number]["text"].tolist() == ORACLE.encode(text).ids
    assert ds.schema()["text"].dtype == "uint16"
    dense = ds.map(ops.truncate("text", 8), ops.pad_to("text", 8, value=0))
    with mesh.Loader(dense, global_batch=5, shuffle=False, output="numpy") as loader:
        batch = loader.at(0)["text"]
    assert batch.shape == (5, 8)
    assert batch[0].tolist() == [*ORACLE.encode(TEXTS[0]).ids, 0, 0, 0, 0, 0, 0, 0][:8]


def test_a_plan_keeps_the_content_that_it_was_made_with(daemon: Daemon, dataset: Dataset) -> None:
    s3 = daemon.client()
    s3.put_object(Bucket="models", Key="changing.json", Body=FILE)
    first = dataset.map(ops.tokenize("text", "s3://models/changing.json"))
    before, named = first.plan().hash, f"sha256:{hashlib.sha256(FILE).hexdigest()}"
    assert dataset.map(ops.tokenize("text", named)).plan().hash == before
    other = json.loads(FILE)
    other["post_processor"] = None
    s3.put_object(Bucket="models", Key="changing.json", Body=json.dumps(other).encode())
    again = dataset.map(ops.tokenize("text", "s3://models/changing.json"))
    assert again.plan().hash != before
    s3.delete_object(Bucket="models", Key="changing.json")
    assert first[0]["text"].tolist() == ORACLE.encode(TEXTS[0]).ids
    assert again[0]["text"].tolist() == ORACLE.encode(TEXTS[0]).ids[1:-1]


@pytest.mark.parametrize(
    ("file", "kind", "code"),
    [
        ("s3://models/none.json", NotFoundError, "NoSuchKey"),
        ("s3://nowhere/none.json", NotFoundError, "NoSuchBucket"),
        (f"sha256:{'0' * 64}", InvalidPlanError, "NoSuchAsset"),
        ("sha256:short", InvalidPlanError, "NoSuchAsset"),
        ("s3://texts/a/0.txt", InvalidPlanError, "InvalidPlan"),
    ],
)
def test_what_cannot_be_used_is_refused_when_the_plan_is_made(
    dataset: Dataset, file: str, kind: type[ServerError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        dataset.map(ops.tokenize("text", file)).plan()
    assert caught.value.code == code
    assert "ops[0].args.file" in str(caught.value)


def test_an_asset_takes_the_right_to_read_it(daemon: Daemon, client: Client) -> None:
    statements = [
        {"Effect": "Allow", "Action": "s3:*", "Resource": ["arn:aws:s3:::texts", "arn:aws:s3:::texts/*"]}
    ]
    policy = {"Version": "2012-10-17", "Statement": statements}
    answer = daemon.request("POST", "/-/sts", json.dumps({"policy": policy}).encode())
    keys = json.loads(answer.body)
    with mesh.connect(
        daemon.endpoint,
        access_key=keys["AccessKeyId"],
        secret_key=keys["SecretAccessKey"],
        session_token=keys["SessionToken"],
    ) as narrow:
        ds = mesh.open("s3://texts/a", fields={"text": "txt"}, client=narrow)
        with pytest.raises(AccessError, match=r"may not read s3://models/tiny/tokenizer\.json"):
            ds.map(ops.tokenize("text", "s3://models/tiny/tokenizer.json")).plan()


def test_a_view_is_made_with_assets_too(daemon: Daemon) -> None:
    view = {
        "kind": "transform",
        "ops": [
            {"op": "tokenize", "args": {"file": "s3://models/tiny/tokenizer.json"}},
            {"op": "to_npy"},
        ],
        "match": [".txt"],
        "suffix": ".npy",
    }
    body = json.dumps({"bucket": "texts", "name": "tokens", "view": view}).encode()
    answer = json.loads(daemon.request("POST", "/-/views", body).body)
    named = f"sha256:{hashlib.sha256(FILE).hexdigest()}"
    assert answer["view"]["ops"][0]["args"]["file"] == named
    body = daemon.client().get_object(Bucket="texts--tokens", Key="a/3.npy")["Body"].read()
    assert np.load(io.BytesIO(body)).tolist() == ORACLE.encode(TEXTS[3]).ids


def test_it_survives_the_death_of_the_node() -> None:
    with Daemon.start(args=("--transform-workers", "1")) as node:
        s3 = node.client()
        s3.create_bucket(Bucket="texts")
        s3.put_object(Bucket="texts", Key="a/0.txt", Body=TEXTS[3].encode())
        s3.put_object(Bucket="texts", Key="tokenizer.json", Body=FILE)
        keys: dict[str, Any] = {"access_key": node.access_key, "secret_key": node.secret_key}
        with mesh.connect(node.endpoint, **keys) as client:
            ds = mesh.open("s3://texts/a", fields={"text": "txt"}, client=client)
            ds = ds.map(ops.tokenize("text", "s3://texts/tokenizer.json"))
            ds.plan()
            node.kill()
            node.up()
            assert ds[0]["text"].tolist() == ORACLE.encode(TEXTS[3]).ids


def test_too_large_is_said_before_it_is_read(daemon: Daemon, dataset: Dataset) -> None:
    daemon.client().put_object(Bucket="models", Key="big", Body=bytes((64 << 20) + 1))
    with pytest.raises(ServerError, match="at most 67108864") as caught:
        dataset.map(ops.tokenize("text", "s3://models/big")).plan()
    assert caught.value.code == "TooLarge"
