"""Where the bytes of a flight go as they come: those of a large piece into the cache's own file, others to
memory.

Law: a byte is written once; what the cache is to keep lies where it is kept already. A draft that is not
kept is gone with its last reader. Invariant: readers are told of bytes that are in the file, never before.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from meshd.origin.errors import OriginDownError
from meshd.store.errors import StoreError
from meshd.telemetry import metrics

if TYPE_CHECKING:
    from meshd.control.buckets import Bucket
    from meshd.origin.interface import Reply
    from meshd.service.caching.flights import Flight
    from meshd.service.caching.shelf import Shelf
    from meshd.store.writing import StoredWriter

_STEP: Final = 1 << 20  # bytes that are written at a time, after the first
_STILL: Final = 8.0  # seconds without a byte, then the rest is asked for anew


class Draft:
    """One a flight. `in_memory`: the disks are spared until its end."""

    def __init__(self, flight: Flight, *, in_memory: bool = False) -> None:
        self.flight, self._in_memory = flight, in_memory
        self._writer: StoredWriter | None = None
        self._gathered = 0

    def __repr__(self) -> str:
        return f"<Draft of {self.flight!r} {'in memory' if self._writer is None else self._writer}>"

    async def begin(self, shelf: Shelf, bucket: Bucket, key: str, number: int, reply: Reply) -> None:
        """The origin has answered: make room."""
        writer = shelf.writer(bucket, key, number, reply.facts, reply.length)
        try:
            place = None if self._in_memory else await writer.share()
        except StoreError:  # a full disk: then it is not kept, and flies through memory
            place = None
        if place is None:
            await writer.abort()
        else:
            self._writer = writer
        self.flight.began(reply.facts, reply.length, place)

    async def fill(self, reply: Reply) -> None:
        """Take all bytes of a reply. Raises OriginError, OriginDownError too for one that stands still;
        StoreError."""
        loop, left = asyncio.get_running_loop(), reply.length
        try:
            async with aclosing(reply.pieces) as pieces, asyncio.timeout(_STILL) as patience:
                async for piece in pieces:
                    patience.reschedule(loop.time() + _STILL)
                    await self._take(piece if len(piece) <= left else piece[:left])
                    left -= len(piece)
                    if left <= 0:
                        return
        except TimeoutError:
            metrics.origin_errors.inc()
            raise OriginDownError(f"the origin sent nothing for {_STILL:g} seconds") from None
        finally:
            await self._flush()  # what came counts, whatever came after it: the rest is asked for from there

    async def _take(self, piece: bytes) -> None:
        if self._writer is None:
            self.flight.take(piece)
            return
        await self._writer.write(piece)
        self._gathered += len(piece)
        if self._gathered >= _STEP or not self.flight.have:
            await self._flush()

    async def _flush(self) -> None:
        if self._writer is not None:
            self._gathered = 0
            self.flight.grew(await self._writer.settled())

    async def written(self, shelf: Shelf, bucket: Bucket, key: str, number: int) -> StoredWriter:
        """A writer that has all bytes of the flight. Raises StoreError."""
        flight, writer = self.flight, self._writer
        if writer is None:
            assert flight.facts is not None
            writer = self._writer = shelf.writer(bucket, key, number, flight.facts, flight.length)
            if flight.length:
                await writer.write(os.pread(flight.fd, flight.length, flight.base))
        return writer

    async def aclose(self) -> None:
        """What was not kept goes."""
        if self._writer is not None:
            await self._writer.abort()
