"""The file that says whose a directory is, and how often it was started."""

from __future__ import annotations

import asyncio
import os
import stat
from typing import TYPE_CHECKING

from meshd.cluster import data_dir_identity
from meshd.cluster.data_dir_identity import (
    NodeIdentity,
    increment_generation,
    latest_starts,
    maintain_generation,
    read_identity,
)
from meshd.util import shared_counters
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl

if TYPE_CHECKING:
    from collections.abc import Callable
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


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.005)


def test_the_other_owners_see_a_start_and_the_death_of_a_process_and_no_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        control = MemoryControl(ManualClock())
        identity = await increment_generation(control, tmp_path, NodeIdentity("mesh", "n1", "d1"))
        assert latest_starts(control) == {"n1": 1}
        monkeypatch.setattr(data_dir_identity, "_DEATH_CHECK", 0.01)
        monkeypatch.setattr(data_dir_identity, "_EVERY", 0.05)

        def count() -> int:
            found = read_identity(tmp_path)
            assert found is not None
            return found.count

        running = asyncio.ensure_future(maintain_generation(control, tmp_path, identity))
        try:
            await _until(lambda: count() >= 3)
            assert latest_starts(control) == {"n1": 1}
            monkeypatch.setattr(data_dir_identity, "_EVERY", 3600.0)
            shared_counters.record_death()
            await _until(lambda: latest_starts(control)["n1"] > 3)
        finally:
            running.cancel()
        identity = await increment_generation(control, tmp_path, identity)
        assert latest_starts(control) == {"n1": identity.count}

    asyncio.run(run())


def test_an_entry_of_an_earlier_release_says_nothing_of_a_start() -> None:
    async def run() -> None:
        control = MemoryControl(ManualClock())
        await control.put("directories/n1", b'{"directory":"d1","count":7}')
        assert latest_starts(control) == {"n1": 0}

    asyncio.run(run())
