"""How much the decoded cache takes if no size is configured, and what the settings mean."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from meshd.config import NodeSettings, StoreSettings, TransformSettings
from meshd.config.options import parse_kept
from meshd.process import memory_usage
from meshd.process.wiring import decoded_cache
from meshd.process.wiring.decoded_cache import default_bytes, is_rotational, open_decoded_cache
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path


def sysfs(root: Path, rotational: str, *, partition: bool) -> Path:
    """What the kernel tells of the device of `root`."""
    device = root.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    disk = root / "devices" / "sda"
    queue = disk / "queue"
    queue.mkdir(parents=True)
    (queue / "rotational").write_text(f"{rotational}\n")
    links = root / "dev" / "block"
    links.mkdir(parents=True)
    if partition:
        (disk / "sda1").mkdir()
    (links / name).symlink_to(disk / "sda1" if partition else disk)
    return root


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("rotational", ["0", "1"])
def test_what_the_kernel_tells_of_the_disk(tmp_path: Path, rotational: str, partition: bool) -> None:
    assert is_rotational(tmp_path, sysfs(tmp_path, rotational, partition=partition)) == (rotational == "1")


def test_a_disk_of_which_nothing_is_told_is_none(tmp_path: Path) -> None:
    assert not is_rotational(tmp_path, tmp_path)


def test_a_rotational_disk_gets_no_more_than_fits_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_usage, "free_memory", lambda: 6 << 20)
    for rotational, most in ((True, 3 << 20), (False, 1 << 60)):
        monkeypatch.setattr(decoded_cache, "is_rotational", lambda _, found=rotational: found)
        found = os.statvfs(tmp_path)
        assert default_bytes(tmp_path) == pytest.approx(
            min(most, found.f_bavail * found.f_frsize // 4), rel=0.05
        )


def test_off_keeps_nothing_and_a_start_empties_the_directory(tmp_path: Path) -> None:
    left = tmp_path / "decoded" / "00000000.seg"
    left.parent.mkdir()
    left.write_bytes(b"of an earlier process")
    for size, exists in ((0, True), (1 << 20, False)):
        settings = NodeSettings(
            "n", StoreSettings.at(tmp_path), transform=TransformSettings(decoded_cache_bytes=size)
        )
        cache = asyncio.run(open_decoded_cache(settings, SystemClock()))
        assert (cache is None) == (size == 0)
        assert left.exists() == exists


@pytest.mark.parametrize(
    ("text", "size"), [("auto", None), ("off", 0), (False, 0), ("0", 0), ("200GB", 200 * 10**9)]
)
def test_the_setting(text: object, size: int | None) -> None:
    assert parse_kept(text) == size


def test_a_wrong_setting() -> None:
    with pytest.raises(ValueError, match="auto, off"):
        parse_kept("most")
