"""A walk through an archive, for a consumer on the event loop.

Law: a thread walks ahead by at most about a megabyte; small files come many at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.assembly.errors import BatchError
from meshd.service.archives.walking import SCATTERED, Head, walk
from meshd.store.proving import naming, prove
from meshwire.archives.kinds import ArchiveError
from meshwire.tars import TarError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

    from meshd.service.archives.walking import Event
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record, Span
    from meshwire.archives.kinds import ArchiveKind

_BYTES: Final = 1 << 20
_EVENTS: Final = 1000


class Streamed(NamedTuple):
    """A file: exactly `size` bytes come out of `pieces`, of which each has at most 1 MiB."""

    name: str
    size: int
    pieces: AsyncIterator[bytes]


async def stream(
    store: ObjectStore, kind: ArchiveKind, record: Record, url: str, most: int
) -> AsyncGenerator[Streamed, None]:
    """See `Archives.stream`."""
    with store.reading(record, 0, record.size) as spans:
        if kind in SCATTERED:
            await prove(spans, url)
        source = _Source(walk(kind, spans, record.size, most), url, spans)
        while True:
            event = await source.next()
            if event is None:
                return
            if isinstance(event, Head):
                yield Streamed(event.name, event.size, source.pieces())


class _Source:
    def __init__(self, events: Iterator[Event], url: str, spans: Sequence[Span]) -> None:
        self._events, self._url, self._spans = events, url, spans
        self._ready: deque[Event] = deque()

    async def next(self) -> Event | None:
        """The next event, None at the end. Raises BatchError BadSample, CorruptExtentError."""
        if not self._ready:
            try:
                with naming(self._url):
                    self._ready.extend(await asyncio.to_thread(self._fetch))
            except (ArchiveError, TarError) as error:
                await prove(self._spans, self._url)  # damaged here, or stored so?
                raise BatchError(
                    "BadSample",
                    f"{self._url} cannot be read as an archive: {error}",
                    help="write it again",
                    detail={"url": self._url},
                ) from error
        return self._ready.popleft() if self._ready else None

    def _fetch(self) -> list[Event]:
        found: list[Event] = []
        room = _BYTES
        for event in self._events:
            found.append(event)
            room -= len(event.name if isinstance(event, Head) else event)
            if room <= 0 or len(found) >= _EVENTS:
                break
        return found

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is left of the file that began last."""
        while True:
            event = await self.next()
            if event is None:
                return
            if isinstance(event, Head):
                self._ready.appendleft(event)
                return
            yield event
