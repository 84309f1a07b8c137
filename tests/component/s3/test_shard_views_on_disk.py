"""GETs of shards of a view by S3 clients: which reads reach a rotational disk."""

from __future__ import annotations

import contextlib
import io
import json
import random
import tarfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.support.daemons import Daemon
from tests.support.rotational_disk import rotational_disk
from tests.support.scattered_objects import contents, put_scattered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from tests.support.rotational_disk import RotationalDisk

OBJECTS, SIZE, COUNT = 480, 64 << 10, 24


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RotationalDisk, Daemon, Any]]:
    """A view in shards of 24, of objects that four writers have put on the disk in no order of key."""
    folder = tmp_path_factory.mktemp("node")
    with rotational_disk(folder / "drive") as disk:
        where = ("--disk", str(disk.path / "data"), "--index-dir", str(folder / "index"))
        options = ("--read-ahead", "512MiB", "--durability", "relaxed")
        daemon = Daemon.start(folder / "data", args=(*where, *options))
        with contextlib.closing(daemon), contextlib.closing(daemon.client()) as client:
            put_scattered(client, "scattered", contents(OBJECTS, SIZE))
            put_scattered(client, "labelled", labels())
            view = {"kind": "shards", "count": COUNT, "prefix": "train/"}
            request = {"bucket": "scattered", "name": "shards", "view": view}
            assert daemon.request("POST", "/-/views", json.dumps(request).encode()).status == 200
            yield disk, daemon, client


def labels() -> dict[str, bytes]:
    """JSON files of some 3 KB."""
    files = {}
    for number in range(OBJECTS):
        ballast = random.Random(number).randbytes(1500).hex()
        files[f"{number:04d}.json"] = json.dumps({"rank": OBJECTS - number, "ballast": ballast}).encode()
    return files


def shard_keys(client: Any) -> list[str]:
    return [entry["Key"] for entry in client.list_objects_v2(Bucket="scattered--shards")["Contents"]]


def members(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [(info.name, archive.extractfile(info)) for info in archive]
        return {name.rpartition("/")[2]: file.read() for name, file in files if file is not None}


@pytest.mark.parametrize("connections", [1, 4])
def test_shards_in_order_are_read_in_the_order_of_the_disk(
    stored: tuple[RotationalDisk, Daemon, Any], connections: int
) -> None:
    disk, _, client = stored
    keys = shard_keys(client)
    assert len(keys) == OBJECTS // COUNT
    disk.drop_caches()
    with ThreadPoolExecutor(connections) as pool:
        bodies = list(
            pool.map(lambda key: client.get_object(Bucket="scattered--shards", Key=key)["Body"].read(), keys)
        )
    seen = disk.stats()
    found = {name: data for body in bodies for name, data in members(body).items()}
    assert found == contents(OBJECTS, SIZE)
    assert OBJECTS * SIZE <= seen.bytes < 1.2 * OBJECTS * SIZE, seen
    assert seen.seeks < OBJECTS / 4, seen


def test_shards_in_no_order_are_read_each_in_the_order_of_the_disk(
    stored: tuple[RotationalDisk, Daemon, Any],
) -> None:
    disk, _, client = stored
    keys = shard_keys(client)[::-1]
    disk.drop_caches()
    for key in keys:
        client.get_object(Bucket="scattered--shards", Key=key)["Body"].read()
    seen = disk.stats()
    assert OBJECTS * SIZE <= seen.bytes < 1.2 * OBJECTS * SIZE, seen
    assert seen.seeks < 0.8 * OBJECTS, seen


def test_a_small_range_loads_no_more_than_it_sends(stored: tuple[RotationalDisk, Daemon, Any]) -> None:
    disk, _, client = stored
    keys = shard_keys(client)
    disk.drop_caches()
    for key in keys:
        body = client.get_object(Bucket="scattered--shards", Key=key, Range="bytes=0-1023")["Body"].read()
        assert len(body) == 1024
    seen = disk.stats()
    assert seen.bytes < 3 * len(keys) * SIZE, seen


def test_files_that_shards_are_sorted_by_are_read_in_the_order_of_the_disk(
    stored: tuple[RotationalDisk, Daemon, Any],
) -> None:
    disk, daemon, client = stored
    disk.drop_caches()
    view = {"kind": "shards", "count": COUNT, "prefix": "train/", "sort": "json.rank"}
    request = {"bucket": "labelled", "name": "ranked", "view": view}
    assert daemon.request("POST", "/-/views", json.dumps(request).encode()).status == 200
    first = client.list_objects_v2(Bucket="labelled--ranked")["Contents"][0]["Key"]
    seen = disk.stats()
    names = members(client.get_object(Bucket="labelled--ranked", Key=first)["Body"].read())
    assert next(iter(names)) == f"{OBJECTS - 1:04d}.json"
    assert seen.seeks < OBJECTS / 8, seen
