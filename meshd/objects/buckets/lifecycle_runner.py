"""Lifecycle runner: sweeps buckets for what their lifecycle rules expire, and removes it in small batches.

`lifecycle_rules` alone decides what expires, and the runner checks each entry again before it removes
it. A bucket is swept once a day and once after its rules change; an interrupted sweep resumes where it
stopped. The runner sleeps as long as it works, so clients keep at least half of the disk and of the
process. A clock that jumps days ahead would expire everything: it has to stay there for a while first.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from meshd.control.cached_topic import CachedTopic
from meshd.core.document_store import RESERVED_BUCKET
from meshd.objects import lifecycle_rules
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    NoSuchUploadError,
    StoreError,
)
from meshd.store.records import NULL
from meshd.telemetry import metrics
from meshd.util.clock_jumps import ClockJumps
from meshwire.http_values.conditional_requests import Conditions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from meshd.cluster.cluster_view import ClusterView
    from meshd.control.buckets import Bucket, BucketTable
    from meshd.control.control_api import ControlStore
    from meshd.objects.lifecycle_rules import ExpiryAction, ExpiryPlanner, ListedVersion
    from meshd.store.api import StoreReader, StoreWriter
    from meshd.store.records import Record, Upload, VersionPage
    from meshd.util.clock import Clock
    from meshd.util.clock_jumps import ClockWatch

T = TypeVar("T")

log = logging.getLogger("meshd.lifecycle")

PAGE_ENTRIES = 500
_BATCH = 100  # concurrent removals, which share a commit
_NOTE_SECONDS = 30.0  # at most this much of a sweep is repeated after a crash


class SweepProgress(msgspec.Struct, frozen=True):
    """How far a sweep of a bucket has come; `mark` stands for the day and the rules."""

    mark: str
    after: str = ""
    done: bool = False


_decode = msgspec.json.Decoder(SweepProgress).decode


class LifecycleRunner:
    """Applies the lifecycle rules of all buckets. One instance per node. `settle_seconds`: how long nothing
    is removed after the clock was found to be more than a day later than it should be; `watch`: see
    `ClockJumps`."""

    def __init__(
        self,
        store: StoreReader,
        replicated: StoreWriter,
        buckets: BucketTable,
        control: ControlStore,
        clock: Clock,
        stale_upload_days: int,
        mesh: ClusterView | None = None,
        *,
        settle_seconds: float = 0.0,
        watch: ClockWatch | None = None,
    ) -> None:
        self._jumps = ClockJumps(clock, settle_seconds, watch)
        self._store, self._replicated, self._buckets = store, replicated, buckets
        self._clock, self._mesh = clock, mesh
        self._stale_upload_days = stale_upload_days
        self._progress = CachedTopic(control, "lifecycle", _decode)
        self._swept: dict[str, str] = {}  # bucket → mark: these need no look at the control store

    def __repr__(self) -> str:
        return f"<LifecycleRunner {len(self._swept)} buckets swept>"

    async def sweep(self) -> Counter[str]:
        """Sweep every bucket that is due; return how much was removed, by action. A bucket that cannot be
        read is logged and retried at the next sweep. Raises ControlError: without the control store, a node
        does not know whether rules still hold."""
        removed: Counter[str] = Counter()
        now = self._clock.now_ms()  # of the whole sweep, which may take hours: the clock may jump meanwhile
        if not self._trusts_clock(now):
            return removed
        names = set()
        for bucket in self._buckets.list_all():
            names.add(bucket.name)
            if bucket.name == RESERVED_BUCKET:
                continue
            try:
                await self._sweep_bucket(bucket, now, removed)
            except StoreError as error:
                log.warning(
                    "cannot sweep a bucket; the next sweep retries it",
                    extra={"bucket": bucket.name, "why": str(error)},
                )
        await self._drop_progress_of_deleted(names)
        if removed:
            log.info("lifecycle", extra=dict(removed))
        return removed

    def _trusts_clock(self, now: int) -> bool:
        """Whether this time of day may decide what has expired. The first sweep compares it with the days of
        earlier ones, by any node; this node may have been off for longer."""
        days = [int(each.mark.partition("-")[0]) for each in self._progress.current().values()]
        trusted = self._jumps.trusts_clock(now, (max(days) + 1) * lifecycle_rules.DAY_MS if days else 0)
        if self._jumps.days_ahead:
            log.warning(
                "the clock is days later than when buckets were last swept: lifecycle rules wait, in case it "
                "is wrong",
                extra={"days": self._jumps.days_ahead},
            )
        return trusted

    async def _drop_progress_of_deleted(self, present: set[str]) -> None:
        """Remove the progress of deleted buckets."""
        for name in self._swept.keys() - present:
            del self._swept[name]
        for name in self._progress.current():
            if name.partition("/")[0] not in present:
                await self._progress.delete(name)

    # --- one bucket -----------------------------------------------------------------------------------

    async def _sweep_bucket(self, bucket: Bucket, now: int, removed: Counter[str]) -> None:
        mark = self._mark(bucket, now)
        if self._swept.get(bucket.name) == mark:
            return
        present = await self._buckets.get_latest(bucket.name)  # rules of yesterday may be gone
        if present is None:
            return
        bucket, mark = present, self._mark(present, now)
        progress = self._progress.current().get(self._progress_name(bucket)) if bucket.lifecycle else None
        if progress is None or progress.mark != mark:
            progress = SweepProgress(mark)
        if not progress.done:
            await self._sweep_uploads(bucket, now, removed)
            await self._sweep_versions(bucket, now, progress, removed)
            if not self._rules_hold(bucket):
                return
            if bucket.lifecycle:
                await self._progress.put(self._progress_name(bucket), SweepProgress(mark, done=True))
        self._swept[bucket.name] = mark

    def _mark(self, bucket: Bucket, now: int) -> str:
        """Return what identifies a finished sweep: the day, the rules and the map. Days end at midnight, so a
        second sweep on the same day finds nothing more unless the rules changed."""
        rules = msgspec.json.encode((bucket.created_ms, bucket.lifecycle, self._stale_upload_days))
        mark = f"{now // lifecycle_rules.DAY_MS}-{zlib.crc32(rules):08x}"
        # The keys of which this node is the primary change with the map.
        return (
            mark
            if self._mesh is None or self._mesh.single_node
            else f"{mark}-{self._mesh.current_map().version}"
        )

    def _progress_name(self, bucket: Bucket) -> str:
        """Return the name of this node's progress: each node sweeps the keys of which it is the primary."""
        if self._mesh is None or self._mesh.single_node:
            return bucket.name
        return f"{bucket.name}/{self._mesh.node_id}"

    def _is_primary(self, bucket: str, key: str) -> bool:
        return self._mesh is None or self._mesh.is_primary(bucket, key)

    async def _sweep_uploads(self, bucket: Bucket, now: int, removed: Counter[str]) -> None:
        key = upload_id = ""
        while True:
            began = self._clock.monotonic()
            page = self._store.list_uploads(
                bucket.name, key_marker=key, id_marker=upload_id, limit=PAGE_ENTRIES
            )
            stale = [
                upload
                for upload in page.uploads
                if upload.born not in (0, bucket.created_ms)
                or lifecycle_rules.upload_is_due(
                    bucket.lifecycle, upload.key, upload.initiated, self._stale_upload_days, now
                )
            ]
            await self._remove_batches(stale, self._abort, removed)
            await self._throttle(began)
            if not page.truncated:
                return
            key, upload_id = page.next_key, page.next_id

    async def _sweep_versions(
        self, bucket: Bucket, now: int, progress: SweepProgress, removed: Counter[str]
    ) -> None:
        planner, noted = lifecycle_rules.ExpiryPlanner(bucket.lifecycle, now), self._clock.monotonic()
        for prefix in lifecycle_rules.prefixes(bucket.lifecycle):
            if progress.after > prefix and not progress.after.startswith(prefix):
                continue
            key, version = progress.after, ""
            while True:
                began = self._clock.monotonic()
                page = self._store.list_versions(
                    bucket.name, prefix=prefix, key_marker=key, version_marker=version, limit=PAGE_ENTRIES
                )
                doomed = _expired_entries(planner, page)
                await self._remove_batches(doomed, lambda entry: self._remove(bucket, entry), removed)
                await self._throttle(began)
                if not page.truncated:
                    break
                if not self._rules_hold(bucket):
                    return
                key, version = page.next_key, page.next_version
                if self._clock.monotonic() - noted > _NOTE_SECONDS:
                    noted = self._clock.monotonic()
                    after = planner.behind or progress.after
                    await self._progress.put(self._progress_name(bucket), SweepProgress(progress.mark, after))

    async def _throttle(self, began: float) -> None:
        """Sleep as long as the work took: the clients keep at least half of the disk and of this process."""
        await asyncio.sleep(self._clock.monotonic() - began)

    # --- removing -------------------------------------------------------------------------------------

    async def _remove_batches(
        self, what: Iterable[T], remove: Callable[[T], Awaitable[str]], removed: Counter[str]
    ) -> None:
        """Remove a batch at a time. Raises the first StoreError, after all removals of its batch ended."""
        waiting = list(what)
        for start in range(0, len(waiting), _BATCH):
            batch = [remove(entry) for entry in waiting[start : start + _BATCH]]
            outcomes = await asyncio.gather(*batch, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, str) and outcome:
                    removed[outcome] += 1
                    metrics.lifecycle_expired.labels(outcome).inc()
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome

    async def _abort(self, upload: Upload) -> str:
        if not self._is_primary(upload.bucket, upload.key):
            return ""
        try:
            await self._replicated.abort_upload(upload)
        except NoSuchUploadError:  # completed or aborted meanwhile
            return ""
        return "upload"

    async def _remove(self, bucket: Bucket, doomed: ExpiryAction) -> str:
        """Remove one entry and return the action; empty if something has changed since the listing: new
        rules, a newer version, other tags."""
        name, version = bucket.name, doomed.version
        if not self._is_primary(name, version.key):
            return ""
        if not self._rules_hold(bucket) or not self._is_still(name, version):
            return ""
        unchanged = version.modified // 1000
        try:
            if doomed.action == "expire":
                same = Conditions((version.etag,), if_unmodified_since=unchanged)
                present = self._buckets.get(name) or bucket
                result = await self._replicated.delete(
                    name, version.key, conditions=same, versioning=present.versioning
                )
            else:
                same = Conditions(if_unmodified_since=unchanged)
                result = await self._replicated.delete_version(
                    name, version.key, version.version, conditions=same
                )
        except (ConditionFailedError, ConditionMissingError):
            return ""
        return doomed.action if result.record or result.marker else ""

    def _rules_hold(self, bucket: Bucket) -> bool:
        """Whether the bucket still exists with the same rules: a user who removes rules wants the sweep to
        stop."""
        present = self._buckets.get(bucket.name)
        if present is None or present.created_ms != bucket.created_ms:
            return False
        return present.lifecycle == bucket.lifecycle

    def _is_still(self, bucket: str, version: ListedVersion) -> bool:
        newest = self._store.newest_version(bucket, version.key)
        if version.latest:
            return newest is not None and _version(version.key, newest, latest=True) == version
        found = self._store.get_version(bucket, version.key, version.version)
        uncovered = newest is not None and (newest.version or NULL) == version.version
        return not uncovered and found is not None and _version(version.key, found, latest=False) == version


def _expired_entries(planner: ExpiryPlanner, page: VersionPage) -> list[ExpiryAction]:
    """Return what expires of one page; after the last page, also what the planner still held back."""
    doomed = [
        entry
        for (key, record), latest in zip(page.entries, page.latest, strict=True)
        for entry in planner.add_version(_version(key, record, latest=latest))
    ]
    return doomed if page.truncated else [*doomed, *planner.finish()]


def _version(key: str, record: Record, *, latest: bool) -> ListedVersion:
    return lifecycle_rules.ListedVersion(
        key,
        record.modified,
        record.stamp,
        record.size,
        record.tags,
        record.version or NULL,
        record.etag,
        record.marker,
        latest,
    )
