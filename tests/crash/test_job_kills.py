"""Jobs killed with -9 at every step and at random: they go on, and what they leave is what an undisturbed run
leaves: no sample lost, none doubled, no scratch."""

from __future__ import annotations

import os
import random
import select
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from meshd.config import load_settings
from meshd.core.document_store import RESERVED_BUCKET
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.util.clock import SystemClock
from tests.support.archive_files import archive_of
from tests.support.bounded_wait import await_true
from tests.support.daemons import FAILPOINTS, Daemon
from tests.support.job_fixtures import done, ended, members, objects, start

if TYPE_CHECKING:
    from pathlib import Path

rng = random.Random(11)
FILES = {
    f"{n:03d}.{ext}": rng.randbytes(rng.randrange(1, 90_000)) for n in range(40) for ext in ("jpg", "cls")
}
KEYS = {"MESHD_ROOT_ACCESS_KEY": "MESHROOTcrash", "MESHD_ROOT_SECRET_KEY": "a-secret-for-crash-tests"}
LAYOUT: dict[str, Any] = {"count": 3, "shuffle": 1}
JOBS: dict[str, dict[str, Any]] = {
    "shard": {"kind": "shard", "source": "s3://samples/plain", **LAYOUT},
    "reshard": {"kind": "reshard", "source": "s3://samples/packed", **LAYOUT},
    "extract": {"kind": "extract", "source": "s3://samples/packed"},
    "materialize": {"kind": "materialize", "source": "s3://samples--v/"},
}
STEPS = ("begun", "output.written", "output.committed", "worked", "ended")
POINTS = [
    *[
        (kind, f"jobs.{step}", skip)
        for kind in JOBS
        for step in STEPS
        for skip in (0, 5)
        if skip == 0 or "out" in step
    ],
    *[
        (kind, f"jobs.{step}", 0)
        for kind in ("reshard", "extract")
        for step in ("unpacked", "unpacked.listed")
    ],
    *[(kind, "jobs.planned", 0) for kind in ("shard", "reshard", "extract")],
    ("materialize", "jobs.materialized", 0),
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with sources of every kind, and with what undisturbed runs make of them."""
    data = tmp_path_factory.mktemp("filled") / "data"
    with Daemon.start(data, workers=2, env=KEYS) as daemon:
        s3 = daemon.client()
        for bucket in ("samples", "made", "right"):
            s3.create_bucket(Bucket=bucket)
        for name, body in FILES.items():
            s3.put_object(Bucket="samples", Key=f"plain/{name}", Body=body)
        names = sorted(FILES)
        for number, kind in enumerate(("tar", "tgz", "zip", "tar.zst")):
            part = {name: FILES[name] for name in names[number * 20 : number * 20 + 20]}
            s3.put_object(Bucket="samples", Key=f"packed/{number}.{kind}", Body=archive_of(kind, part))
        view = (
            b'{"bucket": "samples", "name": "v", "view": {"kind": "shards", "prefix": "plain/", "count": 3}}'
        )
        assert daemon.request("POST", "/-/views", view).status == 200
        for kind, job in JOBS.items():
            done(daemon, **job, target=f"s3://right/{kind}")
    return data


def copied(filled: Path, tmp_path: Path) -> Path:
    data = tmp_path / "data"
    shutil.copytree(filled, data, ignore=shutil.ignore_patterns("*.sock"))
    return data


def check_made(daemon: Daemon, kind: str) -> None:
    """Exactly what an undisturbed run made, and every file once."""
    s3 = daemon.client()
    made = objects(s3, "made", "out/")
    assert made == objects(s3, "right", f"{kind}/")
    assert (made if kind == "extract" else members(*made.values())) == FILES


def check_clean(daemon: Daemon) -> None:
    """The store is in order, and of jobs nothing is left but their outputs."""
    daemon.stop()
    settings = load_settings({"data_dir": str(daemon.data_dir)}, env={}).store
    store = Store.open(settings, writer="t", clock=SystemClock())
    try:
        assert store.list(RESERVED_BUCKET, prefix="jobs/").entries == ()
    finally:
        store.close()
    report = check_store(settings)
    assert report.clean, report.problems


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "point", "skip"), POINTS)
def test_killed_at_every_step(filled: Path, tmp_path: Path, kind: str, point: str, skip: int) -> None:
    data = copied(filled, tmp_path)
    text = f"{point}=kill" + (f":after {skip}" if skip else "")
    daemon = Daemon(data, (), KEYS | {"MESHD_FAILPOINTS": text}, 2)
    try:
        daemon.up()
        watched = os.pidfd_open(daemon.children()["coordinator-0"])
        job = start(daemon, **JOBS[kind], target="s3://made/out")
        assert select.select([watched], [], [], 60)[0], "the coordinator was not killed"
        os.close(watched)
        daemon.kill()
        del daemon.env["MESHD_FAILPOINTS"]
        daemon.up()
        assert ended(daemon, job)["state"] == "done"
        check_made(daemon, kind)
        check_clean(daemon)
    finally:
        daemon.close()


@pytest.mark.timeout(400)
@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", ["reshard", "extract"])
def test_killed_at_random(filled: Path, tmp_path: Path, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    slow = {"MESHD_FAILPOINTS": "jobs.output.written=sleep(15)"}
    daemon = Daemon(copied(filled, tmp_path), (), KEYS | slow, 2)
    try:
        daemon.up()
        job = start(daemon, **JOBS[kind], target="s3://made/out")
        for number in range(4):
            threading.Event().wait(rng.uniform(0.0, 0.4))
            if number % 2:
                daemon.kill()
                daemon.up()
            else:
                daemon.signal_child("coordinator-0")
        assert ended(daemon, job)["state"] == "done"
        check_made(daemon, kind)
        check_clean(daemon)
    finally:
        daemon.close()


def stands_still(daemon: Daemon) -> bool:
    """Whether some outputs are there and no more come."""
    before = objects(daemon.client(), "made", "out/")
    threading.Event().wait(0.5)
    return bool(before) and objects(daemon.client(), "made", "out/").keys() == before.keys()


def test_a_job_cancelled_and_killed_stays_cancelled(filled: Path, tmp_path: Path) -> None:
    """It is killed before it knows of the cancellation: its event loop stands still, but none of its threads
    does, and what they hold the others need."""
    stuck = {FAILPOINTS: "jobs.output.written=sleep(20000):after 60"}
    daemon = Daemon(copied(filled, tmp_path), (), KEYS | stuck, 2)
    try:
        daemon.up()
        job = start(daemon, **JOBS["extract"], target="s3://made/out")
        await_true(lambda: stands_still(daemon))
        assert daemon.request("DELETE", f"/-/jobs/{job['id']}").status == 200
        daemon.kill()
        del daemon.env[FAILPOINTS]
        daemon.up()
        assert ended(daemon, job)["state"] == "cancelled"
        some = objects(daemon.client(), "made", "out/")
        assert 0 < len(some) < len(FILES)
        assert some.items() <= FILES.items()
        again = done(daemon, **JOBS["extract"], target="s3://made/out")
        assert again["progress"]["there"] == len(some)
        check_made(daemon, "extract")
        check_clean(daemon)
    finally:
        daemon.close()
