"""Limits on the connections of the webhook's server: how many there are, and how long one may be idle.

Law: a connection that has sent no whole request for too long ends, whatever it waits for; one whose request
is being answered stays. aiohttp itself waits for the head and the body of a request without end.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from aiohttp.web import Request, RequestHandler


class ConnectionLimits:
    """`idle`: seconds without a whole request; `most`: connections at a time."""

    def __init__(self, idle: float, most: int) -> None:
        self._idle, self._most = idle, most
        self._since: dict[RequestHandler, float] = {}
        self._busy: set[RequestHandler] = set()

    def __repr__(self) -> str:
        return f"<ConnectionLimits of {len(self._since)} connections>"

    @contextmanager
    def answering(self, request: Request) -> Iterator[None]:
        """The whole request has come; meanwhile its connection stays."""
        self._busy.add(request.protocol)
        try:
            yield
        finally:
            self._busy.discard(request.protocol)
            self._since[request.protocol] = asyncio.get_running_loop().time()

    def sweep(self, connections: Sequence[RequestHandler]) -> int:
        """End those of the open `connections` that have been idle for too long, and the longest idle of too
        many; how many."""
        now = asyncio.get_running_loop().time()
        self._since = {each: self._since.get(each, now) for each in connections}
        waiting = sorted(
            (each for each in connections if each not in self._busy), key=self._since.__getitem__
        )
        late = sum(now - self._since[each] >= self._idle for each in waiting)
        ended = waiting[: max(late, len(connections) - self._most)]
        for each in ended:
            if each.transport is not None:
                each.transport.abort()
        return len(ended)
