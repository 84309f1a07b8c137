"""GETs of small objects that are not in the page cache: which bytes they read from the disk."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.daemons import Daemon
from tests.support.rotational_disk import READ_AHEAD_KIB, rotational_disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.rotational_disk import RotationalDisk

OBJECTS, SIZE, APART = 96, 64 << 10, 24
LAYOUTS: dict[str, dict[str, Any]] = {"whole": {}, "range": {"Range": "bytes=16384-32767"}}


def body(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RotationalDisk, Daemon]]:
    """Small objects that were written one after the other, so that they lie next to each other."""
    folder: Path = tmp_path_factory.mktemp("node")
    with rotational_disk(folder / "drive") as disk:
        where = ("--disk", str(disk.path / "data"), "--index-dir", str(folder / "index"))
        daemon = Daemon.start(folder / "data", args=where)
        with contextlib.closing(daemon), contextlib.closing(daemon.client()) as client:
            client.create_bucket(Bucket="small")
            for number in range(OBJECTS):
                client.put_object(Bucket="small", Key=f"{number:03d}", Body=body(number))
            yield disk, daemon


@pytest.mark.parametrize("asked", LAYOUTS)
def test_a_get_reads_its_own_bytes_of_the_disk(stored: tuple[RotationalDisk, Daemon], asked: str) -> None:
    """With the kernel's read-ahead, but not the objects that follow it in the file."""
    disk, daemon = stored
    disk.drop_caches()
    numbers = range(0, OBJECTS, APART)
    with contextlib.closing(daemon.client()) as client:
        for number in numbers:
            answer = client.get_object(Bucket="small", Key=f"{number:03d}", **LAYOUTS[asked])
            expected = body(number) if asked == "whole" else body(number)[16384:32768]
            assert answer["Body"].read() == expected
    seen = disk.stats()
    assert seen.bytes >= len(numbers) * len(expected)
    assert seen.bytes <= len(numbers) * (len(expected) + 2 * (READ_AHEAD_KIB << 10)), seen.requests
