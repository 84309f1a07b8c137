"""What stays of backed buckets in the cache: evictions, quotas, pins, prefetching, restarts."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk.admin import cluster_admin, jobs
from meshsdk.cli import run
from tests.support.origin_fixtures import bucket, eventually, metric, put, read, sdk, small_daemon, until_kept

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.daemons import Daemon
    from tests.support.origin_places import Place

MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture
def small(origin: Place, tmp_path: Path) -> Iterator[Daemon]:
    with small_daemon(origin, tmp_path) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def shared(_origin: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """For what depends on nothing else in the cache."""
    with small_daemon(_origin, tmp_path_factory.mktemp("shared")) as daemon:
        yield daemon


def test_the_cache_is_bounded_and_a_part_of_an_epoch_stays(small: Daemon, origin: Place) -> None:
    rng = random.Random(1)
    data = {f"{index:03d}": rng.randbytes(256 * KIB) for index in range(160)}  # 40 MiB
    for key, value in data.items():
        put(origin, "epochs", key, value)
    client = bucket(small, origin, "epochs", immutable=True)
    fetched = []
    for _ in range(3):
        before = len(origin.faults.gets())
        for key in data:
            assert read(client, "epochs", key) == data[key]
        fetched.append(len(origin.faults.gets()) - before)
    assert fetched[0] == 160
    assert 80 < fetched[2] < 130  # 16 of 40 MiB stay: an LRU would fetch all of them again
    eventually(lambda: metric(small, "meshd_cache_bytes") < 24 * MIB)
    assert metric(small, "meshd_cache_capacity_bytes") == 16 * MIB


def test_large_objects_in_a_small_cache_are_read_right(shared: Daemon, origin: Place) -> None:
    data = os.urandom(40 * MIB)
    put(origin, "huge", "h", data)
    client = bucket(shared, origin, "huge", immutable=True)
    for _ in range(3):
        assert read(client, "huge", "h") == data
    assert read(client, "huge", "h", Range="bytes=30000000-30000009") == data[30000000:30000010]


def fetches(client: Any, origin: Place, name: str, keys: Sequence[str]) -> int:
    """How many GETs the origin sees while each is read once."""
    before = len(origin.faults.gets(f"{name}/"))
    for key in keys:
        read(client, name, key)
    return len(origin.faults.gets(f"{name}/")) - before


def test_what_is_pinned_stays_where_the_rest_goes(small: Daemon, origin: Place) -> None:
    """Both were read as often, and there is no room for them beside what is read more."""
    keep, free, flood = ([f"{name}/{index:02d}" for index in range(24)] for name in ("keep", "free", "flood"))
    for mine, other in zip(keep, free, strict=True):
        put(origin, "pinned", mine, os.urandom(128 * KIB))
        put(origin, "pinned", other, os.urandom(128 * KIB))
    for key in flood:
        put(origin, "flood", key, os.urandom(512 * KIB))
    client = bucket(small, origin, "pinned", immutable=True, pins=["keep/"])
    bucket(small, origin, "flood", immutable=True)
    for mine, other in zip(keep, free, strict=True):
        until_kept(client, "pinned", other, origin)
        until_kept(client, "pinned", mine, origin)
    # The keeper has looked at the pins where it has seen what was kept since they were set.
    eventually(lambda: metric(small, "meshd_cache_bytes") >= 48 * 128 * KIB)
    dropped = 0
    for key in free:  # each once: what is read more is worth more
        fetches(client, origin, "flood", flood)
        dropped += fetches(client, origin, "pinned", [key])
    assert dropped > 0
    assert fetches(client, origin, "pinned", keep) == 0


def test_a_bucket_takes_no_more_than_its_quota(small: Daemon, origin: Place) -> None:
    keys = [f"{index:02d}" for index in range(12)]
    for key in keys:
        put(origin, "limited", key, os.urandom(512 * KIB))
    client = bucket(small, origin, "limited", immutable=True, quota=2 * MIB)
    for _ in range(3):
        fetches(client, origin, "limited", keys)
    # There is room for all, and at first all are there; what is too much goes when the keeper hears of it.
    eventually(lambda: fetches(client, origin, "limited", keys) >= len(keys) // 2)


def test_a_restart_keeps_the_cache(shared: Daemon, origin: Place) -> None:
    put(origin, "again", "k", b"x" * 1000)
    client = bucket(shared, origin, "again", immutable=True)
    until_kept(client, "again", "k", origin)
    shared.restart()
    origin.faults.refuse = True
    assert read(shared.client(), "again", "k") == b"x" * 1000
    shared.kill()
    shared.up()
    assert read(shared.client(), "again", "k") == b"x" * 1000


def test_a_bucket_made_anew_has_nothing_of_the_old(shared: Daemon, origin: Place) -> None:
    put(origin, "anew", "k", b"old")
    client = bucket(shared, origin, "anew", immutable=True)
    until_kept(client, "anew", "k", origin)
    client.delete_bucket(Bucket="anew")
    put(origin, "anew", "k", b"new")
    bucket(shared, origin, "anew", immutable=True)
    assert read(client, "anew", "k") == b"new"
    client.delete_bucket(Bucket="anew")
    client.create_bucket(Bucket="anew")
    assert client.list_objects_v2(Bucket="anew")["KeyCount"] == 0


def test_prefetching(small: Daemon, origin: Place, tmp_path: Path) -> None:
    for index in range(30):
        put(origin, "wanted", f"a/{index:02d}", os.urandom(10 * KIB))
    put(origin, "wanted", "big", os.urandom(9 * MIB))
    client = bucket(small, origin, "wanted")
    with sdk(small) as mesh:
        begun = jobs.start_job(mesh.transport, {"kind": "prefetch", "source": "s3://wanted/a/"})
        done = jobs.wait_for_job(mesh.transport, begun.id)
        assert (done.state, done.progress.written, done.failed) == ("done", 30, 0), done
        before = len(origin.faults.gets("wanted/"))
        for index in range(30):
            read(client, "wanted", f"a/{index:02d}")
        assert len(origin.faults.gets("wanted/")) == before
        again = jobs.wait_for_job(
            mesh.transport, jobs.start_job(mesh.transport, {"kind": "prefetch", "source": "s3://wanted/"}).id
        )
        assert (again.progress.there, again.progress.written) == (30, 1)
        listed = {"kind": "prefetch", "source": "s3://wanted", "keys": ["a/00", "missing"]}
        named = jobs.wait_for_job(mesh.transport, jobs.start_job(mesh.transport, listed).id)
        assert (named.progress.there, named.failed) == (1, 1)
        client.create_bucket(Bucket="lists")
        client.put_object(Bucket="lists", Key="m.txt", Body=b"a/01\na/02\n")
        listed = {"kind": "prefetch", "source": "s3://wanted", "manifest": "s3://lists/m.txt"}
        named = jobs.wait_for_job(mesh.transport, jobs.start_job(mesh.transport, listed).id)
        assert named.progress.there == 2


def test_prefetch_paused_and_resumed_from_the_command_line(
    shared: Daemon, origin: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(120):
        put(origin, "slowly", f"{index:02d}", os.urandom(KIB))
    bucket(shared, origin, "slowly")
    monkeypatch.setenv("MESH_ENDPOINT", shared.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", shared.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", shared.secret_key)
    origin.faults.delay = 0.5
    assert run(["prefetch", "s3://slowly", "--detach"]) == 0
    job = capsys.readouterr().out.split()[0]
    assert run(["prefetch", "pause", job]) == 0
    assert "paused" in capsys.readouterr().out
    origin.faults.delay = 0
    assert run(["prefetch", "resume", job]) == 0
    assert "done" in capsys.readouterr().out
    assert run(["prefetch", "cancel", job]) == 0
    assert "done" in capsys.readouterr().out
    assert run(["bucket", "change", "slowly", "--ttl", "5", "--quota", "1GiB"]) == 0
    assert run(["bucket", "show", "slowly"]) == 0
    assert f", at {origin.proxy.endpoint}, credentials weed, " in capsys.readouterr().out
    assert run(["bucket", "show", "slowly", "--json"]) == 0
    assert '"quota": 1073741824' in capsys.readouterr().out.replace('":1', '": 1')
    with sdk(shared) as mesh:
        told = cluster_admin.show_bucket(mesh.transport, "slowly").origin
        assert told is not None
        assert told["ttl"] == 5


def test_a_prefetch_goes_on_where_the_daemon_was_killed(shared: Daemon, origin: Place) -> None:
    for index in range(120):
        put(origin, "killed", f"{index:02d}", os.urandom(KIB))
    bucket(shared, origin, "killed", immutable=True)
    origin.faults.delay = 0.4
    with sdk(shared) as mesh:
        begun = jobs.start_job(mesh.transport, {"kind": "prefetch", "source": "s3://killed/"})
        job = begun.id
        eventually(lambda: jobs.show_job(mesh.transport, job).progress.written >= 20)
        shared.kill()
        origin.faults.delay = 0
        shared.up()
        done = jobs.wait_for_job(mesh.transport, job)
    assert (done.state, done.progress.outputs, done.failed) == ("done", 120, 0)
    assert done.progress.there >= 10  # what was cached before the kill is left alone
    assert done.run == begun.run
