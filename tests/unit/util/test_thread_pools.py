"""Pools whose threads all run from the beginning."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from meshd.util.thread_pools import started_pool

if TYPE_CHECKING:
    import pytest


def running(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_all_threads_run_before_the_first_call() -> None:
    with started_pool(5, "all-run") as pool:
        assert running("all-run") == 5
        assert pool.submit(lambda: 3).result(10) == 3
        assert running("all-run") == 5


def test_those_that_were_started_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if running("some-run") == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with started_pool(5, "some-run") as pool:
        monkeypatch.undo()
        assert [future.result(10) for future in [pool.submit(abs, -number) for number in range(20)]] == list(
            range(20)
        )
