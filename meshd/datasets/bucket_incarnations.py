"""Binds snapshots to bucket incarnations, because the name of a deleted bucket can be reused.

Law: a snapshot is valid only for the buckets (name and `created_ms`) it was registered with. A document
next to it records them on every node. Without that document all its objects must exist in the present
bucket. Invariant: no clocks are compared, and no address depends on an incarnation.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from meshd.core.api_errors import BatchError, in_progress
from meshd.core.document_store import INCARNATIONS_PREFIX, unknown_document
from meshd.util.async_tasks import LongRunningCalls, StillRunningError
from meshwire.strict_json import canonical_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from meshd.auth.identity import Caller
    from meshd.control.buckets import BucketTable
    from meshd.core.document_store import DocumentStore
    from meshd.peer_reads.remote_objects import RemoteObjects
    from meshd.store.records import Record
    from meshd.util.async_tasks import CallProgress
    from meshwire.dataset.build_snapshot import Snapshot

BucketIncarnations = tuple[tuple[str, int], ...]
"""Buckets by name with their `created_ms`, in order; 0: the bucket does not exist."""

_REMEMBERED: Final = 10_000
_PAGE: Final = 1000
_ORIGIN_OBJECTS: Final = 64
"""Objects looked up in a bucket with an origin: each lookup costs a request to the origin."""


class SnapshotIncarnations:
    """Records and checks, for a worker, the bucket incarnations that snapshots were registered with."""

    def __init__(self, buckets: BucketTable, catalog: DocumentStore, objects: RemoteObjects) -> None:
        self._buckets, self._catalog, self._objects = buckets, catalog, objects
        self._known: OrderedDict[str, BucketIncarnations] = OrderedDict()
        self._checks: LongRunningCalls[bool] = LongRunningCalls("births")

    def __repr__(self) -> str:
        return f"<SnapshotIncarnations, {len(self._known)} snapshots known>"

    def present_incarnations(self, buckets: Iterable[str]) -> BucketIncarnations:
        """Return the present incarnations of these buckets. Takes microseconds."""
        return tuple((name, self._buckets.created_at_ms(name)) for name in sorted(set(buckets)))

    def freeze_incarnations(self) -> Callable[[Iterable[str]], BucketIncarnations]:
        """Return a lookup of the incarnations at this moment, for buckets that are named later."""
        born = {bucket.name: bucket.created_ms for bucket in self._buckets.list_all()}
        return lambda names: tuple((name, born.get(name, 0)) for name in sorted(set(names)))

    async def record_snapshot(self, digest: str, births: BucketIncarnations) -> None:
        """Record durably that a snapshot was created from buckets of these incarnations."""
        if self._known.get(digest) == births:
            return
        key, document = _document(digest, births)
        try:
            await self._catalog.put_shared(key, document)
        except BatchError:  # too few nodes accept it; on the others, `_adopt` checks the objects instead
            await self._catalog.write_document(key, document, once=True)
        self._remember(digest, births)

    async def is_recorded(self, digest: str, buckets: Iterable[str]) -> bool:
        """Return whether a snapshot is recorded for the present buckets. Raises BatchError Busy."""
        births = self.present_incarnations(buckets)
        if self._known.get(digest) == births:
            return True
        if await self._catalog.find_shared(_document(digest, births)[0]) is None:
            return False
        self._remember(digest, births)
        return True

    async def is_valid(self, digest: str, buckets: Sequence[str]) -> bool:
        """Return whether callers who may read these buckets may use a snapshot. Raises BatchError Busy."""
        births = self.present_incarnations(buckets)
        if self._known.get(digest) == births:
            return True
        if any(not born for _, born in births):
            return False
        return await self.is_recorded(digest, buckets) or await self._adopt(digest, births)

    async def require_valid(self, caller: Caller, digest: str, buckets: Sequence[str], key: str) -> None:
        """Raises BatchError NoSuchSnapshot or NoSuchPlan (depending on `key`) unless the snapshot is valid.

        Root may use a snapshot in any case.
        """
        if not caller.identity.root and not await self.is_valid(digest, buckets):
            raise unknown_document(key)

    async def _adopt(self, digest: str, births: BucketIncarnations) -> bool:
        """Return whether every object is in the present bucket; record the incarnations if so."""
        key = _document(digest, births)[0]
        try:
            found = await self._checks.run_or_wait(
                key, lambda progress: self._check(digest, births, progress)
            )
        except StillRunningError as error:
            message = f"the objects of the snapshot {digest} are being compared with the bucket: {error}"
            raise in_progress(message, error.progress) from None
        self._checks.discard_result(key)
        return found

    async def _check(self, digest: str, births: BucketIncarnations, progress: CallProgress) -> bool:
        snapshot = await self._catalog.snapshot(digest)
        objects, every = snapshot.objects, range(len(snapshot.objects))
        numbers = few_of_origins(self._objects, snapshot, every)
        for start in range(0, len(numbers), _PAGE):
            some = numbers[start : start + _PAGE]
            names = [(objects.bucket_of(number), objects.keys[number]) for number in some]
            for number, record in zip(some, await self._records(names), strict=True):
                if record is None or record.etag != objects.etags[number]:
                    return False
            progress.done = start / len(numbers)
        await self.record_snapshot(digest, births)
        return True

    async def _records(self, names: Sequence[tuple[str, str]]) -> list[Record | None]:
        if self._objects.single_node:
            return await asyncio.to_thread(self._objects.find_local, names)
        return await self._objects.find_many(names)

    def _remember(self, digest: str, births: BucketIncarnations) -> None:
        self._known[digest] = births
        self._known.move_to_end(digest)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)


def few_of_origins(remote: RemoteObjects, snapshot: Snapshot, numbers: Sequence[int]) -> Sequence[int]:
    """Return the objects to check: all, but only an even sample of those in buckets with an origin.

    Each check of an object with an origin costs a request to the origin.
    """
    far = [number for number in numbers if remote.has_origin(snapshot.objects.bucket_of(number))]
    if not far:
        return numbers
    left_out = set(far) - set(far[:: max(1, len(far) // _ORIGIN_OBJECTS)])
    return [number for number in numbers if number not in left_out]


def _document(digest: str, births: BucketIncarnations) -> tuple[str, bytes]:
    """Return the key and content of the document that records a snapshot's incarnations."""
    document = canonical_json({"snapshot": digest, "buckets": dict(births)})
    return f"{INCARNATIONS_PREFIX}{hashlib.sha256(document).hexdigest()}", document
