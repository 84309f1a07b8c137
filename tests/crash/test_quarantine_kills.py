"""kill −9 while damage is put in quarantine and restored: nothing wrong is given out, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from meshd.store.errors import CorruptExtentError
from meshd.store.records import Meta, Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util.clock import SystemClock
from tests.crash.quarantine_load import DAMAGED, KEYS, LARGE, settings
from tests.support.store_calls import put_object, put_part

ROOT = Path(__file__).parents[2]
KILLED = -9
FAILPOINTS = [
    "store.quarantine.confined",
    "store.scrub.remembered",
    "store.replica.placed",
    "store.own.after_rename",
    "store.index.before_commit=kill:after 2",
    "store.index.after_commit=kill:after 3",
]


def _flip(store: Store, key: str) -> None:
    record = store.get("b", key)
    assert record is not None
    extent = record.extents[0]
    with open(store._disks.path(extent.disk, extent.file), "r+b") as file:
        byte = os.pread(file.fileno(), 1, extent.offset)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), extent.offset)


def _fill(place: Path) -> None:
    async def run() -> None:
        with closing(Store.open(settings(place), writer="s", clock=SystemClock())) as store:
            for key in ("small", "large", "sound"):
                await put_object(store, key, KEYS[key], size=len(KEYS[key]))
            upload = await store.create_upload(Upload("", "b", "parts"))
            await put_part(store, upload, 1, KEYS["parts"][:LARGE])
            await put_part(store, upload, 2, KEYS["parts"][LARGE:])
            await store.complete_upload(upload, [1, 2], Meta("parts"))
            for key in DAMAGED:
                _flip(store, key)

    asyncio.run(run())


def _run(place: Path, failpoints: str = "") -> int:
    line = [sys.executable, "-m", "tests.crash.quarantine_load", str(place)]
    env = os.environ | {"MESHD_FAILPOINTS": failpoints}
    return subprocess.run(line, cwd=ROOT, env=env, check=False, timeout=60).returncode


def _read(place: Path) -> dict[str, bytes | None]:
    """What readers get; None for what they are refused."""
    found: dict[str, bytes | None] = {}
    with closing(Store.open(settings(place), writer="s", clock=SystemClock())) as store:
        for key in KEYS:
            record = store.get("b", key)
            assert record is not None
            try:
                found[key] = store.read_range(record, 0, record.size)
            except CorruptExtentError:
                found[key] = None
    return found


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_killed_in_the_middle(failpoint: str, tmp_path: Path) -> None:
    place = tmp_path / "data"
    _fill(place)
    assert _run(place, failpoint if "=" in failpoint else f"{failpoint}=kill") == KILLED
    Store.recover(settings(place))
    kinds = {problem.kind for problem in check_store(settings(place)).problems}
    assert kinds <= {"quarantined", "damaged"}
    for key, body in _read(place).items():
        assert body in (None, KEYS[key])
    assert _run(place) == 0
    assert check_store(settings(place)).problems == []
    assert _read(place) == KEYS
    rebuild_index(settings(place))
    assert check_store(settings(place)).problems == []
    assert _read(place) == KEYS
