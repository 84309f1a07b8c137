"""`mesh tokenize` over a daemon: every token once, resumed where it stopped, read by slices when packed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

import meshsdk as mesh
from meshsdk import ops
from meshsdk.cli import run
from meshsdk.errors import BadSampleError, ConfigurationError
from meshwire.formats.token_index import encode_token_index
from meshwire.formats.token_manifest import MANIFEST, parse_token_manifest
from tests.support.daemons import Daemon
from tests.unit.transform.test_transform_texts import small_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshsdk.client.s3_client import Client

FILE = small_tokenizer()
ORACLE = Tokenizer.from_buffer(FILE)
TEXTS = ["the cat sat " * (number % 40) + f"on mat {number}" for number in range(300)]
IDS = [[*ORACLE.encode(text, add_special_tokens=False).ids, 1] for text in TEXTS]
ARGUMENTS = """--kind lines --field text=jsonl --text text --tokenizer s3://corpus/t.json --no-special
    --end-of-text </s>"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(args=("--transform-workers", "2")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        client.create_bucket("corpus")
        client.put("corpus", "t.json", FILE)
        for part in range(2):
            lines = [json.dumps({"text": text}) for text in TEXTS[150 * part : 150 * part + 150]]
            client.put("corpus", f"v1/{part}.jsonl", "\n".join(lines).encode())
        yield client


def tokens_of(client: Client, **more: Any) -> Any:
    ds = mesh.open("s3://corpus/v1", {"text": "jsonl"}, kind="lines", client=client)
    tokenize = ops.tokenize("text", "s3://corpus/t.json", special=False, end_of_text="</s>", **more)
    return ds.map(ops.json("text", "text"), tokenize)


@pytest.fixture(scope="module")
def stored(daemon: Daemon, client: Client) -> str:
    """A URL under which the command has stored the tokens."""
    place, words = "s3://corpus/tokens", [*ARGUMENTS.split(), "--shard-tokens", "4000", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("MESH_ENDPOINT", daemon.endpoint),
            ("AWS_ACCESS_KEY_ID", daemon.access_key),
            ("AWS_SECRET_ACCESS_KEY", daemon.secret_key),
        ):
            patch.setenv(name, value)
        assert not run(["tokenize", "s3://corpus/v1", place, *words])
    return place


def test_every_token_is_stored_once(client: Client, stored: str, tmp_path: Path) -> None:
    ds = mesh.open(stored, kind="tokens", client=client)
    assert len(ds) == len(IDS)
    assert ds.schema()["tokens"].dtype == "uint16"
    assert [ds[number]["tokens"].tolist() for number in (0, 7, 299)] == [IDS[0], IDS[7], IDS[299]]
    manifest = parse_token_manifest(client.get("corpus", f"tokens/{MANIFEST}"))
    assert manifest.complete
    assert len(manifest.shards) > 2
    assert manifest.tokens == sum(map(len, IDS))
    for entry in client.list("corpus", "tokens/"):
        (tmp_path / entry.key.rpartition("/")[2]).write_bytes(client.get("corpus", entry.key))
    assert [row.tolist() for row in mesh.TokenFiles(tmp_path)] == IDS


def test_stored_tokens_are_packed_as_those_of_the_texts(client: Client, stored: str) -> None:
    """Also for 1, 2 and 3 ranks; stored files are other shards, so rows of the same run are compared."""
    one = mesh.open(stored, kind="tokens", client=client).pack("tokens", length=64)
    for world in (1, 2, 3):
        found = []
        for rank in range(world):
            with mesh.Loader(one, 12, seed=3, rank=rank, world=world, output="numpy") as loader:
                for batch in loader:
                    for tokens, segments, status in zip(
                        *batch["tokens", "tokens.segments"], batch.status, strict=True
                    ):
                        if status != 3:
                            last = int(segments.max())
                            found += [tokens[segments == n].tolist() for n in range(1, last + 1)]
        assert sorted(found) == sorted(ids[at : at + 64] for ids in IDS for at in range(0, len(ids), 64))


def test_a_run_goes_on_where_it_stopped(client: Client, stored: str) -> None:
    def stop(samples: int, tokens: int) -> None:
        if samples > 150:
            raise KeyboardInterrupt

    ds, place = tokens_of(client), "s3://corpus/again"
    with pytest.raises(KeyboardInterrupt):
        mesh.write_tokens(ds, place, shard_tokens=4000, on_batch=stop)
    begun = parse_token_manifest(client.get("corpus", f"again/{MANIFEST}"))
    assert 0 < begun.steps < 5
    with pytest.raises(ConfigurationError, match="incomplete"):
        mesh.open(place, kind="tokens", client=client)
    seen = list[int]()
    mesh.write_tokens(ds, place, shard_tokens=4000, on_batch=lambda samples, tokens: seen.append(samples))
    assert len(seen) == 5 - begun.steps
    for entry in client.list("corpus", "again/"):
        if not entry.key.endswith(MANIFEST):
            assert client.get("corpus", entry.key) == client.get(
                "corpus", entry.key.replace("again", "tokens")
            )
    with pytest.raises(ConfigurationError, match="another plan"):
        mesh.write_tokens(tokens_of(client, dtype="int32"), place)


def test_bad_texts_and_files_are_told(client: Client) -> None:
    client.put("corpus", "odd/a.txt", b"the cat")
    client.put("corpus", "odd/b.txt", b"\xff")
    ds = mesh.open("s3://corpus/odd", {"text": "txt"}, client=client)
    ds = ds.map(ops.tokenize("text", "s3://corpus/t.json"))
    with pytest.raises(BadSampleError, match=r"b\.txt"):
        mesh.write_tokens(ds, "s3://corpus/odd-tokens")
    made = mesh.write_tokens(ds, "s3://corpus/odd-tokens", skip_bad=True)
    assert (made.sequences, made.bad) == (1, 1)
    client.put("corpus", "lies/a.bin", b"\1\0")
    client.put("corpus", "lies/a.idx", encode_token_index(np.array([2]), "uint16"))
    with pytest.raises(BadSampleError, match="outside its token file"):
        mesh.open("s3://corpus/lies", kind="tokens", client=client)


def test_bytes_of_files_are_no_tokens(client: Client) -> None:
    raw = mesh.open("s3://corpus/v1/", {"tokens": "jsonl"}, client=client, kind="objects")
    with pytest.raises(ConfigurationError, match=r"ops\.tokenize"):
        mesh.write_tokens(raw, "s3://corpus/none")
    assert list(client.list("corpus", "none")) == []
