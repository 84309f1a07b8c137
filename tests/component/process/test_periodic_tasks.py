"""The coordinator's periodic tasks on a real store."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshd.config import StoreSettings
from meshd.process.periodic_tasks import PeriodicTask, compact, start_periodic_tasks
from meshd.store.errors import ExhaustedError
from meshd.store.records import Meta
from meshd.store.store import Store
from meshd.util.async_tasks import BackgroundTasks
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 50_000


async def put(store: Store, key: str) -> None:
    writer = store.writer("photos", key, size=SIZE)
    await writer.write(key[-1:].encode() * SIZE)
    await writer.commit(Meta(etag=key))


def test_compaction_wins_room_and_loses_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        clock = ManualClock()
        store = Store.open(StoreSettings.at(tmp_path, segment_bytes=1 << 20), writer="s", clock=clock)
        for number in range(100):
            await put(store, f"{number:03}")
        await store.delete_many("photos", [f"{number:03}" for number in range(100) if number % 10])
        before = store.stats()
        assert await compact(store, clock) > 0
        clock.advance(100_000)
        await compact(store, clock)
        after = store.stats()
        assert after.dead_bytes < before.dead_bytes / 2
        for number in range(0, 100, 10):
            record = store.get("photos", f"{number:03}")
            assert record is not None
            assert store.read_range(record, 0, SIZE) == b"0" * SIZE
        store.close()

    asyncio.run(check())


def _records(caplog: pytest.LogCaptureFixture, failure: Exception) -> list[Any]:
    """What is logged while a task fails three times."""

    async def check() -> None:
        tries, again = [], asyncio.Event()

        async def fail() -> None:
            tries.append(1)
            if len(tries) == 3:
                again.set()
            raise failure

        tasks = BackgroundTasks("test")
        start_periodic_tasks([PeriodicTask("broken", 0.0, fail)], tasks)
        async with asyncio.timeout(60):
            await again.wait()
        await tasks.aclose()

    with caplog.at_level(logging.WARNING):
        asyncio.run(check())
    return cast("list[Any]", caplog.records)


def test_a_failing_task_is_logged_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    record = _records(caplog, ValueError("broken"))[0]
    assert (record.levelname, record.task, record.message) == (
        "ERROR",
        "broken",
        "a periodic task failed; it will be retried",
    )
    assert record.exc_info


def test_a_failure_that_goes_on_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """Some tasks are run four times a second."""
    assert len(_records(caplog, ValueError("broken"))) == 1


@pytest.mark.parametrize(
    "failure", [OSError(errno.EMFILE, "Too many open files"), ExhaustedError("no memory")]
)
def test_a_task_without_descriptors_or_memory_is_postponed(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    record = _records(caplog, failure)[0]
    assert (record.levelname, record.task, record.why) == ("WARNING", "broken", str(failure))
    assert not record.exc_info
