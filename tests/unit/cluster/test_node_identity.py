"""The file that says whose a directory is, and how often it was started."""

from __future__ import annotations

import asyncio
import os
import stat
from typing import TYPE_CHECKING

from meshd.cluster.data_dir_identity import NodeIdentity, increment_generation, read_identity
from meshd.util.clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_count_is_on_disk_before_the_control_store_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power would leave a directory that looks like an older image of itself."""
    durable: list[int] = []
    sync = os.fsync

    def noting(fd: int) -> None:
        sync(fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            found = read_identity(tmp_path)
            assert found is not None
            durable.append(found.count)

    class Control(MemoryControl):
        async def put(self, key: str, value: bytes, *, expect: int | None = None) -> int:
            assert f'"count":{durable[-1]}'.encode() in value
            return await super().put(key, value, expect=expect)

    monkeypatch.setattr(os, "fsync", noting)
    control, belonging = Control(ManualClock()), NodeIdentity("mesh", "n1", "d1")
    for count in (1, 2):
        belonging = asyncio.run(increment_generation(control, tmp_path, belonging))
        assert (belonging.count, durable[-1]) == (count, count)
