"""Packed plans over a daemon: every token once an epoch, for every world size, after a kill -9 too."""

from __future__ import annotations

import contextlib
import re
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import meshsdk as mesh
from meshd.batches.assembly.stored_sequence_format import PART
from meshsdk import ops
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError
from meshwire.plan.sequence_packing import Pack, pack_rows
from tests.support.bounded_wait import await_end, await_true
from tests.support.daemons import FAILPOINTS, Daemon
from tests.unit.transform.test_transform_texts import small_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset

COUNT, LENGTH = 60, 32
FILE = small_tokenizer()
ORACLE = Tokenizer.from_buffer(FILE)
TEXTS = [("the cat sat " * (number % 9) + "on a mat") for number in range(COUNT)]
IDS = [ORACLE.encode(text).ids for text in TEXTS]


def fill(daemon: Daemon) -> None:
    with contextlib.closing(daemon.client()) as s3:
        s3.create_bucket(Bucket="texts")
        s3.put_object(Bucket="texts", Key="tokenizer.json", Body=FILE)
        for number, text in enumerate(TEXTS):
            s3.put_object(Bucket="texts", Key=f"a/{number:03}.txt", Body=text.encode())


@pytest.fixture(scope="module", params=[1, 2])
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Daemon.start(workers=request.param, args=("--transform-workers", "2")) as daemon:
        fill(daemon)
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


def texts(client: Client) -> Dataset:
    ds = mesh.open("s3://texts/a", fields={"tokens": "txt"}, client=client)
    return ds.map(ops.tokenize("tokens", "s3://texts/tokenizer.json"))


@pytest.fixture
def packed(client: Client) -> Dataset:
    return texts(client).pack("tokens", length=LENGTH, value=7)


def sequences(batch: Any) -> list[list[int]]:
    """The pieces of a batch's rows that are no padding rows."""
    found = []
    rows = zip(
        batch["tokens"], batch["tokens.segments"], batch["tokens.positions"], batch.status, strict=True
    )
    for tokens, segments, positions, status in rows:
        assert (tokens[segments == 0] == 7).all()
        if status == 3:
            continue
        for segment in range(1, int(segments.max()) + 1):
            there = segments == segment
            assert positions[there].tolist() == list(range(int(there.sum())))
            found.append(tokens[there].tolist())
    return found


def pieces(ids: list[int]) -> list[list[int]]:
    return [ids[at : at + LENGTH] for at in range(0, len(ids), LENGTH)]


@pytest.mark.parametrize("shuffle", [True, False, mesh.Blocks(shards=2)])
def test_every_token_once_an_epoch(packed: Dataset, shuffle: Any) -> None:
    for epoch in range(2):
        with mesh.Loader(packed, global_batch=4, seed=5, shuffle=shuffle, output="numpy") as loader:
            loader.set_epoch(epoch)
            found = [piece for batch in loader for piece in sequences(batch)]
        assert sorted(found) == sorted(piece for ids in IDS for piece in pieces(ids))


BOOKS = [f"the cat sat on {number} mats " * 12_000 for number in range(6)]


def books(client: Client) -> Dataset:
    if not client.has_bucket("books"):
        client.create_bucket("books")
        for number, book in enumerate(BOOKS):
            client.put("books", f"{number}.txt", book.encode())
    ds = mesh.open("s3://books/", fields={"tokens": "txt"}, client=client)
    return ds.map(ops.tokenize("tokens", "s3://texts/tokenizer.json")).pack("tokens", length=4096, value=7)


def test_long_texts_are_tokenized_once(daemon: Daemon, client: Client) -> None:
    ds = books(client)
    ds.plan()
    before = tokenized(daemon)
    with mesh.Loader(ds, global_batch=8, seed=5, output="numpy") as loader:
        first = {name: np.array(value) for name, value in dict(loader.at(1)).items()}
        found = sum(int((batch["tokens.segments"][batch.status != 3] > 0).sum()) for batch in loader)
    assert found == sum(len(ORACLE.encode(book).ids) for book in BOOKS)
    assert tokenized(daemon) == before
    # A node without room for the tokens makes the same batches, from the texts.
    with Daemon.start(args=("--transform-workers", "2", "--view-cache", "1MiB")) as small:
        fill(small)
        keys: dict[str, Any] = {"access_key": small.access_key, "secret_key": small.secret_key}
        with mesh.connect(small.endpoint, **keys) as other:
            again = books(other)
            again.plan()
            before = tokenized(small)
            with mesh.Loader(again, global_batch=8, seed=5, output="numpy") as loader:
                batch = loader.at(1)
                assert all(np.array_equal(batch[name], value) for name, value in first.items())
            assert tokenized(small) > before


