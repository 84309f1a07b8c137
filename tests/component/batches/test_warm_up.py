"""`mesh warm`: a plan's samples are decoded before training, and the first epoch then decodes nothing."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.component.batches.test_decoded_cache_daemon import (
    SAMPLES,
    counted,
    epoch,
    plan_of,
    post,
    reads,
    started,
)

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


@pytest.fixture
def daemon() -> Iterator[Daemon]:
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


def test_the_first_epoch_decodes_nothing_and_no_byte_differs(daemon: Daemon, expected: list[bytes]) -> None:
    plan = plan_of(daemon)
    found = warm(daemon, plan)
    assert found["state"] == "done", found
    report = found["report"]
    assert report["stored"] + report["there"] == SAMPLES
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
