"""Datasets, batches, gather and the command over archives of every kind: the same as over tars."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pytest

import meshsdk as mesh
from meshsdk import ops
from meshsdk.errors import BadSampleError, NotFoundError, ServerError
from tests.support.archive_files import KINDS, archive_of
from tests.support.interpreters import program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

Item = mesh.Item


def _picture(number: int) -> bytes:
    noise = np.random.default_rng(number).integers(0, 256, (40 + number, 50, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", noise)[1])


SHARDS = [
    {
        f"part/{number:03}.{ext}": _picture(number) if ext == "jpg" else str(number).encode()
        for number in range(start, start + 12)
        for ext in ("jpg", "cls")
    }
    for start in (0, 12, 24)
]


@pytest.fixture
def client(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


def fill(client: mesh.Client, bucket: str, kind: str) -> None:
    for number, files in enumerate(SHARDS):
        client.put(bucket, f"{kind}/{number}.{kind}", archive_of(kind, files))


def digest(client: mesh.Client, source: str, **more: Any) -> str:
    """Of all batches of an epoch."""
    ds = mesh.open(source, fields={"image": "jpg", "label": "cls"}, client=client).map(
        ops.decode("image"), ops.random_resized_crop("image", 24), ops.int_label("label")
    )
    whole = hashlib.sha256()
    with mesh.Loader(ds, 8, seed=3, output="numpy", **more) as loader:
        for batch in loader:
            whole.update(np.ascontiguousarray(batch["image"]).tobytes())
            whole.update(np.ascontiguousarray(batch["label"]).tobytes())
    return whole.hexdigest()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tar"])
def test_batches_are_the_same_as_over_tars(client: mesh.Client, bucket: str, kind: str) -> None:
    fill(client, bucket, "tar")
    fill(client, bucket, kind)
    for shuffle in (True, mesh.Blocks(shards=2)):
        expected = digest(client, f"s3://{bucket}/tar", shuffle=shuffle)
        assert digest(client, f"s3://{bucket}/{kind}", shuffle=shuffle) == expected
    one = mesh.open(f"s3://{bucket}/{kind}/1.{kind}", client=client)  # its fields are guessed
    assert (len(one), sorted(one.fields)) == (12, ["image", "label"])


@pytest.mark.parametrize("kind", KINDS)
def test_gather_reads_members_and_their_ranges(client: mesh.Client, bucket: str, kind: str) -> None:
    fill(client, bucket, kind)
    wanted = []
    for number, files in enumerate(SHARDS):
        for name, data in files.items():
            key = f"{kind}/{number}.{kind}"
            wanted.append((Item(bucket, key, member=name), data))
            wanted.append((Item(bucket, key, member=name, offset=1, length=len(data) - 1), data[1:]))
    random.Random(1).shuffle(wanted)
    got = list(client.gather([item for item, _ in wanted]))
    assert [answer.error for answer in got] == [None] * len(wanted)
    assert [bytes(answer.data) for answer in got] == [data for _, data in wanted]
    answers = list(client.gather([Item(bucket, f"{kind}/0.{kind}", member="none")]))
    assert isinstance(answers[0].error, NotFoundError)


def test_damaged_archives_are_marked_and_named(client: mesh.Client, bucket: str) -> None:
    good = archive_of("tgz", SHARDS[0])
    client.put(bucket, "d/bad.tgz", good[: len(good) // 2])
    client.put(bucket, "good.tgz", good)
    asked = [Item(bucket, "d/bad.tgz", member="x"), Item(bucket, "good.tgz", member="part/000.cls")]
    got = list(client.gather(asked))
    assert isinstance(got[0].error, BadSampleError)
    assert got[1].error is None
    assert bytes(got[1].data) == b"0"
    with pytest.raises(BadSampleError, match=r"d/bad\.tgz cannot be read as an archive"):
        mesh.open(f"s3://{bucket}/d", fields={"image": "jpg"}, client=client)


def test_the_same_bytes_under_another_ending_are_another_archive(client: mesh.Client, bucket: str) -> None:
    """What is known of an archive holds for its bytes, read as its name says."""
    packed = archive_of("tgz", SHARDS[0])
    for ending in ("tgz", "tar", "zip"):
        client.put(bucket, f"{ending}/a.{ending}", packed)
    assert len(mesh.open(f"s3://{bucket}/tgz", fields={"image": "jpg"}, client=client)) == 12
    for ending in ("tar", "zip"):
        with pytest.raises(BadSampleError, match=rf"a\.{ending} cannot be read as an archive"):
            mesh.open(f"s3://{bucket}/{ending}", fields={"image": "jpg"}, client=client)


def test_the_clients_own_reading(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "x.zip", archive_of("zip", SHARDS[0]))
    assert client.get(bucket, "x.zip", member="part/003.cls") == b"3"
    some = client.get(bucket, "x.zip", member="part/003.jpg", offset=2, length=4)
    assert some == SHARDS[0]["part/003.jpg"][2:6]
    listed = [(entry.name, entry.size) for entry in client.members(bucket, "x.zip")]
    assert listed == [(name, len(data)) for name, data in sorted(SHARDS[0].items())]
    rest = client.members(bucket, "x.zip", "part/00", start_after="part/009.cls")
    assert [entry.name for entry in rest] == ["part/009.jpg"]
    with pytest.raises(NotFoundError):
        list(client.members(bucket, "none.zip"))
    client.put(bucket, "bad.zip", b"bad")
    with pytest.raises(ServerError, match="no end record"):
        client.member_page(bucket, "bad.zip")


def test_the_command(daemon: Daemon, client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "x.tgz", archive_of("tgz", SHARDS[0]))

    def run(*words: str, code: int = 0) -> str:
        env = os.environ | {
            "MESH_ENDPOINT": daemon.endpoint,
            "AWS_ACCESS_KEY_ID": daemon.access_key,
            "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        }
        command = [program("mesh"), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == code, done.stderr
        return done.stdout if not code else done.stderr

    lines = [json.loads(line) for line in run("archive", "ls", "--json", f"s3://{bucket}/x.tgz").splitlines()]
    assert [line["name"] for line in lines] == sorted(SHARDS[0])
    assert "24 files" in run("archive", "ls", f"s3://{bucket}/x.tgz")
    assert "kind   tgz" in run("archive", "show", f"s3://{bucket}/x.tgz")
    assert run("cat", lines[0]["url"]) == "0"
    assert "part/" in run("ls", f"s3://{bucket}/x.tgz/-/")
    assert "does not have the extension of an archive" in run("archive", "ls", f"s3://{bucket}", code=2)
    assert "no file" in run("archive", "ls", f"s3://{bucket}/x.tgz", "--prefix", "z", code=3)


def test_shards_of_members_come_back_as_a_tar(daemon: Daemon, client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "x.tar.zst", archive_of("tar.zst", SHARDS[0]))
    items = [{"bucket": bucket, "key": "x.tar.zst", "member": name} for name in SHARDS[0]]
    body = json.dumps({"items": items, "format": "tar"}).encode()
    answer = daemon.request("POST", "/-/gather", body)
    with tarfile.open(fileobj=io.BytesIO(answer.body)) as tar:
        got = {name: tar.extractfile(name) for name in tar.getnames()}
        assert {name: file.read() for name, file in got.items() if file is not None} == SHARDS[0]
