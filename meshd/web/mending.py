"""An answer that was sent in one turn, and whose bytes ended before it did: the rest comes from elsewhere.

Law: what went out is as it was promised, so the rest comes right behind it, or the connection is cut.
Invariant: what the client sends meanwhile is kept, in order, and little of it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshd.web.tearing import Rest, TornError

log = logging.getLogger(__name__)
_HELD: Final = 64 << 10  # bytes of further requests that are taken meanwhile


class Holding:
    """Something that answers a client's only request beside the parser. `last`: the client's connection is to
    end after this answer; `data`: the request, where the parser may have to answer it after all."""

    def __init__(self, protocol: Any, data: bytes = b"") -> None:
        self._protocol = protocol
        self.data, self.held = data, b""
        self.last = False

    @property
    def answered(self) -> bool:
        """Whether an answer went out; otherwise nothing did."""
        return True

    @property
    def closing(self) -> bool:
        """Whether the client was told that its connection ends."""
        return False

    def hold(self, data: bytes) -> None:
        """Keep what came behind the request."""
        before, self.held = len(self.held), self.held + data
        if before <= _HELD < len(self.held):
            self._protocol.transport.pause_reading()

    def _read_on(self) -> None:
        """What was held is about to be read."""
        if len(self.held) > _HELD:
            self._protocol.transport.resume_reading()


class Mending(Holding):
    """`ended` is called once: the rest is out, or the connection is cut."""

    def __init__(self, protocol: Any, rest: Rest, torn: TornError, ended: Callable[[Holding], None]) -> None:
        super().__init__(protocol)
        self._ended = ended
        self._task = asyncio.get_running_loop().create_task(self._go_on(rest, torn))
        self._task.add_done_callback(self._done)

    def __repr__(self) -> str:
        return f"<Mending, {len(self.held)} bytes held>"

    def cancel(self) -> None:
        """The client is gone."""
        self._task.cancel()

    async def _go_on(self, rest: Rest, torn: TornError) -> None:
        async with aclosing(rest(torn)) as pieces:  # at most what one turn takes: it may wait in memory
            async for piece in pieces:
                self._protocol.transport.write(piece)
                self._protocol.wrote(len(piece))

    def _done(self, task: asyncio.Task[None]) -> None:
        transport = self._protocol.transport
        error = None if task.cancelled() else task.exception()
        if transport is not None and (task.cancelled() or error is not None):
            log.warning("an answer under way was cut", extra={"why": str(error)})
            transport.abort()
        elif transport is not None and not transport.is_closing():
            self._read_on()
        self._ended(self)
