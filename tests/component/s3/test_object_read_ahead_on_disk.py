"""Copies of folders by `mesh cp` and `mesh sync`, and gathers: which reads reach a rotational disk."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk import Item, connect
from tests.support.daemons import Daemon
from tests.support.job_fixtures import objects
from tests.support.rotational_disk import rotational_disk
from tests.support.scattered_objects import contents, put_scattered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.rotational_disk import RotationalDisk

OBJECTS, SIZE = 480, 64 << 10


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RotationalDisk, Daemon]]:
    """Objects that four writers have put on the disk in no order of key."""
    folder = tmp_path_factory.mktemp("node")
    with rotational_disk(folder / "drive") as disk:
        where = ("--disk", str(disk.path / "data"), "--index-dir", str(folder / "index"))
        options = ("--read-ahead", "512MiB", "--durability", "relaxed")
        daemon = Daemon.start(folder / "data", args=(*where, *options), workers=2)
        with contextlib.closing(daemon), contextlib.closing(daemon.client()) as client:
            put_scattered(client, "scattered", contents(OBJECTS, SIZE))
            client.create_bucket(Bucket="copies")
            yield disk, daemon


@pytest.fixture
def daemon(stored: tuple[RotationalDisk, Daemon]) -> Daemon:
    return stored[1]


@pytest.mark.parametrize("command", ["cp", "sync"])
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_folder_is_copied_in_the_order_of_the_disk(
    stored: tuple[RotationalDisk, Daemon],
    mesh: Callable[..., str],
    tmp_path: Path,
    command: str,
    place: str,
) -> None:
    disk, daemon = stored
    target = str(tmp_path / "here") if place == "folder" else f"s3://copies/{command}"
    disk.drop_caches()
    mesh(*(["cp", "-r"] if command == "cp" else ["sync"]), "s3://scattered/train", target)
    seen = disk.stats()
    assert OBJECTS * SIZE <= seen.bytes < 1.2 * OBJECTS * SIZE, seen
    assert seen.seeks < OBJECTS / 8, seen
    if place == "folder":
        found = {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}
    else:
        with contextlib.closing(daemon.client()) as client:
            found = objects(client, "copies", f"{command}/")
    assert found == contents(OBJECTS, SIZE)


def test_a_gather_reads_in_the_order_of_the_disk(
    stored: tuple[RotationalDisk, Daemon], mesh: Callable[..., str]
) -> None:
    disk, _ = stored
    names = list(contents(OBJECTS, SIZE))
    disk.drop_caches()
    with connect() as client:
        answers = client.gather(Item("scattered", f"train/{name}") for name in names)
        found = {name: bytes(answer.data) for name, answer in zip(names, answers, strict=True)}
    seen = disk.stats()
    assert found == contents(OBJECTS, SIZE)
    assert OBJECTS * SIZE <= seen.bytes < 1.2 * OBJECTS * SIZE, seen
    assert seen.seeks < OBJECTS / 8, seen


def loaded(daemon: Daemon, **document: Any) -> Any:
    answer = daemon.request("POST", "/-/read-ahead", json.dumps(document).encode())
    found = json.loads(answer.body)
    return found["loaded"] if answer.status == 200 else (answer.status, found["error"]["code"])


def test_what_cannot_be_loaded_is_left_to_its_reader(daemon: Daemon) -> None:
    with contextlib.closing(daemon.client()) as client:
        client.put_object(Bucket="copies", Key="large", Body=bytes(2 << 20))
    assert loaded(daemon, bucket="scattered", keys=["none", "train/0000.bin"]) == 2
    assert loaded(daemon, bucket="scattered", keys=["none"]) == 0
    assert loaded(daemon, bucket="copies", keys=["large"]) == 0
    assert loaded(daemon, bucket="no-such-bucket", keys=["a"]) == (404, "NoSuchBucket")
    assert loaded(daemon, bucket="scattered", keys=[]) == (400, "BadRequest")
    assert loaded(daemon, bucket="scattered", keys=["a"] * 4097) == (400, "BadRequest")
