"""Replicated store: the StoreWriter to which the services of a cluster node write.

Law: the primary checks and commits a write locally, under the fence of the map version by which it is
primary, then replicates it with the same stamp. The caller gets its answer when every node of the write
set has the write durably. So a read takes the local store and asks no other node. This also holds on a
node that is alone in its cluster: another node may join before a write in progress commits.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from meshd.cluster.replication.primary_writes import PARALLEL_CHANGES, PrimaryWrites
from meshd.cluster.replication.replicated_writer import ReplicatedWriter
from meshd.cluster.replication.write_forwarding import (
    AbortUploadRequest,
    AmendRequest,
    CompleteUploadRequest,
    CreateUploadRequest,
    DeleteRequest,
    WriteResult,
    WriteSpec,
)
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    NoSuchUploadError,
    NotPrimaryError,
    StaleEpochError,
)
from meshd.store.records import NULL, Removed, Upload
from meshd.store.replica.changes import (
    Amended,
    CompletedPart,
    Marked,
    UploadBegun,
    UploadCompleted,
    UploadEnded,
    VersionGone,
    upload_without_local_fields,
    without_local_fields,
)
from meshd.store.write_context import INTERNAL_WRITE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.primary_writes import WriteAction
    from meshd.cluster.replication.write_forwarding import ForwardedRequest
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import ObjectStore, ObjectWriter, StoreWriter
    from meshd.store.records import Meta, Record, UploadedPart
    from meshd.store.write_context import WriteContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning

_T = TypeVar("_T")


class ReplicatedStore:
    """Writes to `store`, this node's own, and replicates to the other owners; see StoreWriter. One per
    process."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock
        self.primary = PrimaryWrites(store, mesh, peers, clock)

    def __repr__(self) -> str:
        return f"<ReplicatedStore of {self._store!r} in {self._mesh!r}>"

    async def _run_on_primary(
        self,
        request: ForwardedRequest,
        here: Callable[[], Awaitable[_T]],
        read: Callable[[WriteResult], _T],
        context: WriteContext,
    ) -> _T:
        """Returns the result of `here`, or what `read` finds in that of the node that is primary now."""

        async def there(node: Node) -> _T:
            return read(await self.primary.forwarder.forward_request(node, request, context))

        return await self.primary.run_to_completion(
            self.primary.forwarder.run_on_primary(request.bucket, request.key, here, there, context)
        )

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        if not self._mesh.single_node:
            await self.primary.run_to_completion(self._wait_replicated(bucket, key, record))

    async def _wait_replicated(self, bucket: str, key: str, record: Record | None) -> None:
        await self.primary.ensure_lease_valid(bucket, key)
        if record is not None and record.version:  # newer versions do not replace it
            await self.primary.replicate_change(
                self.primary.replicator.confirmation_of(bucket, key, record), bucket, key
            )
        await self.primary.confirm_newest(bucket, key)

    async def check_conditions(
        self, bucket: str, key: str, conditions: Conditions, *, context: WriteContext = INTERNAL_WRITE
    ) -> None:
        act = partial(self._check_now, bucket, key, conditions)
        try:
            await act(context)
        except (ConditionFailedError, ConditionMissingError):
            if self._mesh.single_node:
                raise
            with suppress(NotPrimaryError):  # the primary checks them when it commits
                await self.primary.run_to_completion(self.primary.run_checked(bucket, key, act, context))

    async def _check_now(self, bucket: str, key: str, conditions: Conditions, context: WriteContext) -> None:
        try:
            await self._store.check_conditions(bucket, key, conditions, context=context)
        except (ConditionFailedError, ConditionMissingError) as error:
            if context.is_past_deadline(self._clock.stamp()):
                raise StaleEpochError(context.epoch) from error
            raise

    # objects ----------------------------------------------------------------------------------------------

    def writer(self, bucket: str, key: str, *, size: int | None) -> ObjectWriter:
        return ReplicatedWriter(self.primary, self._store.writer(bucket, key, size=size), bucket, key, size)

    async def delete(
        self,
        bucket: str,
        key: str,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        def act(fenced: WriteContext) -> Awaitable[Removed]:
            return self._store.delete(
                bucket, key, conditions=conditions, versioning=versioning, context=fenced
            )

        request = DeleteRequest(bucket, key, None, conditions, versioning)
        here = partial(self._delete, bucket, key, act, context)
        return await self._run_on_primary(request, here, WriteResult.as_removed, context)

    async def _delete(
        self, bucket: str, key: str, act: WriteAction[Removed], context: WriteContext, version: str = NULL
    ) -> Removed:
        removed = await self.primary.run_checked(bucket, key, act, context)
        version = "" if version == NULL else version
        if removed.marker is not None:
            newest = await self.primary.replicate_change(
                Marked(bucket, key, without_local_fields(removed.marker)), bucket, key
            )
            marker = await self.primary.restamp_if_behind(bucket, key, removed.marker, newest)
            return Removed(removed.record, marker)
        await self.primary.confirm_next(bucket, key)
        if removed.record is not None:
            gone = VersionGone(bucket, key, removed.record.version, removed.stamp)
            await self.primary.restamp_removal(gone, await self.primary.replicate_change(gone, bucket, key))
        else:
            await self.primary.replicate_tombstone(bucket, key, version)
        return removed

    async def delete_many(
        self,
        bucket: str,
        keys: Iterable[str],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Mapping[str, Removed]:
        unique, removed = tuple(dict.fromkeys(keys)), dict[str, Removed]()
        for start in range(0, len(unique), PARALLEL_CHANGES):
            some = unique[start : start + PARALLEL_CHANGES]
            done = await asyncio.gather(
                *[self.delete(bucket, key, versioning=versioning, context=context) for key in some]
            )
            removed.update(zip(some, done, strict=True))
        return removed

    async def delete_version(
        self,
        bucket: str,
        key: str,
        version: str,
        *,
        conditions: Conditions | None = None,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Removed:
        def act(fenced: WriteContext) -> Awaitable[Removed]:
            return self._store.delete_version(bucket, key, version, conditions=conditions, context=fenced)

        request = DeleteRequest(bucket, key, version, conditions)
        here = partial(self._delete, bucket, key, act, context, version)
        return await self._run_on_primary(request, here, WriteResult.as_removed, context)

    async def amend(
        self,
        bucket: str,
        key: str,
        version: str | None,
        *,
        tags: dict[str, str] | None = None,
        acl: Acl | None = None,
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        def act(fenced: WriteContext) -> Awaitable[Record]:
            return self._store.amend(bucket, key, version, tags=tags, acl=acl, context=fenced)

        request = AmendRequest(bucket, key, version, tags, acl)
        here = partial(self._amend, bucket, key, act, context)
        return await self._run_on_primary(request, here, WriteResult.require_record, context)

    async def _amend(self, bucket: str, key: str, act: WriteAction[Record], context: WriteContext) -> Record:
        record = await self.primary.run_as_primary(bucket, key, act, context)
        await self.primary.replicate_change(Amended(bucket, key, without_local_fields(record)), bucket, key)
        return record

    async def link(
        self,
        bucket: str,
        key: str,
        source: Record,
        meta: Meta,
        conditions: Conditions | None = None,
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        def act(fenced: WriteContext) -> Awaitable[Record]:
            return self._store.link(
                bucket, key, source, meta, conditions, versioning=versioning, context=fenced
            )

        forward = partial(
            self._link_on_primary, (bucket, key), source, WriteSpec(meta, conditions, versioning), context
        )
        here = partial(self._link, bucket, key, act, context)
        return await self.primary.run_to_completion(
            self.primary.forwarder.run_on_primary(bucket, key, here, forward, context)
        )

    async def _link_on_primary(
        self, name: tuple[str, str], source: Record, written: WriteSpec, context: WriteContext, node: Node
    ) -> Record:
        """Sends a copy as data to the primary, with the parts in which the source was uploaded."""
        meta = msgspec.structs.replace(written.meta, parts=source.parts)
        written = msgspec.structs.replace(written, meta=meta)
        return await self.primary.forwarder.forward_write(
            node, name, source.size, self.primary.replicator.read_chunks(source), written, context
        )

    async def _link(self, bucket: str, key: str, act: WriteAction[Record], context: WriteContext) -> Record:
        record = await self.primary.run_checked(bucket, key, act, context)
        return await self.primary.replicate_and_restamp(bucket, key, record)

    # uploads ----------------------------------------------------------------------------------------------

    async def create_upload(
        self, bucket: str, key: str, *, context: WriteContext = INTERNAL_WRITE, **about: Any
    ) -> Upload:
        def act(fenced: WriteContext) -> Awaitable[Upload]:
            return self._store.create_upload(bucket, key, **about, context=fenced)

        said = {name: value for name, value in about.items() if value is not None}
        request = CreateUploadRequest(Upload("", bucket, key, **said))
        here = partial(self._begin, bucket, key, act, context)
        return await self._run_on_primary(request, here, WriteResult.require_upload, context)

    async def _begin(self, bucket: str, key: str, act: WriteAction[Upload], context: WriteContext) -> Upload:
        upload = await self.primary.run_as_primary(bucket, key, act, context)
        await self.primary.replicate_change(UploadBegun(upload_without_local_fields(upload)), bucket, key)
        return upload

    def part_writer(self, upload: Upload, number: int, size: int | None) -> ObjectWriter:
        own = self._store.part_writer(upload, number, size)
        return ReplicatedWriter(self.primary, own, upload.bucket, upload.key, size, (upload, number))

    async def complete_upload(
        self,
        upload: Upload,
        parts: Sequence[int],
        meta: Meta,
        conditions: Conditions | None = None,
        *,
        etags: Sequence[str] = (),
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Record:
        def act(fenced: WriteContext) -> Awaitable[Record]:
            return self._store.complete_upload(
                upload, parts, meta, conditions, etags=etags, versioning=versioning, context=fenced
            )

        request = CompleteUploadRequest(
            upload.bucket,
            upload.key,
            upload.upload_id,
            tuple(parts),
            meta,
            conditions,
            tuple(etags),
            versioning,
        )
        here = partial(self._complete, upload, parts, act, context)
        return await self._run_on_primary(request, here, WriteResult.require_record, context)

    async def _complete(
        self, upload: Upload, numbers: Sequence[int], act: WriteAction[Record], context: WriteContext
    ) -> Record:
        bucket, key = upload.bucket, upload.key
        known = {part.number: part for part in self._all_parts(upload)}
        try:
            record = await self.primary.run_checked(bucket, key, act, context)
        except NoSuchUploadError:
            await self.primary.replicate_upload_end(upload)
            raise
        chosen = tuple(CompletedPart(n, known[n].stamp, known[n].etag) for n in numbers if n in known)
        change = UploadCompleted(bucket, key, upload.upload_id, chosen, without_local_fields(record))
        return await self.primary.restamp_if_behind(
            bucket, key, record, await self.primary.replicate_change(change, bucket, key)
        )

    def _all_parts(self, upload: Upload) -> list[UploadedPart]:
        found: list[UploadedPart] = []
        after, more = 0, True
        while more:
            page = self._store.list_parts(upload, after)
            found += page.parts
            after, more = page.next_after, page.truncated
        return found

    async def abort_upload(self, upload: Upload, *, context: WriteContext = INTERNAL_WRITE) -> int:
        request = AbortUploadRequest(upload.bucket, upload.key, upload.upload_id)
        here = partial(self._abort, upload, context)
        return await self._run_on_primary(request, here, WriteResult.end_stamp, context)

    async def _abort(self, upload: Upload, context: WriteContext) -> int:
        bucket, key = upload.bucket, upload.key
        try:
            stamp = await self.primary.run_as_primary(
                bucket, key, lambda fenced: self._store.abort_upload(upload, context=fenced), context
            )
        except NoSuchUploadError:
            await self.primary.replicate_upload_end(upload)
            raise
        await self.primary.replicate_change(UploadEnded(bucket, key, upload.upload_id, stamp), bucket, key)
        return stamp


def replicated_store(store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> StoreWriter:
    """Returns the store for services to write to: the given store itself on a standalone node."""
    return store if mesh.standalone else ReplicatedStore(store, mesh, peers, clock)


if TYPE_CHECKING:

    def _is_a_store(replicated: ReplicatedStore) -> StoreWriter:
        return replicated  # a type check only
