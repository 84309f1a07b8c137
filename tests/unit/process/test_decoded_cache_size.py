"""How much the decoded cache takes if no size is configured, and what the settings mean."""

from __future__ import annotations

import asyncio
import math
import os
from typing import TYPE_CHECKING

import pytest

from meshd.config import NodeSettings, StoreSettings, TransformSettings
from meshd.config.options import parse_kept
from meshd.process import memory_usage
from meshd.process.wiring.decoded_cache import default_bytes, open_decoded_cache
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

    from meshd.config import DiskType


def test_a_rotational_disk_gets_no_more_than_fits_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_usage, "free_memory", lambda: 6 << 20)
    found = os.statvfs(tmp_path)
    assert default_bytes(tmp_path, rotational=True) == 3 << 20
    assert default_bytes(tmp_path, rotational=False) == pytest.approx(
        found.f_bavail * found.f_frsize // 4, rel=0.05
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


def test_the_time_of_a_rotational_disk_counts(tmp_path: Path) -> None:
    def rate(disk_type: DiskType, directory: Path | None = None) -> float:
        settings = NodeSettings(
            "n",
            StoreSettings.at(tmp_path, disk_type=disk_type),
            transform=TransformSettings(decoded_cache_dir=directory),
        )
        cache = asyncio.run(open_decoded_cache(settings, SystemClock()))
        assert cache is not None
        return cache.disk_rate

    assert rate("rotational") < 1e9
    assert rate("solid-state") == math.inf
    assert rate("rotational", tmp_path / "elsewhere") == rate("auto")  # `disk-type` is of the store's disks


@pytest.mark.parametrize(
    ("text", "size"), [("auto", None), ("off", 0), (False, 0), ("0", 0), ("200GB", 200 * 10**9)]
)
def test_the_setting(text: object, size: int | None) -> None:
    assert parse_kept(text) == size


def test_a_wrong_setting() -> None:
    with pytest.raises(ValueError, match="auto, off"):
        parse_kept("most")
