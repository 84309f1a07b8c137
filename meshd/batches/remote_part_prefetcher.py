"""Fetches the parts of a stream that other nodes hold, one window ahead.

Law: parts are consumed in stream order. Invariant: at most two windows are in memory, and none after the
end.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final, Self

from awscrt.checksums import crc32c

from meshd.core.memory_frames import MemoryAccount
from meshd.core.peer_source import ReadFailure
from meshd.util.async_tasks import cancel_and_discard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshd.core.peer_source import FetchedRanges, ObjectRange, PeerSource
    from meshd.store.records import Location

_WINDOW: Final = 8 << 20
_PARTS: Final = 2000
Piece = tuple[tuple[int, int], "ObjectRange"]
"""The (blob number, offset) of a piece, and where its bytes are."""
_Window = dict[tuple[int, int], "Location | ReadFailure"]


class RemotePrefetcher:
    """The `pieces` of blobs that other nodes hold, in stream order."""

    def __init__(self, remote: PeerSource, pieces: Iterator[Piece]) -> None:
        self._remote = remote
        self._windows = _windows(pieces)
        self._memory = MemoryAccount()
        self._held: FetchedRanges | None = None
        self._window: _Window = {}
        self._ahead: asyncio.Task[tuple[FetchedRanges, _Window]] | None = None

    def __repr__(self) -> str:
        return f"<RemotePrefetcher {self._memory!r}>"

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        ahead, self._ahead = self._ahead, None
        self._release()
        await cancel_and_discard(ahead, lambda unused: unused[0].close())

    async def fill_range(self, number: int, offset: int, view: memoryview) -> bool:
        """Copy the piece of blob `number` at `offset` into `view`. Returns False if it cannot be read."""
        while (number, offset) not in self._window:
            assert self._ahead is not None
            self._release()
            self._held, self._window = await self._ahead
            self._begin()
        place = self._window.pop((number, offset))
        if isinstance(place, ReadFailure) or place.length != len(view):
            return False
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            whole = os.preadv(fd, [view], place.offset) == len(view)
        finally:
            os.close(fd)
        return whole and crc32c(view) == place.crc32c

    def _begin(self) -> None:
        window = next(self._windows, None)
        self._ahead = None if window is None else asyncio.create_task(self._fetch(window))

    async def _fetch(self, window: Sequence[Piece]) -> tuple[FetchedRanges, _Window]:
        fetched = await self._remote.fetch_parts([part for _, part in window], self._memory)
        return fetched, {name: place for (name, _), place in zip(window, fetched.places, strict=True)}

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
        self._held, self._window = None, {}


def _windows(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    window: list[Piece] = []
    size = 0
    for piece in pieces:
        window.append(piece)
        size += piece[1].length
        if size >= _WINDOW or len(window) >= _PARTS:
            yield window
            window, size = [], 0
    if window:
        yield window
