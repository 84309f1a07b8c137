"""A few power cuts; `make powercuts` makes many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.powercuts.history import Attempt, History
from tests.powercuts.scene import Scene
from tests.powercuts.store_scene import StoreScene, Worker
from tests.powercuts.traffic import KINDS
from tests.support.fuse_mount import require_fuse

if TYPE_CHECKING:
    from pathlib import Path

require_fuse()


@pytest.mark.parametrize("relaxed", [False, True], ids=["commit", "relaxed"])
def test_nothing_promised_is_lost(tmp_path: Path, relaxed: bool) -> None:
    kinds = [KINDS[kind]() for kind in ("objects", "versions", "uploads", "settings")]
    scene = Scene(tmp_path, seed=11 + relaxed, traffic=kinds, relaxed=relaxed)
    for _ in range(2):
        scene.cut(1.5)
    scene.finish()
    assert scene.report.wrong == []
    assert scene.report.acknowledged > 20


@pytest.mark.parametrize("relaxed", [False, True], ids=["commit", "relaxed"])
def test_maintenance_is_cut_too(tmp_path: Path, relaxed: bool) -> None:
    """Compaction, recovery, fsck and rebuilds, with a sync of each life that fails; without a daemon, so they
    are quick."""
    with Worker() as worker:
        scene = StoreScene(tmp_path, 1 + relaxed, worker, relaxed=relaxed, failing_syncs=True)
        for _ in range(4):
            scene.cut(0.5)
        scene.finish()
    assert scene.report.wrong == []
    assert scene.report.acknowledged > 20


@pytest.mark.parametrize("ignored", [".tar", "/", "data.mdb"], ids=["data", "directories", "index"])
def test_a_sync_that_is_left_out_is_found(tmp_path: Path, ignored: str) -> None:
    """The file system acts on none of these syncs, as if the daemon had not asked for them."""
    scene = Scene(tmp_path, seed=5, options=["--ignore", ignored])
    for _ in range(20):
        scene.cut(0.7)
        if scene.report.wrong:
            return
    pytest.fail(str(scene.report))


def test_what_is_allowed() -> None:
    history = History(
        [Attempt(b"1", 1.0, 1.1), Attempt(b"2", 2.0, 2.1), Attempt(None, 3.0, 3.1), Attempt(b"4", 4.0)]
    )
    assert history.allowed(9.0) == {None, b"4"}
    assert history.allowed(2.5) == {b"2", None, b"4"}
    assert history.allowed(0.5) == {None, b"1", b"2", b"4"}
