"""An event loop in a thread, for tests that drive what is asynchronous against what blocks."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

from lightkube import AsyncClient, KubeConfig

from tests.support.bounded_wait import await_end

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

T = TypeVar("T")


class Loop:
    """`with Loop() as loop: loop.run(coroutine)`."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        await_end(self._thread)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 100) -> T:
        """Its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)


async def client(kubeconfig: Path) -> AsyncClient:
    """Of the API server; made in the loop that uses it."""
    return AsyncClient(config=KubeConfig.from_file(kubeconfig).get(), namespace="default")
