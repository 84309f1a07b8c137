"""Jobs whose sources are on a rotational disk: which reads reach the disk, counted below the file system."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.daemons import Daemon
from tests.support.job_fixtures import done, members, objects
from tests.support.rotational_disk import rotational_disk
from tests.support.scattered_objects import contents, put_scattered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.rotational_disk import RotationalDisk

OBJECTS, SIZE = 480, 64 << 10
FORMS: dict[str, dict[str, Any]] = {
    "in order of key": {},
    "shuffled": {"shuffle": 3},
}


@pytest.fixture
def read_ahead() -> str:
    return "512MiB"


@pytest.fixture
def stored(tmp_path: Path, read_ahead: str) -> Iterator[tuple[RotationalDisk, Daemon]]:
    """Objects that four writers have put on the disk in no order of key. A node of its own for each test:
    shards that one has written are indexed later, which reads them."""
    with rotational_disk(tmp_path / "drive", size=256 << 20) as disk:
        where = ("--disk", str(disk.path / "data"), "--index-dir", str(tmp_path / "index"))
        options = ("--read-ahead", read_ahead, "--durability", "relaxed")
        daemon = Daemon.start(tmp_path / "data", args=(*where, *options), workers=2)
        with contextlib.closing(daemon), contextlib.closing(daemon.client()) as client:
            put_scattered(client, "scattered", contents(OBJECTS, SIZE))
            client.create_bucket(Bucket="packed")
            yield disk, daemon


@pytest.mark.parametrize("form", FORMS)
def test_sources_are_read_in_the_order_of_the_disk(stored: tuple[RotationalDisk, Daemon], form: str) -> None:
    disk, daemon = stored
    disk.drop_caches()
    done(
        daemon,
        kind="shard",
        source="s3://scattered/train",
        target="s3://packed/shards",
        count=100,
        **FORMS[form],
    )
    seen = disk.stats()
    assert OBJECTS * SIZE <= seen.bytes < 1.2 * OBJECTS * SIZE, seen
    assert seen.seeks < OBJECTS / 8, seen
    assert seen.seek_s < 1.5 * seen.media_s, seen
    with contextlib.closing(daemon.client()) as client:
        files = members(*objects(client, "packed", "shards/").values())
    assert files == contents(OBJECTS, SIZE)


def materialize(daemon: Daemon, form: dict[str, Any]) -> None:
    view = {"kind": "shards", "count": 100, "prefix": "train/", **form}
    request = {"bucket": "scattered", "name": "shards", "view": view}
    assert daemon.request("POST", "/-/views", json.dumps(request).encode()).status == 200
    done(daemon, kind="materialize", source="s3://scattered--shards/", target="s3://packed/shards")


@pytest.mark.parametrize("form", FORMS)
def test_the_objects_of_a_view_are_read_in_the_order_of_the_disk(
    stored: tuple[RotationalDisk, Daemon], form: str
) -> None:
    disk, daemon = stored
    disk.drop_caches()
    materialize(daemon, FORMS[form])
    seen = disk.stats()
    assert OBJECTS * SIZE <= seen.bytes < 1.2 * OBJECTS * SIZE, seen
    assert seen.seeks < OBJECTS / 8, seen
    assert seen.seek_s < 1.5 * seen.media_s, seen
    with contextlib.closing(daemon.client()) as client:
        files = members(*objects(client, "packed", "shards/").values())
    assert files == contents(OBJECTS, SIZE)


@pytest.mark.parametrize("read_ahead", ["64MiB"])
def test_objects_of_a_view_that_are_larger_than_a_window_are_read_in_several(
    stored: tuple[RotationalDisk, Daemon],
) -> None:
    disk, daemon = stored
    disk.drop_caches()
    materialize(daemon, {"count": 400})
    seen = disk.stats()
    assert OBJECTS * SIZE <= seen.bytes < 1.2 * OBJECTS * SIZE, seen
    with contextlib.closing(daemon.client()) as client:
        files = members(*objects(client, "packed", "shards/").values())
    assert files == contents(OBJECTS, SIZE)
