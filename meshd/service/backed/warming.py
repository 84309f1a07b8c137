"""A node's part of bringing objects into caches: of the names it answers for, looked at, fetched, counted.

Law: what is cached and of the wanted ETag is left alone, so work that was stopped goes on where it was.
Whoever asked has judged rights. Invariant: pieces under way of one question are bounded, however large its
objects are, and a question that nobody waits for any more ends.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from meshd.kit.tasks import Tasks
from meshd.origin.errors import OriginDownError, OriginError
from meshd.service.backed.budgets import Budget
from meshd.service.backed.warmwire import Outcome
from meshd.service.caching.shelf import CHUNK
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from meshd.cluster.mesh import Mesh
    from meshd.control.buckets import Bucket
    from meshd.origin.interface import Facts
    from meshd.service.backed.service import BackedService
    from meshd.service.backed.warmwire import Wanted, WarmAsk

_log = logging.getLogger("meshd.origins")
_LANES: Final = 16  # objects of one question under way
_PIECES: Final = 16  # pieces of them
_TRIES: Final = 5
_PAUSE: Final = 2.0  # seconds, then twice as long, while the origin is down
_BEAT: Final = 5.0  # seconds after which something is said, though nothing came
_TEXT: Final = 300


class Warmer:
    """One a process."""

    def __init__(self, backed: BackedService, mesh: Mesh) -> None:
        self._backed, self._mesh = backed, mesh

    def __repr__(self) -> str:
        return f"<Warmer of {self._mesh.node_id}>"

    async def work(self, ask: WarmAsk) -> AsyncGenerator[list[Outcome], None]:
        """The outcomes of a question, as they come; one of each name is its last."""
        bucket = self._backed.shelf.backed(ask.bucket)
        if bucket is None or bucket.created_ms != ask.created_ms:  # news that has not come yet, or has gone
            yield [Outcome(number, "elsewhere") for number in range(len(ask.wanted))]
            return
        question = _Question(self._backed, self._mesh, bucket, ask)
        tasks = Tasks("warming")
        try:
            for _ in range(min(_LANES, len(ask.wanted))):
                tasks.spawn(question.lane(), "lane")
            left = len(ask.wanted)
            while left:
                said = await question.said()
                left -= sum(outcome.last for outcome in said)
                yield said
        finally:
            await tasks.aclose()


class _Question:
    def __init__(self, backed: BackedService, mesh: Mesh, bucket: Bucket, ask: WarmAsk) -> None:
        self._backed, self._mesh, self._bucket, self._work = backed, mesh, bucket, ask.work
        self._left: Iterator[tuple[int, Wanted]] = iter(enumerate(ask.wanted))
        self._budget = Budget(lambda: ask.rate)
        self._said: asyncio.Queue[Outcome] = asyncio.Queue()
        self._pieces = asyncio.Semaphore(_PIECES)

    async def said(self) -> list[Outcome]:
        """What was said since; now and then that nothing was."""
        try:
            async with asyncio.timeout(_BEAT):
                said = [await self._said.get()]
        except TimeoutError:
            return [Outcome(0, "moved")]
        while not self._said.empty():
            said.append(self._said.get_nowait())
        return said

    async def lane(self) -> None:
        for number, wanted in self._left:
            try:
                outcome = await self._outcome(number, wanted)
            except (OriginError, S3Error) as error:
                outcome = Outcome(number, "failed", text=str(error)[:_TEXT])
            except Exception:
                _log.exception("an object cannot be brought into the cache")
                outcome = Outcome(number, "failed", text="it broke; the node's log says how")
            self._said.put_nowait(outcome)

    async def _outcome(self, number: int, wanted: Wanted) -> Outcome:
        key, bucket = wanted.key, self._bucket
        if not self._mesh.is_reader(bucket.name, key):
            return Outcome(number, "elsewhere")
        if self._work == "look":
            facts = await self._backed.looked(bucket, key)
            return Outcome(number, "found", facts.size, facts.etag, facts.modified)
        if self._backed.dirty(bucket, key):  # newer than what the origin has, and no cache's to lose
            return Outcome(number, "there", wanted.size)
        missing = self._missing(key, wanted.facts())
        if self._work == "have":
            return Outcome(number, "lacking" if missing else "there")
        if not missing:
            self._backed.shelf.note(bucket, key, wanted.etag)
            return Outcome(number, "there", wanted.size)
        await self._fetch(number, key, wanted.facts(), missing)
        self._backed.shelf.note(self._bucket, key, wanted.etag)  # of whoever gave it: the origin listed it so
        return Outcome(number, "fetched", wanted.size)

    def _missing(self, key: str, facts: Facts) -> list[int]:
        reader, count = self._backed.reader, max(1, -(-facts.size // CHUNK))
        return [number for number in range(count) if reader.chunk(self._bucket, key, facts, number) is None]

    async def _fetch(self, number: int, key: str, facts: Facts, missing: list[int]) -> None:
        """The pieces of an object, several at a time."""
        left = iter(missing)

        async def some() -> None:
            for piece in left:
                size = min(CHUNK, facts.size - piece * CHUNK)
                async with self._pieces:
                    await self._budget.take(size)
                    await self._piece(key, facts, piece)
                self._said.put_nowait(Outcome(number, "moved", size))

        lanes = [asyncio.ensure_future(some()) for _ in range(min(_PIECES, len(missing)))]
        try:
            await asyncio.gather(*lanes)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)

    async def _piece(self, key: str, facts: Facts, piece: int) -> None:
        pause = _PAUSE
        for attempt in range(_TRIES):
            try:
                flight = await self._backed.reader.begun(self._bucket, key, piece, facts.etag)
                try:
                    await flight.over()
                finally:
                    flight.release()
            except OriginDownError:
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(pause)
                pause *= 2
            else:
                return
