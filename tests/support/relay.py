"""A TCP relay that can be cut, between a node and its control store or between nodes.

Law: it fails as a network does: `cut` silences all connections without refusing or losing anything, and
`heal` delivers what was under way. `refuse` resets open connections and refuses new ones until `heal`.
It runs in a thread of its own; `close` ends it and every connection.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Self

from tests.support.bounded_wait import await_end
from tests.support.server_shutdown import stop_listening

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_PIECE = 65536


class Relay:
    """Listens on loopback; `str()` is HOST:PORT. `target`: the port it leads to, which may change.
    `forwarded` and `returned`: bytes read from clients, and from the target."""

    def __init__(self, target: int = 0) -> None:
        self.target, self.port = target, 0
        self.forwarded = self.returned = 0
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="relay", daemon=True)
        self._thread.start()
        assert started.wait(60)

    def __str__(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __repr__(self) -> str:
        return f"<Relay {self} to {self.target}{'' if self._whole.is_set() else ', cut'}>"

    def cut(self) -> None:
        """From now on nothing passes, either way."""
        self._loop.call_soon_threadsafe(self._whole.clear)

    def refuse(self) -> None:
        """Reset every connection and refuse new ones, as a host without a listener does."""
        self._call(self._close)

    def heal(self) -> None:
        """All passes again, also what was sent meanwhile."""
        self._call(self._listen)
        self._loop.call_soon_threadsafe(self._whole.set)

    def _call(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run_coroutine_threadsafe(work(), self._loop).result(60)

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            await_end(self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port)
            self.port = int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await stop_listening(server)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what they aborted is closed then

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with suppress(asyncio.CancelledError):
            await self._relay(reader, writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._whole.wait()
            with suppress(OSError):
                upstream, to = await asyncio.open_connection("127.0.0.1", self.target)
                try:
                    await asyncio.gather(
                        self._pump(reader, to, "forwarded"), self._pump(upstream, writer, "returned")
                    )
                finally:
                    to.transport.abort()
        finally:
            writer.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: Literal["forwarded", "returned"],
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_PIECE):
                setattr(self, count, getattr(self, count) + len(data))
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
            await self._whole.wait()
            writer.write_eof()
