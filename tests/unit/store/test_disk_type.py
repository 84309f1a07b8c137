"""What kind of disk a file is on: as the kernel reports it, or as configured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from meshd.store.disks.disk_type import (
    RotationalDisks,
    advice_limit,
    is_rotational,
    reads_in_flight,
    request_limit,
)

if TYPE_CHECKING:
    from pathlib import Path

DISK, PARTITION, OTHER = os.makedev(8, 0), os.makedev(8, 1), os.makedev(0, 42)


@pytest.fixture
def block(tmp_path: Path) -> Path:
    """As /sys/dev/block: links by number to devices; a partition is a folder in that of its disk."""
    disk = tmp_path / "devices" / "sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "sda1").mkdir()
    (disk / "inflight").write_text("       3        1\n")
    (disk / "sda1" / "inflight").write_text("       0        0\n")
    (disk / "queue" / "rotational").write_text("1\n")
    (disk / "queue" / "max_sectors_kb").write_text("1280\n")
    (disk / "queue" / "max_segments").write_text("168\n")
    (disk / "queue" / "read_ahead_kb").write_text("128\n")
    links = tmp_path / "block"
    links.mkdir()
    (links / "8:0").symlink_to(disk)
    (links / "8:1").symlink_to(disk / "sda1")
    return links


def test_a_partition_is_as_its_disk(block: Path) -> None:
    assert is_rotational(DISK, block)
    assert is_rotational(PARTITION, block)
    assert advice_limit(PARTITION, block) == 1280 << 10
    assert (request_limit(PARTITION, block), request_limit(OTHER, block)) == (168 * 4096, 128 << 10)
    assert [reads_in_flight(each, block) for each in (DISK, PARTITION, OTHER)] == [3, 3, 0]


def test_what_reports_nothing_is_not_rotational(block: Path) -> None:
    assert not is_rotational(OTHER, block)
    assert advice_limit(OTHER, block) == 128 << 10


@pytest.mark.parametrize("place", ["pci0/virtio2/block/vda", "vbd-768/block/xvda", "virtio1/host0/block/sda"])
def test_virtual_disks_report_platters_that_they_do_not_have(place: str, tmp_path: Path) -> None:
    queue = tmp_path / "devices" / place / "queue"
    queue.mkdir(parents=True)
    (queue / "rotational").write_text("1\n")
    links = tmp_path / "block"
    links.mkdir()
    (links / "8:0").symlink_to(queue.parent)
    assert not is_rotational(DISK, links)


@pytest.mark.parametrize(("given", "told"), [("rotational", True), ("solid-state", False)])
def test_the_setting_decides(given: str, told: bool, tmp_path: Path) -> None:
    disks = RotationalDisks(given)  # type: ignore[arg-type]
    assert disks.includes(OTHER) is told
    assert disks.any_of([tmp_path]) is told
    assert not disks.any_of([])
    assert not disks.any_of([tmp_path / "failed"])
