"""A few power cuts; `make powercuts` makes many."""

from __future__ import annotations

import random
import re
import subprocess
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest
from botocore.exceptions import ClientError

from meshd.control.etcd import durability_barrier
from meshd.control.etcd.durability_barrier import may_answer_early
from meshd.process.local_etcd import find_etcd
from tests.powercuts import traffic
from tests.powercuts.control_scene import ControlScene
from tests.powercuts.history import Attempt, History
from tests.powercuts.power_cut import recorded
from tests.powercuts.scene import Scene
from tests.powercuts.scenes import BUG_CUTS, BUGS, KINDS
from tests.powercuts.shrink import keep, minimal
from tests.powercuts.store_scene import StoreScene, Worker
from tests.powercuts.usage_traffic import Usage
from tests.support.fuse_mount import require_fuse
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemon

require_fuse()
require_etcd()


@pytest.mark.parametrize("relaxed", [False, True], ids=["commit", "relaxed"])
def test_nothing_promised_is_lost(tmp_path: Path, relaxed: bool) -> None:
    kinds = [KINDS[kind]() for kind in ("objects", "versions", "uploads", "settings")]
    scene = Scene(tmp_path, seed=11 + relaxed, traffic=[*kinds, Usage()], relaxed=relaxed)
    while scene.report.cuts < 2 or (scene.report.acknowledged <= 20 and scene.report.cuts < 8):
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
        while scene.report.cuts < 4 or (scene.report.acknowledged <= 20 and scene.report.cuts < 16):
            scene.cut(0.5)
        scene.finish()
    assert scene.report.wrong == []
    assert scene.report.acknowledged > 20


@pytest.mark.parametrize("bug", BUGS)
def test_a_deliberate_fault_is_found(tmp_path: Path, bug: str) -> None:
    """The file system acts on none of these syncs, or too late, as if the daemon had not asked for them."""
    scene = Scene(tmp_path, seed=5, options=BUGS[bug])
    for _ in range(BUG_CUTS):
        scene.cut(0.7)
        if scene.report.wrong:
            return
    pytest.fail(str(scene.report))


@pytest.mark.parametrize("waits", [True, False], ids=["barrier", "no-barrier"])
def test_what_etcd_answers_early_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Without the barrier, an etcd that answers before it syncs is found out."""
    if not waits:
        said = subprocess.run([find_etcd(), "--version"], capture_output=True, check=True, timeout=30).stdout
        if not may_answer_early(said.decode().split()[2]):
            pytest.skip("this etcd answers when it has synced")
        monkeypatch.setattr(durability_barrier, "may_answer_early", lambda version: False)
    with closing(ControlScene(tmp_path, seed=3)) as scene:
        while not scene.report.wrong and scene.report.cuts < (2 if waits else BUG_CUTS):
            scene.cut(0.7)
        if waits:
            scene.finish()
    assert bool(scene.report.wrong) != waits, str(scene.report)
    assert scene.report.acknowledged > 3


def test_what_is_found_is_shrunk(tmp_path: Path) -> None:
    """To the least that must be forgotten: with data that is not synced, that is part of a data file."""
    with Worker() as worker:
        scene = StoreScene(tmp_path / "scene", 3, worker, options=["--ignore", ".tar"])
        while not scene.report.wrong and scene.report.cuts < 20:
            scene.cut(0.3)
        told = keep(scene, tmp_path / "kept")
    least = told.splitlines()[1:]
    assert least, told
    assert all(re.match(r"/data/extents/.*\.tar: ", line) for line in least)
    whole = recorded(tmp_path / "kept")
    assert len(least) < len(whole.names) + len(whole.bytes)
    assert "lost or wrong" in (tmp_path / "kept" / "found.txt").read_text()


def test_nothing_can_be_left_out_of_what_is_minimal() -> None:
    tried = list[list[int]]()

    def fails(some: list[int]) -> bool:
        tried.append(some)
        return {3, 17, 18} <= set(some)

    assert minimal(range(40), fails) == [3, 17, 18]
    assert len(tried) < 100
    assert minimal([1, 2], lambda some: True) == []


def test_what_is_allowed() -> None:
    history = History(
        [Attempt(b"1", 1.0, 1.1), Attempt(b"2", 2.0, 2.1), Attempt(None, 3.0, 3.1), Attempt(b"4", 4.0)]
    )
    assert history.allowed(9.0) == {None, b"4"}
    assert history.allowed(2.5) == {b"2", None, b"4"}
    assert history.allowed(0.5) == {None, b"1", b"2", b"4"}


def test_an_upload_that_was_ended_without_an_answer_is_in_doubt_beside_the_next_one() -> None:
    """Until the nodes have compared. What is acknowledged of the next one says nothing of the one before."""

    class Client:
        """Its name has an upload with one part, which is aborted without an answer; then it has none."""

        uploads: tuple[str, ...] = ("u1",)

        def list_multipart_uploads(self, **asked: Any) -> dict[str, Any]:
            return {"Uploads": [{"Key": "client0/0", "UploadId": each} for each in self.uploads]}

        def list_parts(self, **asked: Any) -> dict[str, Any]:
            return {"Parts": [{"PartNumber": 2, "ETag": '"a"'}] if asked["UploadId"] == "u1" else []}

        def get_object(self, **asked: Any) -> Any:
            raise ClientError({"Error": {"Code": "NoSuchKey"}}, "GetObject")

        def abort_multipart_upload(self, **asked: Any) -> None:
            raise ClientError({"Error": {"Code": "SlowDown"}}, "AbortMultipartUpload")

        def create_multipart_upload(self, **asked: Any) -> None:
            self.uploads = ("u2",)

    class Chance(random.Random):
        def random(self) -> float:
            return 0.0

        def randrange(self, *limits: int) -> int:  # type: ignore[override]
            return 0

    client, uploads, daemon = Client(), traffic.Uploads(), cast("Daemon", None)
    with pytest.raises(ClientError):
        uploads.change(daemon, client, 0, Chance())
    client.uploads = ()
    uploads.change(daemon, client, 0, Chance())
    now = time.monotonic()
    assert uploads.allows("client0/0", uploads.find(daemon, client, "client0/0"), now)
    client.uploads = ("u1", "u2")
    both = uploads.find(daemon, client, "client0/0")
    assert uploads.allows("client0/0", both, now)
    client.uploads = ("u1",)
    assert not uploads.allows("client0/0", uploads.find(daemon, client, "client0/0"), now)
    client.uploads = ("u2",)
    uploads.settle("client0/0", uploads.find(daemon, client, "client0/0"))
    assert not uploads.allows("client0/0", both, now)
