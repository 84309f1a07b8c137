"""Multipart uploads of the replicated store: begun, completed and aborted at the primary, then replicated.

Law: the same as for objects. The end of an upload is replicated again before a request is told that it has
ended: the request that ended it may not have been acknowledged. A part that met the end of its upload is
acknowledged only if the node that committed the part has decided about that end, too.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from meshd.cluster.replication.forwarded_writes import (
    AbortUploadRequest,
    CompleteUploadRequest,
    CreateUploadRequest,
    StoreForwarder,
    WriteResult,
)
from meshd.cluster.replication.primary_writes import PrimaryWrites
from meshd.cluster.replication.unconfirmed_writes import completed_version
from meshd.store.errors import NoSuchUploadError, NotReplicatedError
from meshd.store.records import INTERNAL_WRITE, Upload
from meshd.store.replica.changes import (
    CompletedPart,
    PartOf,
    UploadBegun,
    UploadCompleted,
    UploadEnded,
    upload_without_local_fields,
    without_local_fields,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from meshd.cluster.cluster_view import ClusterView
    from meshd.cluster.replication.forwarded_writes import ForwardedRequest
    from meshd.cluster.replication.primary_writes import WriteAction
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import ObjectStore
    from meshd.store.records import Meta, Record, UploadedPart, WriteContext
    from meshd.store.replica.changes import Change, ReplicaAck
    from meshd.util.clock import Clock
    from meshwire.cluster import Node
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Versioning

_T = TypeVar("_T")
_REWRITES: Final = 3
_NOBODY: Final[Mapping[str, ReplicaAck]] = MappingProxyType({})


class ReplicatedUploads:
    """The uploads of a `ReplicatedStore`. `store`: this node's own."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock
        self.forwarder = StoreForwarder(mesh, peers, clock)
        self.primary = PrimaryWrites(store, mesh, peers, clock)

    async def _run_on_primary(
        self,
        request: ForwardedRequest,
        here: Callable[[], Awaitable[_T]],
        read: Callable[[WriteResult], _T],
        context: WriteContext,
    ) -> _T:
        """Returns the result of `here`, or what `read` finds in that of the node that is primary now."""

        async def decided() -> _T:
            return self.primary.acknowledge(await here(), context)

        async def there(node: Node) -> _T:
            return read(await self.forwarder.forward_request(node, request, context))

        return await self.primary.run_to_completion(
            self.forwarder.run_on_primary(request.bucket, request.key, decided, there, context)
        )

    async def create_upload(self, draft: Upload, *, context: WriteContext = INTERNAL_WRITE) -> Upload:
        def act(fenced: WriteContext) -> Awaitable[Upload]:
            return self._store.create_upload(draft, context=fenced)

        here = partial(self._begin, draft.bucket, draft.key, act, context)
        return await self._run_on_primary(
            CreateUploadRequest(draft), here, WriteResult.require_upload, context
        )

    async def _begin(self, bucket: str, key: str, act: WriteAction[Upload], context: WriteContext) -> Upload:
        upload = await self.primary.run_as_primary(bucket, key, act, context)
        await self.primary.replicator.replicate_change(
            UploadBegun(upload_without_local_fields(upload)), bucket, key
        )
        return upload

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
        bucket, key, replicator = upload.bucket, upload.key, self.primary.replicator
        parts: list[UploadedPart] = []

        async def commit(fenced: WriteContext) -> Record:
            parts[:] = self._all_parts(upload)
            return await act(fenced)

        try:
            record = await self.primary.run_checked(bucket, key, commit, context)
        except NoSuchUploadError:
            await self.replicate_upload_end(upload)
            raise
        chosen = _chosen_parts(numbers, parts, record)
        if chosen is None:
            newest = await replicator.replicate_version(bucket, key, record)
            change: Change = UploadEnded(bucket, key, upload.upload_id, record.stamp)
            await replicator.replicate_change(change, bucket, key)
        else:
            change = UploadCompleted(bucket, key, upload.upload_id, chosen, without_local_fields(record))
            newest = await replicator.replicate_change(change, bucket, key)
        return await self.primary.unconfirmed.restamp_if_behind(bucket, key, record, newest)

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
            await self.replicate_upload_end(upload)
            raise
        await self.primary.replicator.replicate_change(
            UploadEnded(bucket, key, upload.upload_id, stamp), bucket, key
        )
        return stamp

    # parts ------------------------------------------------------------------------------------------------

    def committed_part(self, upload: Upload, number: int, record: Record) -> PartOf | None:
        """Returns the part that a writer has committed; None if another has replaced it or the upload has
        ended."""
        part = next(iter(self._store.list_parts(upload, number - 1, 1).parts), None)
        if part is None or (part.number, part.stamp) != (number, record.stamp):
            return None
        return PartOf(upload_without_local_fields(upload), part)

    async def replicate_part(
        self,
        upload: Upload,
        number: int,
        epoch: int,
        had: Mapping[str, ReplicaAck] = _NOBODY,
        size: int | None = None,
    ) -> None:
        """Replicates the current part of this number, or the end of its upload, to every node except those
        that have replied. `epoch`: the map version under which a part was committed here. Raises
        NotReplicatedError, NodeFullError."""
        replicator, bucket, key = self.primary.replicator, upload.bucket, upload.key
        acks = list(had.values())

        async def send(node: Node) -> ReplicaAck:
            ack = await replicator.send_part(node, upload, number)
            acks.append(ack)
            return ack

        await replicator.replicate(bucket, key, send, had, size=size)
        for _ in range(_REWRITES):
            newest = max((ack.newest for ack in acks), default=0)
            if not await self.primary.unconfirmed.rewrite_part(upload, number, newest):
                break
            await replicator.replicate(bucket, key, send, size=size)
        else:
            raise NotReplicatedError("other nodes write to this part at the same time; try again shortly")
        ended = any(ack.trouble == "ended" for ack in acks)
        if self._mesh.single_node:
            return
        gone = self._store.get_upload(bucket, key, upload.upload_id) is None
        if (gone or ended) and self._mesh.current_map().version != epoch:
            raise NotReplicatedError(
                f"upload {upload.upload_id} has ended, perhaps at another node that did not have its part "
                f"{number}; the part may or may not have been stored; try again"
            )
        if not gone:
            return
        if not self._store.tombstone_stamp(bucket, key, upload.upload_id):
            raise NotReplicatedError(
                f"upload {upload.upload_id} is no longer on this node; its part {number} may or may not be "
                "stored; try again"
            )
        await self.replicate_upload_end(upload)

    async def wait_upload_end_replicated(self, bucket: str, key: str, upload_id: str) -> None:
        if not self._mesh.single_node and self._store.tombstone_stamp(bucket, key, upload_id):
            await self.primary.run_to_completion(self._wait_ended(Upload(upload_id, bucket, key)))

    async def _wait_ended(self, upload: Upload) -> None:
        await self.primary.ensure_lease_valid(upload.bucket, upload.key)
        await self.replicate_upload_end(upload)

    async def replicate_upload_end(self, upload: Upload) -> None:
        """Replicates the end of an upload again, because the request that ended it may not have been
        acknowledged. The object that it became is sent first: the end drops the parts."""
        bucket, key, upload_id = upload.bucket, upload.key, upload.upload_id
        tombstone = self._store.tombstone_stamp(bucket, key, upload_id)
        if not tombstone:
            return
        record, replicator = completed_version(self._store, bucket, key, tombstone), self.primary.replicator
        if record is None:
            await self.primary.unconfirmed.confirm_newest(bucket, key)
        else:
            await replicator.replicate(
                bucket, key, lambda node: replicator.ensure_version(node, bucket, key, record)
            )
        await self.primary.replicator.replicate_change(
            UploadEnded(bucket, key, upload_id, tombstone), bucket, key
        )


def _chosen_parts(
    numbers: Sequence[int], parts: Sequence[UploadedPart], record: Record
) -> tuple[CompletedPart, ...] | None:
    """Returns the parts of which a completed object was made; None if one of them was replaced between the
    look-up of `parts` and the commit: then they identify other bytes to a replica."""
    found = {part.number: part for part in parts}
    made = [found.get(number) for number in numbers]
    if [part and part.etag for part in made] != [part.etag for part in record.parts]:
        return None
    return tuple(CompletedPart(part.number, part.stamp, part.etag) for part in made if part is not None)
