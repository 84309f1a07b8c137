"""Watches of a copy that a thread holds up to date."""

from __future__ import annotations

import asyncio
import threading

from meshd.control.control_api import Versioned
from meshd.control.watchers import Watchers
from tests.support.bounded_wait import WAIT_TIMEOUT, await_end


def test_news_come_from_any_thread_and_end_with_the_store() -> None:
    watchers, copy = Watchers(), dict[str, Versioned]()

    def write(key: str) -> None:
        copy[key] = Versioned(key.encode(), len(copy) + 1)
        watchers.wake()

    async def watching() -> list[str]:
        found = []
        async for change in watchers.changes(lambda: dict(copy)):
            found.append(change.key)
            if change.key == "t/first":
                threads = [threading.Thread(target=write, args=("t/second",))]
            else:
                threads = [threading.Thread(target=watchers.close)]
            for thread in threads:
                thread.start()
                await asyncio.to_thread(await_end, thread)
        return found

    async def main() -> list[str]:
        async with asyncio.timeout(WAIT_TIMEOUT):
            return await watching()

    write("t/first")
    assert asyncio.run(main()) == ["t/first", "t/second"]


def test_whoever_left_without_a_word_keeps_no_news_from_the_others() -> None:
    """A loop may be closed at any moment, and the thread that brings news must not end of it."""
    watchers, gone, heard = Watchers(), asyncio.new_event_loop(), list[str]()
    gone.close()

    async def main() -> None:
        watchers._waiting.add((gone, asyncio.Event()))
        async with asyncio.timeout(WAIT_TIMEOUT):
            async for change in watchers.changes(lambda: {"t/a": Versioned(b"", 1)}):
                heard.append(change.key)
                watchers.wake()
                watchers.close()

    asyncio.run(main())
    assert heard == ["t/a"]
