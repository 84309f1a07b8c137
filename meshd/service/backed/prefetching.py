"""Jobs that bring objects of a backed bucket into its cache, before anybody reads them.

Law: what is cached and of the listed ETag is left alone, so a job that was stopped goes on where it was.
Rights are asked key by key. What the cache's policy does not keep is named at the end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.assembly.errors import BatchError
from meshd.origin.errors import OriginDownError, OriginError
from meshd.origin.interface import Facts
from meshd.service.backed.planning import epoch_samples, pieces_read, shelves_of
from meshd.service.backed.shelf import CHUNK, shelf_name
from meshd.service.jobs.principals import Grant
from meshwire.s3.errors import S3Error
from meshwire.s3.operations import GetObject

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from meshd.assembly.catalog import Catalog
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.service.access import Access
    from meshd.service.backed.service import BackedService
    from meshd.service.jobs.kinds import Running

_AT_ONCE: Final = 32  # pieces under way
_PAGE: Final = 1000
_MANIFEST: Final = 64 << 20
_TRIES: Final = 5
_PAUSE: Final = 2.0  # seconds, then twice as long, while the origin is down
_SETTLE: Final = 0.5  # seconds after the last byte until what came is looked for in the cache


class Prefetching:
    """One a node (the steward's)."""

    def __init__(self, access: Access, backed: BackedService, catalog: Catalog, buckets: BucketTable) -> None:
        self._access, self._backed, self._catalog, self._buckets = access, backed, catalog, buckets

    def __repr__(self) -> str:
        return "<Prefetching>"

    async def work(self, running: Running) -> None:
        """See JobKind.work."""
        spec, tally = running.spec, running.tally
        bucket = self._backed.shelf.backed(spec.source.bucket)
        if bucket is None:
            raise BatchError("NoSuchBucket", f"there is no bucket {spec.source.bucket!r} with an origin")
        self._backed.require_alone("prefetching")
        grant = Grant.of(self._access, running.caller, "s3:GetObject", bucket.name)
        tally.phase = "listing"
        found: list[tuple[str, Facts]] = []
        async for key, facts in self._wanted(running, bucket):
            grant.require(key)
            found.append((key, facts))
            tally.outputs_total = tally.samples_total = len(found)
            tally.bytes_total += facts.size
        tally.phase = "fetching"
        lanes = iter(found)
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._lane(running, bucket, lanes))
        tally.phase = "checking"
        await asyncio.sleep(_SETTLE)
        for key, facts in found:
            if not self._kept(bucket, key, facts):
                tally.fail(f"s3://{bucket.name}/{key}", "not kept: what is in the cache is worth more to it")

    async def _wanted(self, running: Running, bucket: Bucket) -> AsyncIterator[tuple[str, Facts]]:
        spec = running.spec
        if spec.plan:
            async for key, facts in self._planned(running, bucket):
                yield key, facts
            return
        if spec.keys or spec.manifest:
            keys = spec.keys or await self._manifest(running)
            for key in keys:
                try:
                    yield key, await self._backed.reader.facts(bucket, key)
                except (OriginError, S3Error) as error:
                    running.tally.fail(f"s3://{bucket.name}/{key}", str(error))
            return
        after = ""
        while True:
            page = await self._backed.listings.page(bucket, spec.source.prefix, "", after, _PAGE)
            for entry in page.entries:
                yield entry.key, entry.facts()
            if not page.after:
                return
            after = page.after

    async def _planned(self, running: Running, bucket: Bucket) -> AsyncIterator[tuple[str, Facts]]:
        """What a plan reads under the source, each object once, in its order. Raises BatchError."""
        spec = running.spec
        plan = await self._catalog.plan(spec.plan)
        snapshot = await self._catalog.snapshot(plan.snapshot)
        if bucket.name not in shelves_of(snapshot, self._buckets):
            raise BatchError("BadRequest", f"the plan {spec.plan[:12]} reads nothing of {bucket.name}")
        objects, shelves = snapshot.objects, {bucket.name: shelf_name(bucket)}
        samples = await asyncio.to_thread(epoch_samples, plan, snapshot, spec.epoch)
        seen: set[str] = set()
        numbers = {
            key: number for number, key in enumerate(objects.keys) if objects.bucket_of(number) == bucket.name
        }
        for piece in pieces_read(snapshot, samples, shelves):
            if piece.key in seen or not piece.key.startswith(spec.source.prefix):
                continue
            seen.add(piece.key)
            number = numbers[piece.key]
            if snapshot.kind == "objects":
                yield piece.key, Facts(int(objects.sizes[number]), objects.etags[number], 0)
            else:  # a compressed archive's size is another one in a snapshot
                yield piece.key, await self._backed.reader.facts(bucket, piece.key)

    async def _manifest(self, running: Running) -> tuple[str, ...]:
        """The lines of an object, of any bucket that the job's maker may read."""
        name, _, key = running.spec.manifest.removeprefix("s3://").partition("/")
        Grant.of(self._access, running.caller, "s3:GetObject", name).require(key)
        data = await self._backed.whole(GetObject(name, key), _MANIFEST)
        return tuple(line.strip() for line in data.decode().splitlines() if line.strip())

    async def _lane(self, running: Running, bucket: Bucket, wanted: Iterator[tuple[str, Facts]]) -> None:
        for key, facts in wanted:
            try:
                there = await self._object(running, bucket, key, facts)
            except (OriginError, S3Error) as error:
                running.tally.fail(f"s3://{bucket.name}/{key}", str(error))
                continue
            running.tally.done(1, facts.size, there=there)

    async def _object(self, running: Running, bucket: Bucket, key: str, facts: Facts) -> bool:
        """Whether it was there."""
        missing = [number for number in _numbers(facts) if not self._has(bucket, key, facts, number)]
        if missing:
            for number in missing:
                await self._piece(bucket, key, facts, number)
                running.tally.move(min(CHUNK, facts.size - number * CHUNK))
            return False
        self._backed.shelf.note(bucket, key, facts.etag)
        return True

    async def _piece(self, bucket: Bucket, key: str, facts: Facts, number: int) -> None:
        pause = _PAUSE
        for attempt in range(_TRIES):
            try:
                flight = await self._backed.reader.fetch(bucket, key, facts, number)
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

    def _kept(self, bucket: Bucket, key: str, facts: Facts) -> bool:
        return all(self._has(bucket, key, facts, number) for number in _numbers(facts))

    def _has(self, bucket: Bucket, key: str, facts: Facts, number: int) -> bool:
        return self._backed.reader.chunk(bucket, key, facts, number) is not None


def _numbers(facts: Facts) -> range:
    return range(max(1, -(-facts.size // CHUNK)))
