"""The prefetch job: fills the caches of the responsible nodes with objects of a backed bucket.

One node lists and counts for all. Cached objects are skipped, so a stopped job resumes where it was. In a
bucket with homes each copy counts, and the job ends when the last home is full. Every key is authorized. The
final report names objects that the cache did not keep.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError
from meshd.jobs.authorization import BucketGrant
from meshd.origins.access_hints import cache_names_of, epoch_samples, pieces_read
from meshd.origins.cache.cache_store import cache_name
from meshd.origins.client.origin_api import OriginError
from meshd.origins.prefetch_worker import PrefetchItem
from meshd.origins.read_sources import s3_error_for
from meshd.util.byte_rate import RateLimiter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from meshd.auth.authorizer import Authorizer
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.core.document_store import DocumentStore
    from meshd.datasets.bucket_incarnations import SnapshotIncarnations
    from meshd.jobs.job_kind import JobRun
    from meshd.origins.backed_bucket_service import BackedBucketService
    from meshd.origins.prefetch_fan_out import PrefetchFanOut
    from meshd.origins.prefetch_worker import PrefetchOutcome
    from meshd.peer_reads.remote_objects import RemoteObjects

_PAGE: Final = 1000
_MANIFEST: Final = 64 << 20
_SETTLE: Final = 0.5  # seconds after the last byte before the caches are checked


class PrefetchJob:
    """Runs prefetch jobs. One instance per node, in the coordinator."""

    def __init__(
        self,
        access: Authorizer,
        backed: BackedBucketService,
        catalog: DocumentStore,
        buckets: BucketTable,
        objects: RemoteObjects,
        spreading: PrefetchFanOut,
        births: SnapshotIncarnations,
    ) -> None:
        self._access, self._backed, self._catalog, self._buckets = access, backed, catalog, buckets
        self._objects, self._fan_out, self._births = objects, spreading, births

    async def run_job(self, running: JobRun) -> None:
        """Run a job; see JobKind.run_job."""
        spec, tally = running.spec, running.tally
        bucket = self._backed.cache_store.backed_bucket(spec.source.bucket)
        if bucket is None:
            raise BatchError("NoSuchBucket", f"there is no bucket {spec.source.bucket!r} with an origin")
        grant = BucketGrant.for_bucket(self._access, running.caller, "s3:GetObject", bucket.name)
        tally.phase = "listing"
        found: list[PrefetchItem] = []
        async for wanted in self._list_items(running, bucket):
            grant.require_access(wanted.key)
            found.append(wanted)
            tally.outputs_total = tally.samples_total = len(found)
            tally.bytes_total += max(0, wanted.size)
        found = await self._look_up(running, bucket, found)
        homes = self._fan_out.homes(bucket)
        tally.scale_totals(len(homes))
        amiss, budget = set[str](), RateLimiter(running.rate)
        for home in homes:
            await self._fill(running, bucket, found, amiss, budget, home)

    async def _fill(
        self,
        running: JobRun,
        bucket: Bucket,
        found: list[PrefetchItem],
        amiss: set[str],
        budget: RateLimiter,
        home: str,
    ) -> None:
        """Fill one copy, at `home` or ("") on the responsible nodes. `amiss`: the names that failed at some
        home; each is reported once."""
        tally, counted = running.tally, set[str]()
        sound = left = found
        while True:
            version = self._fan_out.version
            failed = await self._fetch(running, bucket, left, counted, amiss, budget, home)
            sound = [wanted for wanted in sound if wanted.key not in failed]
            left = await self._missing(running, bucket, sound, home)
            if not left or self._fan_out.version == version:
                break  # with a new map, the successors of a lost node fetch its names
        for wanted in left:
            if wanted.key not in amiss:
                amiss.add(wanted.key)
                why = f"not kept{f' on {home}' if home else ''}: the cache preferred other data"
                tally.record_failure(f"s3://{bucket.name}/{wanted.key}", why)

    async def _fetch(
        self,
        running: JobRun,
        bucket: Bucket,
        wanted: list[PrefetchItem],
        counted: set[str],
        amiss: set[str],
        budget: RateLimiter,
        home: str,
    ) -> set[str]:
        """Fetch names and return the keys that failed. `counted`: names already counted for this copy, since
        a name counts once even if several nodes fetch it."""
        tally, failed = running.tally, set[str]()
        tally.phase = "fetching"

        def count(number: int, outcome: PrefetchOutcome) -> None:
            key = wanted[number].key
            if outcome.verdict == "moved":
                tally.record_bytes(outcome.size)
            elif outcome.verdict == "failed":
                failed.add(key)
                if key not in amiss:
                    amiss.add(key)
                    tally.record_failure(f"s3://{bucket.name}/{key}", outcome.text)
            elif key not in counted:
                counted.add(key)
                tally.record_output(1, max(0, wanted[number].size), there=outcome.verdict == "there")

        await self._fan_out.fan_out(bucket, "fetch", wanted, count, home, budget)
        return failed

    async def _missing(
        self, running: JobRun, bucket: Bucket, wanted: list[PrefetchItem], home: str
    ) -> list[PrefetchItem]:
        """Return the names that are not cached on the nodes that serve them."""
        running.tally.phase = "checking"
        await asyncio.sleep(_SETTLE)
        found: list[int] = []

        def check(number: int, outcome: PrefetchOutcome) -> None:
            if outcome.verdict == "lacking":
                found.append(number)

        await self._fan_out.fan_out(bucket, "have", wanted, check, home)
        return [wanted[number] for number in sorted(found)]

    async def _look_up(
        self, running: JobRun, bucket: Bucket, found: list[PrefetchItem]
    ) -> list[PrefetchItem]:
        """Return the items in the same order, with the origin's facts where only the name was known."""
        tally = running.tally
        names = [number for number, wanted in enumerate(found) if wanted.size < 0]
        if not names:
            return found
        known: list[PrefetchItem | None] = list(found)

        def look(number: int, outcome: PrefetchOutcome) -> None:
            key = found[names[number]].key
            if outcome.verdict == "found":
                known[names[number]] = PrefetchItem(key, outcome.size, outcome.etag, outcome.modified)
                tally.bytes_total += outcome.size
            elif outcome.last:
                known[names[number]] = None
                tally.record_failure(f"s3://{bucket.name}/{key}", outcome.text)

        await self._fan_out.fan_out(bucket, "look", [found[number] for number in names], look)
        there = [wanted for wanted in known if wanted is not None]
        tally.outputs_total = tally.samples_total = len(there)
        return there

    async def _list_items(self, running: JobRun, bucket: Bucket) -> AsyncIterator[PrefetchItem]:
        spec = running.spec
        if spec.plan:
            async for wanted in self._planned_items(running, bucket):
                yield wanted
            return
        if spec.keys or spec.manifest:
            for key in dict.fromkeys(spec.keys or await self._manifest(running)):
                yield PrefetchItem(key)
            return
        after = ""
        while True:
            try:
                page = await self._backed.listings.list_page(bucket, spec.source.prefix, "", after, _PAGE)
            except OriginError as error:
                raise s3_error_for(error, spec.source.prefix) from error
            for entry in page.entries:
                yield PrefetchItem.from_facts(entry.key, entry.facts())
            if not page.after:
                return
            after = page.after

    async def _planned_items(self, running: JobRun, bucket: Bucket) -> AsyncIterator[PrefetchItem]:
        """Yield the objects that a plan reads under the source, each once, in its order. Raises
        BatchError."""
        spec = running.spec
        plan = await self._catalog.plan(spec.plan)
        await self._births.require_valid(running.caller, plan.snapshot, plan.buckets, f"plans/{spec.plan}")
        snapshot = await self._catalog.snapshot(plan.snapshot)
        if bucket.name not in cache_names_of(snapshot, self._buckets):
            raise BatchError(
                "BadRequest", f"the plan {spec.plan[:12]} reads nothing from bucket {bucket.name}"
            )
        objects, shelves = snapshot.objects, {bucket.name: cache_name(bucket)}
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
                yield PrefetchItem(piece.key, int(objects.sizes[number]), objects.etags[number])
            else:  # a snapshot has another size for a compressed archive
                yield PrefetchItem(piece.key)

    async def _manifest(self, running: JobRun) -> list[str]:
        """Return the lines of a manifest object, in any bucket that the job's creator may read."""
        url = running.spec.manifest
        name, _, key = url.removeprefix("s3://").partition("/")
        BucketGrant.for_bucket(self._access, running.caller, "s3:GetObject", name).require_access(key)
        record = await self._objects.find(name, key)
        if record is None:
            raise BatchError("NoSuchKey", f"there is no manifest {url}")
        if record.size > _MANIFEST:
            raise BatchError(
                "TooLarge", f"{url} is too large for a manifest: at most {_MANIFEST} bytes are allowed"
            )
        data = await self._objects.read_range(name, key, record.etag, 0, record.size)
        try:
            return [line.strip() for line in data.decode().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise BatchError("BadRequest", f"{url} is not a list of keys, one per line in UTF-8") from error
