"""Replicated store: the ObjectStore to which the services of a cluster node write.

Law: reads are local. The primary checks and commits a write locally, under the fence of the map version
by which it is primary, then replicates it with the same stamp. The caller gets its answer when every
node of the write set has the write durably. This also holds on a node that is alone in its cluster:
another node may join before a write in progress commits. Seam: an ObjectStore.
"""

from __future__ import annotations

import asyncio
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
    WriteForwarder,
    WriteResult,
    WriteSpec,
    reject_if_abandoned,
)
from meshd.rpc.checksummed_framing import BodyFramingError
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError
from meshd.store.engine.member_header import version_id_of
from meshd.store.engine.write_fence import NO_DEADLINE, current_epoch, epoch_scope, is_past_deadline
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

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.write_forwarding import ForwardedRequest
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import ObjectStore, ObjectWriter
    from meshd.store.records import Meta, Record, UploadedPart
    from meshd.store.replica.changes import Change
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Acl, Versioning

_T = TypeVar("_T")
_CONCURRENCY: Final = 64
_UNSETTLED_NS: Final = int(2e9 * WRITE_TIMEOUT)
"""Nanoseconds after which a write is acknowledged, or given up."""
_MAP_WAIT: Final = 2.0  # seconds to wait for a map that another process of this node has already


