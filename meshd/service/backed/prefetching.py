"""Jobs that bring objects of a backed bucket into the caches of the nodes that answer for them.

Law: one node lists, and counts what all of them do; what is cached is left alone, so a job that was stopped
goes on where it was. Of a bucket with homes each copy counts: the job is done when the last home is full.
Rights are asked key by key. What a cache's policy does not keep is named at the end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.assembly.errors import BatchError
from meshd.origin.errors import OriginError
from meshd.service.backed.budgets import Budget
from meshd.service.backed.planning import epoch_samples, pieces_read, shelves_of
from meshd.service.backed.reading import told
from meshd.service.backed.warmwire import Wanted
from meshd.service.caching.shelf import shelf_name
from meshd.service.jobs.principals import Grant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.assembly.catalog import Catalog
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.service.authorization.access import Access
    from meshd.service.backed.service import BackedService
    from meshd.service.backed.spreading import Spreading
    from meshd.service.backed.warmwire import Outcome
    from meshd.service.datasets.births import SnapshotBirths
    from meshd.service.jobs.kinds import Running
    from meshd.service.remote.objects import RemoteObjects

_PAGE: Final = 1000
_MANIFEST: Final = 64 << 20
_SETTLE: Final = 0.5  # seconds after the last byte until what came is looked for in the caches


class Prefetching:
    """One a node (the steward's)."""

    def __init__(
        self,
        access: Access,
        backed: BackedService,
        catalog: Catalog,
        buckets: BucketTable,
        objects: RemoteObjects,
        spreading: Spreading,
        births: SnapshotBirths,
    ) -> None:
        self._access, self._backed, self._catalog, self._buckets = access, backed, catalog, buckets
        self._objects, self._spreading, self._births = objects, spreading, births

    def __repr__(self) -> str:
        return "<Prefetching>"

    async def work(self, running: Running) -> None:
        """See JobKind.work."""
        spec, tally = running.spec, running.tally
        bucket = self._backed.shelf.backed(spec.source.bucket)
        if bucket is None:
            raise BatchError("NoSuchBucket", f"there is no bucket {spec.source.bucket!r} with an origin")
        grant = Grant.of(self._access, running.caller, "s3:GetObject", bucket.name)
        tally.phase = "listing"
        found: list[Wanted] = []
        async for wanted in self._wanted(running, bucket):
            grant.require(wanted.key)
            found.append(wanted)
            tally.outputs_total = tally.samples_total = len(found)
            tally.bytes_total += max(0, wanted.size)
        found = await self._looked(running, bucket, found)
        homes = self._spreading.homes(bucket)
        tally.multiply(len(homes))
        amiss, budget = set[str](), Budget(running.rate)
        for home in homes:
            await self._fill(running, bucket, found, amiss, budget, home)

    async def _fill(
        self,
        running: Running,
        bucket: Bucket,
        found: list[Wanted],
        amiss: set[str],
        budget: Budget,
        home: str,
    ) -> None:
        """One copy, at a home, or ("") dealt out. `amiss`: the names that some home could not have, of which
        each fails once."""
        tally, counted = running.tally, set[str]()
        sound = left = found
        while True:
            version = self._spreading.version
            failed = await self._fetch(running, bucket, left, counted, amiss, budget, home)
            sound = [wanted for wanted in sound if wanted.key not in failed]
            left = await self._lacking(running, bucket, sound, home)
            if not left or self._spreading.version == version:
                break  # else what a node had that is gone is fetched by those who took over
        for wanted in left:
            if wanted.key not in amiss:
                amiss.add(wanted.key)
                why = f"not kept{f' on {home}' if home else ''}: what is in the cache is worth more to it"
                tally.fail(f"s3://{bucket.name}/{wanted.key}", why)

    async def _fetch(
        self,
        running: Running,
        bucket: Bucket,
        wanted: list[Wanted],
        counted: set[str],
        amiss: set[str],
        budget: Budget,
        home: str,
    ) -> set[str]:
        """The keys that could not be had. `counted`: a name counts once a copy, however many nodes have had
        it and gone."""
        tally, failed = running.tally, set[str]()
        tally.phase = "fetching"

        def count(number: int, outcome: Outcome) -> None:
            key = wanted[number].key
            if outcome.verdict == "moved":
                tally.move(outcome.size)
            elif outcome.verdict == "failed":
                failed.add(key)
                if key not in amiss:
                    amiss.add(key)
                    tally.fail(f"s3://{bucket.name}/{key}", outcome.text)
            elif key not in counted:
                counted.add(key)
                tally.done(1, max(0, wanted[number].size), there=outcome.verdict == "there")

        await self._spreading.run(bucket, "fetch", wanted, count, home, budget)
        return failed

    async def _lacking(
        self, running: Running, bucket: Bucket, wanted: list[Wanted], home: str
    ) -> list[Wanted]:
        """Those that are not cached where they are asked for."""
        running.tally.phase = "checking"
        await asyncio.sleep(_SETTLE)
        found: list[int] = []

        def check(number: int, outcome: Outcome) -> None:
            if outcome.verdict == "lacking":
                found.append(number)

        await self._spreading.run(bucket, "have", wanted, check, home)
        return [wanted[number] for number in sorted(found)]

    async def _looked(self, running: Running, bucket: Bucket, found: list[Wanted]) -> list[Wanted]:
        """The same in their order, with what the origin has of those of which only the name was known."""
        tally = running.tally
        names = [number for number, wanted in enumerate(found) if wanted.size < 0]
        if not names:
            return found
        known: list[Wanted | None] = list(found)

        def look(number: int, outcome: Outcome) -> None:
            key = found[names[number]].key
            if outcome.verdict == "found":
                known[names[number]] = Wanted(key, outcome.size, outcome.etag, outcome.modified)
                tally.bytes_total += outcome.size
            elif outcome.last:
                known[names[number]] = None
                tally.fail(f"s3://{bucket.name}/{key}", outcome.text)

        await self._spreading.run(bucket, "look", [found[number] for number in names], look)
        there = [wanted for wanted in known if wanted is not None]
        tally.outputs_total = tally.samples_total = len(there)
        return there

    async def _wanted(self, running: Running, bucket: Bucket) -> AsyncIterator[Wanted]:
        spec = running.spec
        if spec.plan:
            async for wanted in self._planned(running, bucket):
                yield wanted
            return
        if spec.keys or spec.manifest:
            for key in dict.fromkeys(spec.keys or await self._manifest(running)):
                yield Wanted(key)
            return
        after = ""
        while True:
            try:
                page = await self._backed.listings.page(bucket, spec.source.prefix, "", after, _PAGE)
            except OriginError as error:
                raise told(error, spec.source.prefix) from error
            for entry in page.entries:
                yield Wanted.of(entry.key, entry.facts())
            if not page.after:
                return
            after = page.after

    async def _planned(self, running: Running, bucket: Bucket) -> AsyncIterator[Wanted]:
        """What a plan reads under the source, each object once, in its order. Raises BatchError."""
        spec = running.spec
        plan = await self._catalog.plan(spec.plan)
        await self._births.require(running.caller, plan.snapshot, plan.buckets, f"plans/{spec.plan}")
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
                yield Wanted(piece.key, int(objects.sizes[number]), objects.etags[number])
            else:  # a compressed archive's size is another one in a snapshot
                yield Wanted(piece.key)

    async def _manifest(self, running: Running) -> list[str]:
        """The lines of an object, of any bucket that the job's maker may read."""
        url = running.spec.manifest
        name, _, key = url.removeprefix("s3://").partition("/")
        Grant.of(self._access, running.caller, "s3:GetObject", name).require(key)
        record = await self._objects.find(name, key)
        if record is None:
            raise BatchError("NoSuchKey", f"there is no manifest {url}")
        if record.size > _MANIFEST:
            raise BatchError("TooLarge", f"{url} is larger than a manifest may be: {_MANIFEST} bytes")
        data = await self._objects.read(name, key, record.etag, 0, record.size)
        try:
            return [line.strip() for line in data.decode().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise BatchError("BadRequest", f"{url} is no list of keys, one a line in UTF-8") from error
