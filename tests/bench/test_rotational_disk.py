"""What plain reads of files ask of a rotational disk, counted below the file system."""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.rotational_disk import MIB, rotational_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.rotational_disk import RotationalDisk

KIB = 1 << 10
SIZE = 32 * MIB
PHOTOGRAPH = 64 * KIB
FEW = 4
"""Extents in which ext4 may put a file of `SIZE` on an empty disk."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RotationalDisk]:
    with rotational_disk(tmp_path / "drive") as made:
        yield made


@contextmanager
def opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write(disk: RotationalDisk, size: int = SIZE) -> Path:
    file = disk.path / "photographs"
    file.write_bytes(random.Random(0).randbytes(size))
    disk.drop_caches()
    return file


def test_a_file_read_from_beginning_to_end_costs_few_seeks(disk: RotationalDisk) -> None:
    with opened(write(disk)) as file:
        for offset in range(0, SIZE, PHOTOGRAPH):
            os.pread(file, PHOTOGRAPH, offset)
    seen = disk.stats()
    assert seen.bytes == SIZE
    assert 1 <= seen.seeks <= FEW
    assert seen.seek_s < seen.media_s
    assert sum(request.length for request in seen.requests) == SIZE


def test_random_reads_cost_one_seek_each(disk: RotationalDisk) -> None:
    """A tenth of the photographs, none within 512 KiB behind another."""
    with opened(write(disk)) as file:
        places = list(range(0, SIZE, MIB))
        random.Random(1).shuffle(places)
        for offset in places:
            os.pread(file, PHOTOGRAPH, offset)
    seen = disk.stats()
    assert len(seen.requests) == len(places)
    assert all(request.length >= PHOTOGRAPH for request in seen.requests)
    assert len(places) - 1 <= seen.seeks <= len(places)  # two that follow each other may be neighbours
    assert seen.seek_s > 10 * seen.media_s


def test_the_same_reads_in_order_and_across_small_gaps_cost_none(disk: RotationalDisk) -> None:
    with opened(write(disk)) as file:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: the gaps are not read
        for offset in range(0, SIZE, 256 * KIB):
            os.pread(file, PHOTOGRAPH, offset)
    seen = disk.stats()
    assert seen.seeks <= FEW
    assert seen.bytes == SIZE // 4
    assert seen.passing_s > 2 * seen.media_s


def test_what_is_in_memory_asks_the_disk_for_nothing(disk: RotationalDisk) -> None:
    file = write(disk)
    file.read_bytes()
    first = disk.stats()
    file.read_bytes()
    assert disk.stats() == first
    disk.drop_caches()
    assert disk.stats().requests == ()
    file.read_bytes()
    assert disk.stats().bytes == first.bytes


def test_the_disk_says_that_it_is_rotational(disk: RotationalDisk) -> None:
    number = (disk.path.stat()).st_dev
    queue = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/queue")
    assert queue.joinpath("rotational").read_text().strip() == "1"


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with rotational_disk(tmp_path / "drive") as made:
        path, device = made.path, made.device
        assert path.is_mount()
    assert not path.is_mount()
    assert list(path.iterdir()) == []
    assert str(tmp_path) not in backing_file(device)
    assert not path.with_name("image").exists()


def backing_file(device: Path) -> str:
    """Empty when the loop device is free; other tests take one that was given back."""
    try:
        return Path("/sys/block", device.name, "loop/backing_file").read_text()
    except OSError:
        return ""
