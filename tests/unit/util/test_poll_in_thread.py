"""`poll_in_thread` waits for a condition that may block, without the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from meshd.util.async_tasks import poll_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

_SOON = 10.0  # seconds


async def _cancel_when(asked: threading.Event, condition: Callable[[], bool]) -> None:
    waiting = asyncio.ensure_future(poll_in_thread(condition, _SOON))
    assert await asyncio.to_thread(asked.wait, _SOON)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, _SOON / 2)


def test_returns_once_the_condition_is_true() -> None:
    asked = list[int]()
    loop_thread = threading.get_ident()

    def third_time() -> bool:
        asked.append(threading.get_ident())
        return len(asked) == 3

    asyncio.run(asyncio.wait_for(poll_in_thread(third_time, 0.001), _SOON))
    assert len(asked) == 3
    assert loop_thread not in asked


def test_a_condition_that_hangs_blocks_neither_the_loop_nor_a_cancellation() -> None:
    asked, release = threading.Event(), threading.Event()

    def hangs() -> bool:
        asked.set()
        return release.wait(_SOON)

    asyncio.run(_cancel_when(asked, hangs))
    release.set()


def test_its_thread_ends_when_nobody_waits_any_longer() -> None:
    asked, seen = threading.Event(), list[threading.Thread]()

    def never() -> bool:
        seen.append(threading.current_thread())
        asked.set()
        return False

    asyncio.run(_cancel_when(asked, never))
    seen[0].join(_SOON / 2)
    assert not seen[0].is_alive()


def test_raises_what_the_condition_raises() -> None:
    def fails() -> bool:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        asyncio.run(asyncio.wait_for(poll_in_thread(fails, 0.001), _SOON))