def tokenized(node: Daemon) -> int:
    """Samples that were tokenized."""
    with urllib.request.urlopen(f"{node.endpoint}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'^meshd_op_calls_total{.*op="tokenize".*} (\S+)$', text, re.MULTILINE)
    return int(sum(map(float, found)))


def test_the_global_batch_does_not_depend_on_world_size(packed: Dataset) -> None:
    def rows(world: int) -> Any:
        parts = []
        for rank in range(world):
            with mesh.Loader(packed, global_batch=6, seed=5, rank=rank, world=world, output="numpy") as one:
                parts.append(one.at(1)["tokens"])
        return np.concatenate(parts)

    whole = rows(1)
    assert whole.shape == (6, LENGTH)
    assert whole.dtype == np.uint16
    for world in (2, 3):
        assert np.array_equal(rows(world), whole)


def test_rows_are_counted_and_looked_at(packed: Dataset) -> None:
    total = sum(map(len, IDS))
    assert -(-total // LENGTH) <= len(packed) < COUNT
    schema = packed.schema()
    assert {name: (field.dtype, field.shape) for name, field in schema.items()} == {
        "tokens": ("uint16", (LENGTH,)),
        "tokens.positions": ("int32", (LENGTH,)),
        "tokens.segments": ("int32", (LENGTH,)),
    }
    row = packed[0]
    assert row["tokens"][: len(IDS[0])].tolist() == IDS[0]
    assert row["tokens.segments"][0] == 1
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_end_of_text_and_positions_of_the_sample(client: Client) -> None:
    ds = mesh.open("s3://texts/a", fields={"tokens": "txt"}, client=client)
    ds = ds.map(ops.tokenize("tokens", "s3://texts/tokenizer.json", special=False, end_of_text="</s>"))
    ds = ds.pack("tokens", length=8, positions="sample")
    end = ORACLE.token_to_id("</s>")
    with mesh.Loader(ds, global_batch=8, shuffle=False, output="numpy") as loader:
        pieces = [
            (tokens[segments == segment].tolist(), int(positions[segments == segment][0]))
            for batch in loader
            for tokens, segments, positions, status in zip(
                *batch["tokens", "tokens.segments", "tokens.positions"], batch.status, strict=True
            )
            for segment in range(1, int(segments.max()) + 1)
            if status != 3
        ]
    expected = [[*ORACLE.encode(text, add_special_tokens=False).ids, end] for text in TEXTS]
    assert sorted(pieces) == sorted(
        (ids[at : at + 8], at) for ids in expected for at in range(0, len(ids), 8)
    )
    wrong = mesh.open("s3://texts/a", fields={"tokens": "txt"}, client=client)
    wrong = wrong.map(ops.tokenize("tokens", "s3://texts/tokenizer.json", end_of_text="<eos>"))
    with pytest.raises(InvalidPlanError, match=r"no token '<eos>'.*</s>"):
        wrong.plan()


def test_tokens_without_segments_and_positions(client: Client, packed: Dataset) -> None:
    bare = texts(client).pack("tokens", length=LENGTH, value=7, segments=False, positions="none")
    assert list(bare.schema()) == ["tokens"]
    with (
        mesh.Loader(packed, global_batch=6, seed=5, output="numpy") as numbered,
        mesh.Loader(bare, global_batch=6, seed=5, output="numpy") as alone,
    ):
        for left, right in zip(numbered, alone, strict=True):
            assert list(right) == ["tokens"]
            assert np.array_equal(left["tokens"], right["tokens"])
            assert np.array_equal(left.positions, right.positions)
            assert np.array_equal(left.status, right.status)
    named = texts(client).pack("tokens", length=LENGTH, positions="none")
    assert list(named.schema()) == ["tokens", "tokens.segments"]
    assert np.array_equal(named[0]["tokens.segments"], packed[0]["tokens.segments"])


def test_truncated_sequences_end_with_their_row(client: Client) -> None:
    ds = texts(client).pack("tokens", length=8, long="truncate")
    with mesh.Loader(ds, global_batch=8, shuffle=False, output="numpy") as loader:
        seen = [
            tokens[segments == segment].tolist()
            for batch in loader
            for tokens, segments, status in zip(
                batch["tokens"], batch["tokens.segments"], batch.status, strict=True
            )
            for segment in range(1, int(segments.max()) + 1)
            if status == 0
        ]
    assert sorted(seen) == sorted(ids[:8] for ids in IDS)


def test_what_cannot_be_packed_is_said(client: Client, packed: Dataset) -> None:
    both = mesh.open("s3://texts/a", fields={"tokens": "txt", "more": "txt"}, client=client)
    tokens = ops.tokenize("tokens", "s3://texts/tokenizer.json")
    for ds, complaint in [
        (both.map(tokens).pack("tokens", length=8), "cannot carry 'more'"),
        (texts(client).pack("tokens", length=8, value=-1), "does not fit into uint16"),
        (texts(client).map(ops.pad_to("tokens", 64)).pack("tokens", length=8), "ragged sequences"),
    ]:
        with pytest.raises(InvalidPlanError, match=complaint):
            ds.plan()
    with pytest.raises(ConfigurationError, match="no field 'token'; this dataset has tokens"):
        texts(client).pack("token", length=8)
    with pytest.raises(ConfigurationError, match="before pack"):
        packed.select("tokens")


def test_bad_samples_are_met_when_the_plan_is_made(daemon: Daemon, client: Client) -> None:
    with contextlib.closing(daemon.client()) as s3:
        s3.create_bucket(Bucket="odd")
        for number in range(10):
            body = b"\xff" if number == 3 else TEXTS[number].encode()
            s3.put_object(Bucket="odd", Key=f"{number}.txt", Body=body)
    ds = mesh.open("s3://odd", fields={"tokens": "txt"}, client=client)
    ds = ds.map(ops.tokenize("tokens", "s3://texts/tokenizer.json")).pack("tokens", length=LENGTH, value=7)
    with pytest.raises(BadSampleError, match="1 of 10 samples cannot be packed"):
        ds.plan()
    with mesh.Loader(ds, global_batch=2, output="numpy", on_bad="substitute") as loader:
        found = [piece for batch in loader for piece in sequences(batch)]
    assert sorted(found) == sorted(p for number in range(10) if number != 3 for p in pieces(IDS[number]))


def test_measuring_goes_on_where_a_killed_node_stopped() -> None:
    count = 3 * PART
    # The first part and a bit more is measured as ever; the rest would take minutes.
    crawling = {FAILPOINTS: f"transform.row=sleep(20):after {PART * 5 // 8}"}
    with Daemon.start(args=("--transform-workers", "2"), env=crawling) as node:
        keys: dict[str, Any] = {"access_key": node.access_key, "secret_key": node.secret_key}
        with mesh.connect(node.endpoint, **keys) as client:
            client.create_bucket("lines")
            client.put("lines", "a.jsonl", b"\n".join(b"%d" % number for number in range(count)))
            client.put("lines", "tokenizer.json", FILE)
            ds = mesh.open("s3://lines/", fields={"tokens": "jsonl"}, kind="lines", client=client)
            ds = ds.map(ops.tokenize("tokens", "s3://lines/tokenizer.json")).pack("tokens", length=64)
            asking = threading.Thread(target=lambda: len(ds))
            asking.start()
            await_true(lambda: measured(node) > PART)  # of which the first is kept by now
            node.kill()
            del node.env[FAILPOINTS]
            node.up()
            await_end(asking)
            assert measured(node) < count
            oracle = [len(ORACLE.encode(str(number)).ids) for number in range(count)]
            whole = np.array([0, count])
            assert len(ds) == pack_rows(np.array(oracle), whole, Pack(("tokens",), 64)).rows


def measured(node: Daemon) -> int:
    with urllib.request.urlopen(f"{node.endpoint}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r"^meshd_samples_measured_total(?:{.*})? (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def test_a_packed_plan_survives_the_death_of_the_node() -> None:
    with Daemon.start(args=("--transform-workers", "1")) as node:
        fill(node)
        keys: dict[str, Any] = {"access_key": node.access_key, "secret_key": node.secret_key}
        with mesh.connect(node.endpoint, **keys) as client:
            ds = texts(client).pack("tokens", length=LENGTH, value=7)
            with mesh.Loader(ds, global_batch=4, seed=1, output="numpy") as loader:
                before = np.array(loader.at(2)["tokens"])
                node.kill()
                node.up()
                assert np.array_equal(loader.at(2)["tokens"], before)
            assert ds.plan().hash == texts(client).pack("tokens", length=LENGTH, value=7).plan().hash
