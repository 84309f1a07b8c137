"""The crowd finds what is lost, old or somebody else's in a real store: the proof can fail."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.faults.clients import BUCKET, Crowd, content, final_values
from tests.faults.history import ABSENT, check
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.history import History


@pytest.fixture(scope="module")
def worked() -> Iterator[tuple[Daemon, History]]:
    with Daemon.start() as daemon:
        daemon.client().create_bucket(Bucket=BUCKET)
        crowd = Crowd([daemon.endpoint], (daemon.access_key, daemon.secret_key), 1)
        crowd.start()
        while crowd.done("chains") < 3 or crowd.done("firsts") < 3 or crowd.done("writes") < 12:
            threading.Event().wait(0.05)
        history = crowd.stop()
        assert crowd.errors == []
        yield daemon, history


def faults(worked: tuple[Daemon, History]) -> list[str]:
    daemon, history = worked
    return check(history, final_values(daemon.endpoint, (daemon.access_key, daemon.secret_key), history))


def test_a_store_that_nothing_happened_to_is_right(worked: tuple[Daemon, History]) -> None:
    assert faults(worked) == []


@pytest.mark.parametrize("body", [content("c0-0"), b"", None], ids=["older", "empty", "lost"])
@pytest.mark.parametrize("kind", ["writes", "chains", "firsts"])
def test_what_is_not_as_it_should_be_is_found(
    worked: tuple[Daemon, History], kind: str, body: bytes | None
) -> None:
    daemon, history = worked
    s3 = daemon.client()
    final = final_values(daemon.endpoint, (daemon.access_key, daemon.secret_key), history)
    keys = {write.key for write in getattr(history, kind) if write.outcome == "done"}
    key = min(key for key in keys if final[key] != ABSENT)
    before = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    try:
        if body is None:
            s3.delete_object(Bucket=BUCKET, Key=key)
        else:
            s3.put_object(Bucket=BUCKET, Key=key, Body=body)
        assert any(key in fault for fault in faults(worked))
    finally:
        s3.put_object(Bucket=BUCKET, Key=key, Body=before)