class ReplicatedStore:
    """See ObjectStore. One a process."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock
        self.replicator = Replicator(mesh, peers, store, clock)
        self.forwarder = WriteForwarder(mesh, peers, clock)
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

    # deciding ---------------------------------------------------------------------------------------------

    def primary_epoch(self, bucket: str, key: str) -> int:
        """The version of the map by which this node decides about a name. Raises NotDeciderError,
        NotReplicatedError."""
        version = self._mesh.current_map().version
        if self._mesh.single_node:
            return version  # whatever the map says of its state
        decider = self._mesh.route_for(bucket, key).primary
        if decider is None:
            raise NotReplicatedError(
                "every node that has this name's data is away: nobody may decide about it until the one that "
                "went last is back; try again in a moment"
            )
        if decider.node_id != self._mesh.node_id:
            raise NotPrimaryError(
                f"node {decider.node_id} decides about this name now; nothing was changed; try again"
            )
        return version

    def require_still_primary(self, bucket: str, key: str) -> int:
        """As `epoch`, of what was committed here before: another node may have decided since. Raises
        NotReplicatedError."""
        try:
            return self.primary_epoch(bucket, key)
        except NotPrimaryError as error:
            raise NotReplicatedError(
                "another node decides about this name since; it may or may not have taken place; try again"
            ) from error

    async def _run_on_primary(
        self, asked: ForwardedRequest, here: Callable[[], Awaitable[_T]], read: Callable[[WriteResult], _T]
    ) -> _T:
        """What `here` gives, or the node that decides by now."""
        return await self.run_to_completion(
            self.forwarder.run_on_primary(
                asked.bucket, asked.key, here, lambda node: self.forwarder.forward_request(node, asked), read
            )
        )

    async def ensure_lease_valid(self, bucket: str, key: str) -> int:
        """Returns when this node is sure that it may decide by its map: the stamp up to which it is. What it
        decided otherwise nobody would take, and it would lie here when the node is back, above what others
        acknowledged meanwhile. Raises NotReplicatedError: nothing was changed."""
        now, left = (
            self._clock.stamp(),
            self._mesh.lease_remaining,
        )  # in this order: it may stand still in between
        if left == inf:
            return NO_DEADLINE
        if left <= 0:
            now, left = await self._confirm_with_owners(bucket, key), ANSWER_VALID_SECONDS
        return now + int(left * 1e9)

    async def _confirm_with_owners(self, bucket: str, key: str) -> int:
        """The stamp at which the last of the other owners was asked, of whom none goes by a newer map."""
        now = self._clock.stamp()
        why = await self._read_barrier.wait_until_current(bucket, key)
        if why:
            raise NotReplicatedError(
                f"this node {why}, and may decide about nothing until it is sure of its own; nothing was "
                "changed; ask another node, or try again"
            )
        return now

    async def run_as_primary(self, bucket: str, key: str, act: Callable[[], Awaitable[_T]]) -> _T:
        """What `act` gives, committed here under a map by which this node decides, of a name that former
        deciders have handed over. `act` may be called again when nothing happened."""
        deadline = self._clock.monotonic() + self.replicator.timeout
        while True:
            latest = await self.ensure_lease_valid(bucket, key)
            version = self.primary_epoch(bucket, key)
            reject_if_abandoned(self._mesh)
            if not self._mesh.single_node and not self.handover.is_complete(bucket, key, version):
                await self.run_to_completion(
                    self.handover.wait_until_received(bucket, key, deadline - self._clock.monotonic())
                )
                continue  # that may have taken a while
            try:
                with epoch_scope(version, latest):
                    return await act()
            except StaleEpochError as error:
                if self._clock.monotonic() > deadline:
                    raise NotReplicatedError(
                        "the cluster map changes too often to decide, or this node stands still; nothing was "
                        "changed; try again in a moment"
                    ) from error
                await self._mesh.wait_for_newer_map(error.version - 1, _MAP_WAIT)

    async def hand_over(self, bucket: str, key: str, version: int, to: Node) -> None:
        """Node `to` decides about a name by version `version` of the map: from now on no process of this node
        decides by an earlier one, and `to` gets what is here of the name. Raises StaleMapError when `to` goes
        by a newer map; NotReplicatedError."""
        await self._store.raise_fence(version)
        newest, grave = self._store.newest_version(bucket, key), self._store.tombstone_stamp(bucket, key)
        removals = self._unsettled_removals(bucket, key)
        if grave:
            removals.append(VersionGone(bucket, key, "", grave))
        try:
            if newest is not None:
                await self.replicator.send_change(to, self.replicator.confirmation_of(bucket, key, newest))
            for start in range(0, len(removals), _CONCURRENCY):
                some = removals[start : start + _CONCURRENCY]
                await asyncio.gather(*[self.replicator.send_change(to, gone) for gone in some])
        except (PeerUnreachableError, PeerRefusedError, BodyFramingError) as error:
            raise NotReplicatedError(
                f"node {to.node_id} does not take what is to be its own: {error}"
            ) from error

    async def run_to_completion(self, doing: Awaitable[_T]) -> _T:
        """Waits for what must come to its end though the caller goes away."""
        task = asyncio.ensure_future(doing)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has it, unless it went away

    async def replicate_change(self, change: Change, bucket: str, key: str) -> int:
        """A change of this node goes to the others."""
        return await self.replicator.replicate(
            bucket, key, lambda node: self.replicator.send_change(node, change)
        )

    def other_replicas(self, bucket: str, key: str) -> list[Node]:
        """The other nodes that must have a name by the present map, where this one decides about it."""
        route = self._mesh.route_for(bucket, key)
        if route.primary is None or route.primary.node_id != self._mesh.node_id:
            return []
        return [node for node in route.write_set if node.node_id != self._mesh.node_id]

    async def wait_replicated(self, bucket: str, key: str, record: Record | None = None) -> None:
        if not self._mesh.single_node:
            await self.run_to_completion(self._settled(bucket, key, record))

    async def _settled(self, bucket: str, key: str, record: Record | None) -> None:
        await self.ensure_lease_valid(bucket, key)
        if record is not None and record.version:  # newer versions do not take its place
            await self.replicate_change(self.replicator.confirmation_of(bucket, key, record), bucket, key)
        await self.confirm_newest(bucket, key)

    async def check_conditions(self, bucket: str, key: str, conditions: Conditions) -> None:
        act = partial(self._check_now, bucket, key, conditions)
        try:
            await act()
        except (ConditionFailedError, ConditionMissingError):
            if self._mesh.single_node:
                raise
            with suppress(NotPrimaryError):  # the primary checks them when it commits
                await self.run_to_completion(self._checked(bucket, key, act))

    async def _check_now(self, bucket: str, key: str, conditions: Conditions) -> None:
        try:
            await self._store.check_conditions(bucket, key, conditions)
        except (ConditionFailedError, ConditionMissingError) as error:
            if is_past_deadline(self._clock.stamp()):
                raise StaleEpochError(current_epoch()) from error
            raise

    async def confirm_newest(self, bucket: str, key: str) -> None:
        """What a refusal was judged by is true everywhere: nobody may lose it after a client was told."""
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
        """Of versions, a moment ago: not everybody may know."""
        after = self._clock.stamp() - _UNSETTLED_NS
        return [VersionGone(bucket, key, *gone) for gone in self._store.removals_since(bucket, key, after)]

    async def _replicate_tombstone(self, bucket: str, key: str, version: str) -> None:
        """A deletion that found nothing may follow one that was not acknowledged."""
        grave = self._store.tombstone_stamp(bucket, key, version)
        if grave:
            await self.replicate_change(VersionGone(bucket, key, version, grave), bucket, key)

    async def _checked(self, bucket: str, key: str, act: Callable[[], Awaitable[_T]]) -> _T:
        """As `decide`; a condition that did not hold is confirmed first."""
        try:
            return await self.run_as_primary(bucket, key, act)
        except (ConditionFailedError, ConditionMissingError):
            await self.confirm_newest(bucket, key)
            raise

    # objects ----------------------------------------------------------------------------------------------

    def writer(self, bucket: str, key: str, *, size: int | None) -> ObjectWriter:
        return ReplicatedWriter(self, self._store.writer(bucket, key, size=size), bucket, key, size)

    async def replicate_and_restamp(
        self, bucket: str, key: str, record: Record, had: Iterable[str] = (), newest: int = 0
    ) -> Record:
        """A version that was committed here goes to all who have not had it yet; the record in the end."""
        newest = await self.replicate_version(bucket, key, record, had, newest)
        return await restamp_if_behind(self, bucket, key, record, newest)

    async def replicate_version(
        self, bucket: str, key: str, record: Record, had: Iterable[str] = (), newest: int = 0
    ) -> int:
        """A version of this node goes to all who have not had it; the newest stamp they know of the name."""
        delivery = self.replicator
        return await delivery.replicate(
            bucket, key, lambda node: delivery.send_version(node, bucket, key, record), had, newest
        )

    async def delete(
        self,
        bucket: str,
        key: str,
        *,
        conditions: Conditions | None = None,
        versioning: Versioning = "",
    ) -> Removed:
        act = partial(self._store.delete, bucket, key, conditions=conditions, versioning=versioning)
        asked = DeleteRequest(bucket, key, None, conditions, versioning)
        return await self._run_on_primary(
            asked, partial(self._delete, bucket, key, act), WriteResult.as_removed
        )

    async def _delete(
        self, bucket: str, key: str, act: Callable[[], Awaitable[Removed]], version: str = NULL
    ) -> Removed:
        removed = await self._checked(bucket, key, act)
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
        """What is the newest once a version was removed may not be acknowledged yet: nobody gets to know of
        the removal before that one. Reads there would give what is older than both."""
        newest = self._store.newest_version(bucket, key)
        if newest is not None and self._clock.stamp() - newest.stamp < _UNSETTLED_NS:
            await self.replicate_change(self.replicator.confirmation_of(bucket, key, newest), bucket, key)

    def knows_stamp(self, bucket: str, key: str, stamp: int) -> bool:
        """Whether this node has a version or the null version's deletion at or above this stamp."""
        newest = self._store.newest_version(bucket, key)
        return (newest is not None and newest.stamp >= stamp) or self._store.tombstone_stamp(
            bucket, key
        ) >= stamp

    async def delete_many(
        self, bucket: str, keys: Iterable[str], *, versioning: Versioning = ""
    ) -> Mapping[str, Removed]:
        unique, removed = tuple(dict.fromkeys(keys)), dict[str, Removed]()
        for start in range(0, len(unique), _CONCURRENCY):
            some = unique[start : start + _CONCURRENCY]
            done = await asyncio.gather(*[self.delete(bucket, key, versioning=versioning) for key in some])
            removed.update(zip(some, done, strict=True))
        return removed

    async def delete_version(
        self, bucket: str, key: str, version: str, *, conditions: Conditions | None = None
    ) -> Removed:
        act = partial(self._store.delete_version, bucket, key, version, conditions=conditions)
        asked = DeleteRequest(bucket, key, version, conditions)
        return await self._run_on_primary(
            asked, partial(self._delete, bucket, key, act, version), WriteResult.as_removed
        )

    async def amend(
        self,
        bucket: str,
        key: str,
        version: str | None,
        *,
        tags: dict[str, str] | None = None,
        acl: Acl | None = None,
    ) -> Record:
        act = partial(self._store.amend, bucket, key, version, tags=tags, acl=acl)
        asked = AmendRequest(bucket, key, version, tags, acl)
        return await self._run_on_primary(
            asked, partial(self._amend, bucket, key, act), WriteResult.require_record
        )

    async def _amend(self, bucket: str, key: str, act: Callable[[], Awaitable[Record]]) -> Record:
        record = await self.run_as_primary(bucket, key, act)
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
    ) -> Record:
        act = partial(self._store.link, bucket, key, source, meta, conditions, versioning=versioning)
        there = partial(self._link_on_primary, (bucket, key), source, WriteSpec(meta, conditions, versioning))
        here = partial(self._link, bucket, key, act)
        return await self.run_to_completion(
            self.forwarder.run_on_primary(bucket, key, here, there, WriteResult.require_record)
        )

    async def _link_on_primary(
        self, name: tuple[str, str], source: Record, written: WriteSpec, node: Node
    ) -> WriteResult | None:
        """The copy is made of the source's bytes, and is told what parts they were uploaded in."""
        meta = msgspec.structs.replace(written.meta, parts=source.parts)
        written = msgspec.structs.replace(written, meta=meta)
        return await self.forwarder.forward_write(
            node, name, source.size, self.replicator.read_chunks(source), written
        )

    async def _link(self, bucket: str, key: str, act: Callable[[], Awaitable[Record]]) -> Record:
        return await self.replicate_and_restamp(bucket, key, await self._checked(bucket, key, act))

    # uploads ----------------------------------------------------------------------------------------------

    async def create_upload(self, bucket: str, key: str, **about: Any) -> Upload:
        act = partial(self._store.create_upload, bucket, key, **about)
        said = {name: value for name, value in about.items() if value is not None}
        asked = CreateUploadRequest(Upload("", bucket, key, **said))
        return await self._run_on_primary(
            asked, partial(self._begin, bucket, key, act), WriteResult.require_upload
        )

    async def _begin(self, bucket: str, key: str, act: Callable[[], Awaitable[Upload]]) -> Upload:
        upload = await self.run_as_primary(bucket, key, act)
        await self.replicate_change(UploadBegun(upload_without_local_fields(upload)), bucket, key)
        return upload

    def part_writer(self, upload: Upload, number: int, size: int | None) -> ObjectWriter:
        own = self._store.part_writer(upload, number, size)
        return ReplicatedWriter(self, own, upload.bucket, upload.key, size, (upload, number))

    def committed_part(self, upload: Upload, number: int, record: Record) -> PartOf | None:
        """The part that a writer has committed; None when it is another's by now, or the upload is over."""
        part = next(iter(self._store.list_parts(upload, number - 1, 1).parts), None)
        if part is None or (part.number, part.stamp) != (number, record.stamp):
            return None
        return PartOf(upload_without_local_fields(upload), part)

    async def replicate_part(self, upload: Upload, number: int, had: Iterable[str] = ()) -> None:
        """Returns when every node but those in `had` has the present part of this number, or the end of its
        upload. Raises NotReplicatedError."""
        delivery, bucket, key = self.replicator, upload.bucket, upload.key
        await delivery.replicate(bucket, key, lambda node: delivery.send_part(node, upload, number), had)
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
    ) -> Record:
        store = self._store
        act = partial(
            store.complete_upload, upload, parts, meta, conditions, etags=etags, versioning=versioning
        )
        asked = CompleteUploadRequest(
            upload.bucket,
            upload.key,
            upload.upload_id,
            tuple(parts),
            meta,
            conditions,
            tuple(etags),
            versioning,
        )
        return await self._run_on_primary(
            asked, partial(self._complete, upload, parts, act), WriteResult.require_record
        )

    async def _complete(
        self, upload: Upload, numbers: Sequence[int], act: Callable[[], Awaitable[Record]]
    ) -> Record:
        bucket, key = upload.bucket, upload.key
        known = {part.number: part for part in self._all_parts(upload)}
        try:
            record = await self._checked(bucket, key, act)
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

    async def abort_upload(self, upload: Upload) -> int:
        asked = AbortUploadRequest(upload.bucket, upload.key, upload.upload_id)
        return await self._run_on_primary(asked, partial(self._abort, upload), WriteResult.end_stamp)

    async def _abort(self, upload: Upload) -> int:
        bucket, key = upload.bucket, upload.key
        try:
            stamp = await self.run_as_primary(bucket, key, partial(self._store.abort_upload, upload))
        except NoSuchUploadError:
            await self._replicate_upload_end(upload)
            raise
        await self.replicate_change(UploadEnded(bucket, key, upload.upload_id, stamp), bucket, key)
        return stamp

    async def _replicate_upload_end(self, upload: Upload) -> None:
        """It ended here, perhaps in a request that was not acknowledged: then not everybody may know. The
        object that it became goes first: the end takes the parts with it."""
        bucket, key, upload_id = upload.bucket, upload.key, upload.upload_id
        grave = self._store.tombstone_stamp(bucket, key, upload_id)
        if not grave:
            return
        record, delivery = self._completed(bucket, key, grave), self.replicator
        if record is None:
            await self.confirm_newest(bucket, key)
        else:
            await delivery.replicate(
                bucket, key, lambda node: delivery.ensure_version(node, bucket, key, record)
            )
        await self.replicate_change(UploadEnded(bucket, key, upload_id, grave), bucket, key)

    def _completed(self, bucket: str, key: str, stamp: int) -> Record | None:
        """The version that an upload became when it ended with this stamp, unless it was replaced."""
        for version in (version_id_of(stamp), NULL):
            found = self._store.get_version(bucket, key, version)
            if found is not None and found.stamp == stamp:
                return found
        return None


def replicated_store(store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> ObjectStore:
    """What services write to: the store itself on a node that is alone for ever."""
    return store if mesh.standalone else ReplicatedStore(store, mesh, peers, clock)


if TYPE_CHECKING:

    def _is_a_store(replicated: ReplicatedStore) -> ObjectStore:
        return replicated  # mypy says so when it drifts
