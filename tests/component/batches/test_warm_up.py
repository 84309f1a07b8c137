"""`mesh warm`: a plan's samples are decoded before training, and the first epoch then decodes nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from meshsdk.cli import run
from tests.component.batches.test_decoded_cache_daemon import (
    BATCH,
    OPS,
    SAMPLES,
    counted,
    epoch,
    frame,
    plan_of,
    post,
    reads,
    started,
    wait_until,
)
from tests.support.daemons import with_failpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon


@pytest.fixture(scope="module")
def expected() -> Iterator[list[bytes]]:
    """The frames of the first epoch, made without a decoded cache."""
    with started("--decoded-cache", "off") as daemon:
        plan = plan_of(daemon)
        yield epoch(daemon, plan, 0)
        ended = warm(daemon, plan)
        assert ended["state"] == "failed"
        assert "decoded cache is off" in ended["error"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """What a test finds in the cache is what those before it have left."""
    with started("--decoded-cache", "256MiB") as running:
        yield running


def start(daemon: Daemon, plan: str, **options: Any) -> str:
    return str(post(daemon, "/-/jobs", {"kind": "warm", "plan": plan, **options})["id"])


def job(daemon: Daemon, job_id: str, wait: float = 0.0) -> dict[str, Any]:
    answer = daemon.request("GET", f"/-/jobs/{job_id}" + (f"?wait={wait}" if wait else ""))
    assert answer.status == 200, answer.body
    found: dict[str, Any] = json.loads(answer.body)
    return found


def ended(daemon: Daemon, job_id: str) -> dict[str, Any]:
    for _ in range(60):
        with contextlib.suppress(OSError):
            found = job(daemon, job_id, 2)
            if found["state"] in ("done", "failed", "cancelled"):
                return found
    raise AssertionError(f"still running: {job(daemon, job_id)}")


def warm(daemon: Daemon, plan: str, **options: Any) -> dict[str, Any]:
    return ended(daemon, start(daemon, plan, **options))


def test_the_first_epoch_decodes_nothing_and_no_byte_differs(expected: list[bytes]) -> None:
    with started("--decoded-cache", "256MiB") as daemon:
        _warms_up(daemon, expected)


def _warms_up(daemon: Daemon, expected: list[bytes]) -> None:
    plan = plan_of(daemon)
    found = warm(daemon, plan)
    assert found["state"] == "done", found
    report = found["report"]
    assert report["stored"] + report["there"] == SAMPLES, report
    assert SAMPLES * 320 * 240 * 3 < report["bytes"] <= counted(daemon, "bytes")
    assert report["cpu_seconds"] > 0
    assert report["left_out"] == report["bad"] == report["refused"] == {}
    assert found["progress"]["samples"] == SAMPLES
    assert found["progress"]["bytes"] == found["progress"]["bytes_total"] > 0
    assert counted(daemon, 'warmed_total{result="stored"}') == report["stored"]

    missed = reads(daemon, "miss")
    assert epoch(daemon, plan, 0) == expected
    assert reads(daemon, "hit") == SAMPLES
    assert reads(daemon, "miss") == missed

    again = warm(daemon, plan)
    assert again["state"] == "done"
    assert again["report"]["there"] == SAMPLES
    assert again["report"]["bytes"] == 0


def test_what_is_not_kept_is_told_by_reason() -> None:
    with started("--decoded-cache", "8MiB") as daemon:
        with contextlib.closing(daemon.client()) as client:
            for number in range(40, 60):
                client.put_object(Bucket="photos", Key=f"train/{number:04}.jpg", Body=b"no image")
        plan = plan_of(daemon)
        found = warm(daemon, plan)
        assert found["state"] == "done", found
        report = found["report"]
        reasons = {"no room in the decoded cache", "the kind of result was not seen often enough"}
        assert "no room in the decoded cache" in report["left_out"]
        assert set(report["left_out"]) <= reasons
        left, bad = sum(report["left_out"].values()), sum(report["bad"].values())
        assert report["stored"] + report["there"] + left + bad == SAMPLES
        assert report["stored"] > 0
        assert 0 < bad == found["failed"] <= 20
        assert len(report["bad"]) == 1
        assert 40 <= int(found["failures"][0]["name"][-4:]) < 60
        assert counted(daemon, "bytes") <= 8 << 20


def test_a_plan_that_begins_with_chance_is_refused(daemon: Daemon) -> None:
    found = warm(daemon, plan_of(daemon, []))
    assert found["state"] == "failed"
    assert "no field has an op before its first random one" in found["error"]


def test_only_samples_below_a_url(daemon: Daemon) -> None:
    plan = plan_of(daemon)
    found = warm(daemon, plan, source="s3://photos/train/000")
    assert found["state"] == "done", found
    assert found["report"]["stored"] + found["report"]["there"] == 10
    other = warm(daemon, plan, source="s3://photos/none/")
    assert other["state"] == "done"
    assert other["progress"]["samples_total"] == 0


SLOW = "transform.row=sleep(150)"
RESIZED = [
    {"op": "resize", "field": "image", "args": {"size": [120, 120]}},
    {"op": "random_crop", "field": "image", "args": {"size": 100}},
]


def test_a_cancelled_job_ends_soon_and_continues_when_started_again() -> None:
    with with_failpoints(SLOW), started("--decoded-cache", "256MiB") as daemon:
        plan = plan_of(daemon)
        running = start(daemon, plan)
        assert wait_until(lambda: job(daemon, running)["progress"]["samples"] > 0)
        assert daemon.request("DELETE", f"/-/jobs/{running}").status == 200
        stopped = ended(daemon, running)
        assert stopped["state"] == "cancelled"
        assert 0 < stopped["progress"]["samples"] < SAMPLES
        stored = counted(daemon, "stored_bytes_total")
        threading.Event().wait(1.0)
        assert counted(daemon, "stored_bytes_total") - stored <= 2 * 320 * 240 * 3 * 32, "it goes on"
        found = warm(daemon, plan)
        assert found["run"] == 2
        assert found["report"]["there"] > 0
        assert found["report"]["stored"] + found["report"]["there"] == SAMPLES


@pytest.mark.parametrize("victim", ["transform-0", "coordinator-0"])
def test_a_killed_process_costs_what_it_had_at_most(expected: list[bytes], victim: str) -> None:
    with with_failpoints(SLOW), started("--decoded-cache", "256MiB") as daemon:
        plan = plan_of(daemon)
        running = start(daemon, plan)
        assert wait_until(lambda: job(daemon, running)["progress"]["samples"] > 0)
        daemon.signal_child(victim)
        found = ended(daemon, running)
        assert found["state"] == "done", found
        assert found["report"]["stored"] + found["report"]["there"] == SAMPLES
        assert epoch(daemon, plan, 0) == expected
        assert reads(daemon, "miss") == counted(daemon, 'warmed_total{result="bad"}') == 0


def test_batches_go_first(expected: list[bytes]) -> None:
    with with_failpoints(SLOW), started("--decoded-cache", "256MiB") as daemon:
        plan, steps, over = plan_of(daemon), itertools.count(1), threading.Event()

        def load() -> None:
            while not over.is_set():
                frame(daemon, plan, next(steps), 0)

        loops = [threading.Thread(target=load) for _ in range(4)]
        for loop in loops:
            loop.start()
        running = start(daemon, plan_of(daemon, [OPS[0], *RESIZED]), cache=256 << 20)
        try:
            threading.Event().wait(2.5)
            before, began = job(daemon, running)["progress"]["samples"], next(steps)
            threading.Event().wait(2.5)
            found, rows = job(daemon, running), (next(steps) - began) * BATCH
        finally:
            over.set()
            for loop in loops:
                loop.join(timeout=120)
        assert found["state"] == "running"
        assert found["progress"]["samples"] - before <= rows / 4, "batches waited for the warm-up"
        found = ended(daemon, running)
        assert found["report"]["stored"] + found["report"]["there"] == SAMPLES
        assert epoch(daemon, plan, 0) == expected


def test_a_rate_bounds_the_bytes_that_are_read() -> None:
    """The rest, without a limit, is made at once: many times as much as fits into one segment."""
    with started("--decoded-cache", "64MiB") as daemon:
        plan = plan_of(daemon)
        running = start(daemon, plan, rate=2000)
        assert wait_until(lambda: job(daemon, running)["progress"]["samples"] > 0)
        threading.Event().wait(1.0)
        slow = job(daemon, running)
        assert slow["state"] == "running"
        assert slow["progress"]["samples"] < SAMPLES // 2
        assert start(daemon, plan) == running  # without a limit
        assert ended(daemon, running)["report"]["left_out"] == {}


def test_the_command_follows_it_and_says_what_was_kept(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    plan = plan_of(daemon)
    assert run(["warm", plan[:12]]) == 0
    said = capsys.readouterr().out
    assert f"{SAMPLES} of {SAMPLES} samples kept" in said
    assert run(["warm", "s3://photos/train/000", "--plan", plan[:12], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["there"] == 10
    assert run(["job", "ls"]) == 0
    listed = capsys.readouterr().out
    assert f"by plan {plan[:12]} → the cache" in listed
    assert run(["job", "show", found["id"]]) == 0
    assert "10 of 10 samples kept (10 of them before)" in capsys.readouterr().out
    assert run(["warm", "s3://photos/train/"]) == 2
    assert "--plan HASH" in capsys.readouterr().err
    assert run(["warm", plan_of(daemon, [])]) == 1
    assert "nothing to keep" in capsys.readouterr().out


def test_a_bucket_has_a_quota_which_may_shrink(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESH_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", daemon.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", daemon.secret_key)
    plan = plan_of(daemon)
    assert run(["bucket", "change", "photos", "--decoded-quota", "12MiB"]) == 0
    assert "decoded cache at most 12.0 MiB a node" in capsys.readouterr().out
    assert wait_until(lambda: counted(daemon, "bytes") <= 12 << 20)
    found = warm(daemon, plan)
    assert list(found["report"]["left_out"]) == ["more than the quota of the bucket"]
    assert 0 < counted(daemon, "bytes") <= 12 << 20
    assert wait_until(lambda: counted(daemon, "buckets_at_quota") == 1)
    assert run(["bucket", "change", "photos", "--decoded-quota", "5MiB"]) == 0
    assert wait_until(lambda: counted(daemon, "bytes") <= 5 << 20)
    assert run(["bucket", "change", "photos", "--decoded-quota", "none"]) == 0
    assert "decoded cache" not in capsys.readouterr().out.splitlines()[-1]
    assert warm(daemon, plan)["report"]["left_out"] == {}
    assert run(["bucket", "change", "absent", "--decoded-quota", "1GiB"]) != 0
