"""Replicated store: the ObjectStore to which the services of a cluster node write.

Law: reads are local. The primary checks and commits a write locally, under the fence of the map version
by which it is primary, then replicates it with the same stamp. The caller gets its answer when every
node of the write set has the write durably. This also holds on a node that is alone in its cluster:
another node may join before a write in progress commits. Seam: an ObjectStore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from meshd.cluster.read_barrier import ANSWER_VALID_SECONDS, ReadBarrier
from meshd.cluster.replication.primary_handover import PrimaryHandover, restamp_if_behind, restamp_removal
from meshd.cluster.replication.replicated_writer import ReplicatedWriter
from meshd.cluster.replication.replicator import WRITE_TIMEOUT, Replicator
from meshd.cluster.replication.write_forwarding import (
    AbortUploadRequest,
    AmendRequest,
    CompleteUploadRequest,
    CreateUploadRequest,
    DeleteRequest,
    StoreForwarder,
    WriteResult,
    WriteSpec,
)
from meshd.rpc.checksummed_framing import BodyFramingError
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError
from meshd.store.engine.member_header import version_id_of
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    NoSuchUploadError,
    NotPrimaryError,
    NotReplicatedError,
    StaleEpochError,
)
from meshd.store.records import NULL, Removed, Upload
from meshd.store.replica.changes import (
    Amended,
    CompletedPart,
    Marked,
    PartOf,
    UploadBegun,
    UploadCompleted,
    UploadEnded,
    VersionGone,
    upload_without_local_fields,
    without_local_fields,
)
from meshd.store.write_context import INTERNAL_WRITE, NO_DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.write_forwarding import ForwardedRequest
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import ObjectStore, ObjectWriter
    from meshd.store.records import Meta, Record, UploadedPart
    from meshd.store.replica.changes import Change
    from meshd.store.write_context import WriteContext
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning

_T = TypeVar("_T")
WriteAction = Callable[["WriteContext"], Awaitable[_T]]
"""A write to the local store, under the fence of the context that it is called with."""
_CONCURRENCY: Final = 64
_UNSETTLED_NS: Final = int(2e9 * WRITE_TIMEOUT)
"""Nanoseconds after which a write is either acknowledged or given up."""
_MAP_WAIT: Final = 2.0  # seconds to wait for a map that another process of this node already has


class ReplicatedStore:
    """Replicates writes to the other owners; see ObjectStore. One per process."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock
        self.replicator = Replicator(mesh, peers, store, clock)
        self.forwarder = StoreForwarder(mesh, peers, clock)
        self.handover = PrimaryHandover(mesh, peers, clock)
        self._read_barrier = ReadBarrier(mesh, clock)
        self._running: set[asyncio.Future[Any]] = set()
        self.close = store.close
        self.get, self.get_version, self.newest_version = store.get, store.get_version, store.newest_version
        self.list, self.list_entries, self.list_versions = store.list, store.list_entries, store.list_versions
        self.is_empty, self.revision, self.stats = store.is_empty, store.revision, store.stats
        self.open_spans, self.open_spans_many = store.open_spans, store.open_spans_many
        self.read_range, self.try_read_range, self.try_open_span = (
            store.read_range,
            store.try_read_range,
            store.try_open_span,
        )
        self.locate, self.tombstone_stamp, self.removals_since = (
            store.locate,
            store.tombstone_stamp,
            store.removals_since,
        )
        self.get_upload, self.list_parts, self.list_uploads = (
            store.get_upload,
            store.list_parts,
            store.list_uploads,
        )
        self.replica_writer, self.apply_change, self.raise_fence = (
            store.replica_writer,
            store.apply_change,
            store.raise_fence,
        )

    def __repr__(self) -> str:
        return f"<ReplicatedStore of {self._store!r} in {self._mesh!r}>"

    # acting as primary ------------------------------------------------------------------------------------

    def primary_epoch(self, bucket: str, key: str) -> int:
        """Returns the map version under which this node is the primary of a name. Raises NotPrimaryError,
        NotReplicatedError."""
        version = self._mesh.current_map().version
        primary = self.forwarder.owner(bucket, key)
        if primary is not None:
            raise NotPrimaryError(
                f"node {primary.node_id} is the primary of this name now; nothing was changed; try again"
            )
        return version

    def require_still_primary(self, bucket: str, key: str) -> int:
        """Returns the epoch like `primary_epoch`, for a write that is already committed here: another node
        may have become primary since. Raises NotReplicatedError."""
        try:
            return self.primary_epoch(bucket, key)
        except NotPrimaryError as error:
            raise NotReplicatedError(
                "another node has become the primary of this name; the write may or may not have taken "
                "effect; try again"
            ) from error

    async def _run_on_primary(
        self,
        request: ForwardedRequest,
        here: Callable[[], Awaitable[_T]],
        read: Callable[[WriteResult], _T],
        context: WriteContext,
    ) -> _T:
        """Returns the result of `here`, or what `read` finds in that of the node that is primary now."""

        async def there(node: Node) -> _T:
            return read(await self.forwarder.forward_request(node, request, context))

        return await self.run_to_completion(
            self.forwarder.run_on_primary(request.bucket, request.key, here, there, context)
        )

    async def ensure_lease_valid(self, bucket: str, key: str) -> int:
        """Returns the stamp up to which this node may act as primary, once its map is confirmed.

        A write without this check could commit here alone and, when the node returns, supersede writes that
        others have acknowledged since. Raises NotReplicatedError; then nothing was changed.
        """
        # The time is read first: if the process is suspended in between, the deadline is too early, not late.
        now = self._clock.stamp()
        left = self._mesh.lease_remaining
        if left == inf:
            return NO_DEADLINE
        if left <= 0:
            now, left = await self._confirm_with_owners(bucket, key), ANSWER_VALID_SECONDS
        return now + int(left * 1e9)

    async def _confirm_with_owners(self, bucket: str, key: str) -> int:
        """Returns the stamp at which the last of the other owners was asked; none of them uses a newer
        map."""
        now = self._clock.stamp()
        why = await self._read_barrier.wait_until_current(bucket, key)
        if why:
            raise NotReplicatedError(
                f"this node {why}, so it cannot confirm that it is still the primary; nothing was changed; "
                "use another node, or try again"
            )
        return now

    async def run_as_primary(self, bucket: str, key: str, act: WriteAction[_T], context: WriteContext) -> _T:
        """Runs `act` under the fence of the map by which this node is primary, after former primaries have
        handed the name over, and returns its result. `act` may be called again after an attempt that changed
        nothing."""
        deadline = self._clock.monotonic() + self.replicator.timeout
        while True:
            latest = await self.ensure_lease_valid(bucket, key)
            version = self.primary_epoch(bucket, key)
            self.forwarder.reject_if_abandoned(context)
            if not self._mesh.single_node and not self.handover.is_complete(bucket, key, version):
                await self.run_to_completion(
                    self.handover.wait_until_received(bucket, key, deadline - self._clock.monotonic())
                )
                continue  # the map may have changed during the handover
            try:
                return await act(context.under_fence(version, latest))
            except StaleEpochError as error:
                if self._clock.monotonic() > deadline:
                    raise NotReplicatedError(
                        "the cluster map changes too often for this node to act as primary, or the node was "
                        "suspended; nothing was changed; try again shortly"
                    ) from error
                await self._mesh.wait_for_newer_map(error.version - 1, _MAP_WAIT)

    async def hand_over(self, bucket: str, key: str, version: int, to: Node) -> None:
        """Hands a name over to node `to`, its primary under map `version`: fences off writes of this node
        under earlier maps, then sends `to` what this node has of the name. Raises StaleMapError if `to` uses
        a newer map; NotReplicatedError."""
        await self._store.raise_fence(version)
        newest, tombstone = self._store.newest_version(bucket, key), self._store.tombstone_stamp(bucket, key)
        removals = self._unsettled_removals(bucket, key)
        if tombstone:
            removals.append(VersionGone(bucket, key, "", tombstone))
        try:
            if newest is not None:
                await self.replicator.send_change(to, self.replicator.confirmation_of(bucket, key, newest))
            for start in range(0, len(removals), _CONCURRENCY):
                some = removals[start : start + _CONCURRENCY]
                await asyncio.gather(*[self.replicator.send_change(to, gone) for gone in some])
        except (PeerUnreachableError, PeerRefusedError, BodyFramingError) as error:
            raise NotReplicatedError(
                f"node {to.node_id} does not accept the handover of a name: {error}"
            ) from error

    async def run_to_completion(self, awaitable: Awaitable[_T]) -> _T:
        """Runs something to completion even if the caller is cancelled."""
        task = asyncio.ensure_future(awaitable)
        self._running.add(task)
        task.add_done_callback(self._forget_task)
        return await asyncio.shield(task)

    def _forget_task(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller gets it, unless it is gone

    async def replicate_change(self, change: Change, bucket: str, key: str) -> int:
        """Replicates a change of this node; returns the newest stamp that the others know of the name."""
        return await self.replicator.replicate(
            bucket, key, lambda node: self.replicator.send_change(node, change)
        )

    def other_replicas(self, bucket: str, key: str) -> list[Node]:
        """Returns the other nodes that must have a name in the current map, if this node is its primary."""
        route = self._mesh.route_for(bucket, key)
        if route.primary is None or route.primary.node_id != self._mesh.node_id:
            return []
        return [node for node in route.write_set if node.node_id != self._mesh.node_id]

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        if not self._mesh.single_node:
            await self.run_to_completion(self._wait_replicated(bucket, key, record))

    async def _wait_replicated(self, bucket: str, key: str, record: Record | None) -> None:
        await self.ensure_lease_valid(bucket, key)
        if record is not None and record.version:  # newer versions do not replace it
            await self.replicate_change(self.replicator.confirmation_of(bucket, key, record), bucket, key)
        await self.confirm_newest(bucket, key)

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
                await self.run_to_completion(self._run_checked(bucket, key, act, context))

    async def _check_now(self, bucket: str, key: str, conditions: Conditions, context: WriteContext) -> None:
        try:
            await self._store.check_conditions(bucket, key, conditions, context=context)
        except (ConditionFailedError, ConditionMissingError) as error:
            if context.is_past_deadline(self._clock.stamp()):
                raise StaleEpochError(context.epoch) from error
            raise

    async def confirm_newest(self, bucket: str, key: str) -> None:
        """Replicates the state by which a request was rejected: it must not be lost after the client was
        answered."""
        newest = self._store.newest_version(bucket, key)
        if newest is not None:
            await self.replicate_change(self.replicator.confirmation_of(bucket, key, newest), bucket, key)
        else:
            await self._replicate_tombstone(bucket, key, "")
        removals = self._unsettled_removals(bucket, key)
        for start in range(0, len(removals), _CONCURRENCY):
            some = removals[start : start + _CONCURRENCY]
            await asyncio.gather(*[self.replicate_change(gone, bucket, key) for gone in some])

    def _unsettled_removals(self, bucket: str, key: str) -> list[VersionGone]:
        """Returns recent removals of versions, which some nodes may not have yet."""
        after = self._clock.stamp() - _UNSETTLED_NS
        return [VersionGone(bucket, key, *gone) for gone in self._store.removals_since(bucket, key, after)]

    async def _replicate_tombstone(self, bucket: str, key: str, version: str) -> None:
        """Replicates the tombstone of a deletion that found nothing: it may belong to an earlier,
        unacknowledged deletion."""
        tombstone = self._store.tombstone_stamp(bucket, key, version)
        if tombstone:
            await self.replicate_change(VersionGone(bucket, key, version, tombstone), bucket, key)

    async def _run_checked(self, bucket: str, key: str, act: WriteAction[_T], context: WriteContext) -> _T:
        """Runs `act` as primary; if a condition did not hold, replicates what it was checked against
        first."""
        try:
            return await self.run_as_primary(bucket, key, act, context)
        except (ConditionFailedError, ConditionMissingError):
            await self.confirm_newest(bucket, key)
            raise

    # objects ----------------------------------------------------------------------------------------------

    def writer(self, bucket: str, key: str, *, size: int | None) -> ObjectWriter:
        return ReplicatedWriter(self, self._store.writer(bucket, key, size=size), bucket, key, size)

    async def replicate_and_restamp(
        self, bucket: str, key: str, record: Record, had: Iterable[str] = (), newest: int = 0
    ) -> Record:
        """Replicates a version committed here to the nodes that lack it; returns the final record, which may
        have a newer stamp."""
        newest = await self.replicate_version(bucket, key, record, had, newest)
        return await restamp_if_behind(self, bucket, key, record, newest)

    async def replicate_version(
        self, bucket: str, key: str, record: Record, had: Iterable[str] = (), newest: int = 0
    ) -> int:
        """Replicates a version of this node to the nodes that lack it; returns the newest stamp that they
        know of the name."""
        replicator = self.replicator
        return await replicator.replicate(
            bucket, key, lambda node: replicator.send_version(node, bucket, key, record), had, newest
        )

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
        removed = await self._run_checked(bucket, key, act, context)
        version = "" if version == NULL else version
        if removed.marker is not None:
            newest = await self.replicate_change(
                Marked(bucket, key, without_local_fields(removed.marker)), bucket, key
            )
            marker = await restamp_if_behind(self, bucket, key, removed.marker, newest)
            return Removed(removed.record, marker)
        await self._confirm_next(bucket, key)
        if removed.record is not None:
            gone = VersionGone(bucket, key, removed.record.version, removed.stamp)
            await restamp_removal(self, gone, await self.replicate_change(gone, bucket, key))
        else:
            await self._replicate_tombstone(bucket, key, version)
        return removed

    async def _confirm_next(self, bucket: str, key: str) -> None:
        """Replicates the version that became the newest through a removal before the removal itself. It may
        be unacknowledged, and replicas that knew only the removal would serve an even older version."""
        newest = self._store.newest_version(bucket, key)
        if newest is not None and self._clock.stamp() - newest.stamp < _UNSETTLED_NS:
            await self.replicate_change(self.replicator.confirmation_of(bucket, key, newest), bucket, key)

    def knows_stamp(self, bucket: str, key: str, stamp: int) -> bool:
        """Returns True if this node has a version or a deletion of the null version at or above this
        stamp."""
        newest = self._store.newest_version(bucket, key)
        return (newest is not None and newest.stamp >= stamp) or self._store.tombstone_stamp(
            bucket, key
        ) >= stamp

    async def delete_many(
        self,
        bucket: str,
        keys: Iterable[str],
        *,
        versioning: Versioning = "",
        context: WriteContext = INTERNAL_WRITE,
    ) -> Mapping[str, Removed]:
        unique, removed = tuple(dict.fromkeys(keys)), dict[str, Removed]()
        for start in range(0, len(unique), _CONCURRENCY):
            some = unique[start : start + _CONCURRENCY]
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
        record = await self.run_as_primary(bucket, key, act, context)
        await self.replicate_change(Amended(bucket, key, without_local_fields(record)), bucket, key)
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
        return await self.run_to_completion(
            self.forwarder.run_on_primary(bucket, key, here, forward, context)
        )

    async def _link_on_primary(
        self, name: tuple[str, str], source: Record, written: WriteSpec, context: WriteContext, node: Node
    ) -> Record:
        """Sends a copy as data to the primary, with the parts in which the source was uploaded."""
        meta = msgspec.structs.replace(written.meta, parts=source.parts)
        written = msgspec.structs.replace(written, meta=meta)
        return await self.forwarder.forward_write(
            node, name, source.size, self.replicator.read_chunks(source), written, context
        )

    async def _link(self, bucket: str, key: str, act: WriteAction[Record], context: WriteContext) -> Record:
        record = await self._run_checked(bucket, key, act, context)
        return await self.replicate_and_restamp(bucket, key, record)

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
        upload = await self.run_as_primary(bucket, key, act, context)
        await self.replicate_change(UploadBegun(upload_without_local_fields(upload)), bucket, key)
        return upload

    def part_writer(self, upload: Upload, number: int, size: int | None) -> ObjectWriter:
        own = self._store.part_writer(upload, number, size)
        return ReplicatedWriter(self, own, upload.bucket, upload.key, size, (upload, number))

    def committed_part(self, upload: Upload, number: int, record: Record) -> PartOf | None:
        """Returns the part that a writer has committed; None if another has replaced it or the upload has
        ended."""
        part = next(iter(self._store.list_parts(upload, number - 1, 1).parts), None)
        if part is None or (part.number, part.stamp) != (number, record.stamp):
            return None
        return PartOf(upload_without_local_fields(upload), part)

    async def replicate_part(self, upload: Upload, number: int, had: Iterable[str] = ()) -> None:
        """Replicates the current part of this number, or the end of its upload, to every node except those in
        `had`. Raises NotReplicatedError."""
        replicator, bucket, key = self.replicator, upload.bucket, upload.key
        await replicator.replicate(bucket, key, lambda node: replicator.send_part(node, upload, number), had)
        if self._mesh.single_node or self._store.get_upload(bucket, key, upload.upload_id) is not None:
            return
        if not self._store.tombstone_stamp(bucket, key, upload.upload_id):
            raise NotReplicatedError(
                f"upload {upload.upload_id} is no longer on this node; its part {number} may or may not be "
                "stored; try again"
            )
        await self._replicate_upload_end(upload)

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
            record = await self._run_checked(bucket, key, act, context)
        except NoSuchUploadError:
            await self._replicate_upload_end(upload)
            raise
        chosen = tuple(CompletedPart(n, known[n].stamp, known[n].etag) for n in numbers if n in known)
        change = UploadCompleted(bucket, key, upload.upload_id, chosen, without_local_fields(record))
        return await restamp_if_behind(
            self, bucket, key, record, await self.replicate_change(change, bucket, key)
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
            stamp = await self.run_as_primary(
                bucket, key, lambda fenced: self._store.abort_upload(upload, context=fenced), context
            )
        except NoSuchUploadError:
            await self._replicate_upload_end(upload)
            raise
        await self.replicate_change(UploadEnded(bucket, key, upload.upload_id, stamp), bucket, key)
        return stamp

    async def _replicate_upload_end(self, upload: Upload) -> None:
        """Replicates the end of an upload again, because the request that ended it may not have been
        acknowledged. The object that it became is sent first: the end drops the parts."""
        bucket, key, upload_id = upload.bucket, upload.key, upload.upload_id
        tombstone = self._store.tombstone_stamp(bucket, key, upload_id)
        if not tombstone:
            return
        record, replicator = self._completed_version(bucket, key, tombstone), self.replicator
        if record is None:
            await self.confirm_newest(bucket, key)
        else:
            await replicator.replicate(
                bucket, key, lambda node: replicator.ensure_version(node, bucket, key, record)
            )
        await self.replicate_change(UploadEnded(bucket, key, upload_id, tombstone), bucket, key)

    def _completed_version(self, bucket: str, key: str, stamp: int) -> Record | None:
        """Returns the version that an upload became when it ended with this stamp, unless it was replaced."""
        for version in (version_id_of(stamp), NULL):
            found = self._store.get_version(bucket, key, version)
            if found is not None and found.stamp == stamp:
                return found
        return None


def replicated_store(store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> ObjectStore:
    """Returns the store for services to write to: the given store itself on a standalone node."""
    return store if mesh.standalone else ReplicatedStore(store, mesh, peers, clock)


if TYPE_CHECKING:

    def _is_a_store(replicated: ReplicatedStore) -> ObjectStore:
        return replicated  # a type check only
