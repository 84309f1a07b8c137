"""The node side of a prefetch: messages, and the worker that fetches into the cache.

A request names objects of one bucket that this node is responsible for; the response streams outcomes, one
final outcome per name. Cached objects with the wanted ETag are skipped. The caller has authorized the names.
A request has a bounded number of pieces in flight and ends when its caller disconnects.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from meshd.origins.cache.cache_store import CHUNK_BYTES
from meshd.origins.client.origin_api import ObjectFacts, OriginDownError, OriginError
from meshd.rpc.peer_rpc import PREFIX, PeerCall, ResponseStream, stream_handler
from meshd.util.async_tasks import BackgroundTasks
from meshd.util.byte_rate import RateLimiter
from meshd.util.timeouts import timeout
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.rpc.peer_rpc import CallContext


MAX_NAMES: Final = 1000
_LENGTH: Final = 4
_MOST: Final = 64 << 10

PrefetchAction = Literal["look", "fetch", "have"]
Verdict = Literal["found", "fetched", "there", "lacking", "failed", "elsewhere", "moved"]


class PrefetchItem(Struct, frozen=True, array_like=True):
    """An object of an origin; size -1 while only its name is known."""

    key: Annotated[str, Meta(max_length=4096)]
    size: int = -1
    etag: Annotated[str, Meta(max_length=4096)] = ""
    modified: int = 0

    @classmethod
    def from_facts(cls, key: str, facts: ObjectFacts) -> PrefetchItem:
        return cls(key, facts.size, facts.etag, facts.modified)

    def facts(self) -> ObjectFacts:
        """Return the known facts."""
        return ObjectFacts(self.size, self.etag, self.modified)


class PrefetchRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A prefetch request. `work`: look (return the origin's facts), fetch (into the cache), have (report
    which are cached). `created_ms` tells the bucket from an earlier one of its name. `rate`: maximum bytes
    per second; 0: unlimited."""

    bucket: Annotated[str, Meta(max_length=63)]
    created_ms: int
    work: PrefetchAction
    wanted: Annotated[list[PrefetchItem], Meta(max_length=MAX_NAMES)]
    rate: Annotated[int, Meta(ge=0)] = 0


class PrefetchOutcome(Struct, frozen=True, array_like=True):
    """An outcome of name `number`: `found` (with its facts), `fetched` or `there`, `lacking` (not cached),
    `failed` (`text` says why), `elsewhere` (another node serves it); `moved`: bytes arrived, and more may
    follow."""

    number: int
    verdict: Verdict
    size: int = 0
    etag: str = ""
    modified: int = 0
    text: str = ""

    @property
    def last(self) -> bool:
        """Whether this is the final outcome of the name."""
        return self.verdict != "moved"


PREFETCH: Final = PeerCall(
    f"{PREFIX}origins/warm",
    request=PrefetchRequest,
    response=ResponseStream,
    max_bytes=8 << 20,
    map_wait=1.0,
)
"""Returns outcomes as they come, each framed by its length (`OutcomeDecoder`)."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PrefetchOutcome).decode


def framed(outcome: PrefetchOutcome) -> bytes:
    """Encode an outcome with its length."""
    body = _encode(outcome)
    return len(body).to_bytes(_LENGTH, "big") + body


class OutcomeDecoder:
    """Decodes outcomes from bytes that arrive in chunks of any size. Raises msgspec.MsgspecError."""

    def __init__(self) -> None:
        self._held = bytearray()

    def __repr__(self) -> str:
        return f"<OutcomeDecoder, {len(self._held)} bytes held>"

    def feed_bytes(self, data: bytes) -> Iterator[PrefetchOutcome]:
        self._held += data
        while len(self._held) >= _LENGTH:
            size = int.from_bytes(self._held[:_LENGTH], "big")
            if size > _MOST:
                raise msgspec.ValidationError("an outcome is too long")
            if len(self._held) < _LENGTH + size:
                return
            outcome = _decode(bytes(self._held[_LENGTH : _LENGTH + size]))
            del self._held[: _LENGTH + size]
            yield outcome


_log = logging.getLogger("meshd.origins")
_CONCURRENCY: Final = 16  # concurrent objects of one request
_PIECES: Final = 16  # concurrent pieces of them
_TRIES: Final = 5
_PAUSE: Final = 2.0  # seconds between attempts while the origin is down, doubled each time
_BEAT: Final = 5.0  # seconds after which an idle request sends a heartbeat
_TEXT: Final = 300


class PrefetchWorker:
    """Prefetches objects into this node's cache. One instance per process."""

    def __init__(self, backed: BackedBucketService, mesh: ClusterView) -> None:
        self._backed, self._mesh = backed, mesh

    def __repr__(self) -> str:
        return f"<PrefetchWorker of {self._mesh.node_id}>"

    @stream_handler(PREFETCH)
    async def prefetch(self, ask: PrefetchRequest, context: CallContext) -> AsyncGenerator[bytes, None]:
        """Stream the outcomes to another node until it disconnects."""
        async with aclosing(self.run_request(ask)) as said:
            async for outcomes in said:
                yield b"".join(map(framed, outcomes))

    async def run_request(self, ask: PrefetchRequest) -> AsyncGenerator[list[PrefetchOutcome], None]:
        """Yield the outcomes of a request as they come; each name has one final outcome."""
        bucket = self._backed.cache_store.backed_bucket(ask.bucket)
        # The bucket is not known here yet, or was deleted.
        if bucket is None or bucket.created_ms != ask.created_ms:
            yield [PrefetchOutcome(number, "elsewhere") for number in range(len(ask.wanted))]
            return
        question = _RequestRun(self._backed, self._mesh, bucket, ask)
        tasks = BackgroundTasks("prefetch")
        try:
            for _ in range(min(_CONCURRENCY, len(ask.wanted))):
                tasks.spawn(question.run_fetches(), "fetches")
            left = len(ask.wanted)
            while left:
                said = await question.next_outcomes()
                left -= sum(outcome.last for outcome in said)
                yield said
        finally:
            await tasks.aclose()


class _RequestRun:
    def __init__(
        self, backed: BackedBucketService, mesh: ClusterView, bucket: Bucket, ask: PrefetchRequest
    ) -> None:
        self._backed, self._mesh, self._bucket, self._work = backed, mesh, bucket, ask.work
        self._left: Iterator[tuple[int, PrefetchItem]] = iter(enumerate(ask.wanted))
        self._budget = RateLimiter(lambda: ask.rate)
        self._said: asyncio.Queue[PrefetchOutcome] = asyncio.Queue()
        self._pieces = asyncio.Semaphore(_PIECES)

    async def next_outcomes(self) -> list[PrefetchOutcome]:
        """Return the outcomes since the last call; after a while without any, a heartbeat."""
        try:
            async with timeout(_BEAT):
                said = [await self._said.get()]
        except TimeoutError:
            return [PrefetchOutcome(0, "moved")]
        while not self._said.empty():
            said.append(self._said.get_nowait())
        return said

    async def run_fetches(self) -> None:
        for number, wanted in self._left:
            try:
                outcome = await self._outcome(number, wanted)
            except (OriginError, S3Error) as error:
                outcome = PrefetchOutcome(number, "failed", text=str(error)[:_TEXT])
            except Exception:
                _log.exception("an object could not be prefetched")
                outcome = PrefetchOutcome(
                    number, "failed", text="internal error; the node's log has the details"
                )
            self._said.put_nowait(outcome)

    async def _outcome(self, number: int, wanted: PrefetchItem) -> PrefetchOutcome:
        key, bucket = wanted.key, self._bucket
        if not self._mesh.is_reader(bucket.name, key):
            return PrefetchOutcome(number, "elsewhere")
        if self._work == "look":
            facts = await self._backed.origin_facts(bucket, key)
            return PrefetchOutcome(number, "found", facts.size, facts.etag, facts.modified)
        if self._backed.is_dirty(bucket, key):  # newer than at the origin, and in durable storage
            return PrefetchOutcome(number, "there", wanted.size)
        missing = self._missing(key, wanted.facts())
        if self._work == "have":
            return PrefetchOutcome(number, "lacking" if missing else "there")
        if not missing:
            self._backed.cache_store.mark_fresh(bucket, key, wanted.etag)
            return PrefetchOutcome(number, "there", wanted.size)
        await self._fetch(number, key, wanted.facts(), missing)
        # Also if a peer sent it: the origin listed this ETag.
        self._backed.cache_store.mark_fresh(self._bucket, key, wanted.etag)
        return PrefetchOutcome(number, "fetched", wanted.size)

    def _missing(self, key: str, facts: ObjectFacts) -> list[int]:
        reader, count = self._backed.reader, max(1, -(-facts.size // CHUNK_BYTES))
        return [
            number for number in range(count) if reader.cached_chunk(self._bucket, key, facts, number) is None
        ]

    async def _fetch(self, number: int, key: str, facts: ObjectFacts, missing: list[int]) -> None:
        """Fetch the pieces of an object, several concurrently."""
        left = iter(missing)

        async def some() -> None:
            for piece in left:
                size = min(CHUNK_BYTES, facts.size - piece * CHUNK_BYTES)
                async with self._pieces:
                    await self._budget.acquire_bytes(size)
                    await self._piece(key, facts, piece)
                self._said.put_nowait(PrefetchOutcome(number, "moved", size))

        fetches = [asyncio.ensure_future(some()) for _ in range(min(_PIECES, len(missing)))]
        try:
            await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def _piece(self, key: str, facts: ObjectFacts, piece: int) -> None:
        pause = _PAUSE
        for attempt in range(_TRIES):
            try:
                flight = await self._backed.reader.start_chunk(self._bucket, key, piece, facts.etag)
                try:
                    await flight.wait_until_done()
                finally:
                    flight.release()
            except OriginDownError:
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(pause)
                pause *= 2
            else:
                return
