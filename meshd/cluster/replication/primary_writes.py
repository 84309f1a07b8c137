"""Writes as primary: the right to commit a write, its replication, and the restamping of conflicting writes.

Law: this node acts as primary only under a map that is known to be current, after former primaries have
handed the name over, and under the fence of that map version. What it committed, and the state by which
it rejected a request, is on every node of the write set before the client is answered.
A replica may hold an unacknowledged write of an earlier primary with a higher stamp. The current primary
then writes the null version again above that stamp; other versions coexist and need no restamping.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from meshd.cluster.read_barrier import ANSWER_VALID_SECONDS, ReadBarrier
from meshd.cluster.replication.primary_handover import PrimaryHandover
from meshd.cluster.replication.replicator import WRITE_TIMEOUT, Replicator
from meshd.cluster.replication.write_forwarding import StoreForwarder
from meshd.rpc.peer_client import PeerRefusedError, PeerUnreachableError
from meshd.rpc.peer_rpc import BodyFramingError
from meshd.store.engine.member_header import version_id_of
from meshd.store.errors import (
    ConditionFailedError,
    ConditionMissingError,
    NotPrimaryError,
    NotReplicatedError,
    StaleEpochError,
)
from meshd.store.records import NULL
from meshd.store.replica.changes import (
    Marked,
    PartOf,
    UploadEnded,
    VersionGone,
    upload_without_local_fields,
    without_local_fields,
)
from meshd.store.write_context import NO_DEADLINE, WriteContext

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from meshd.cluster.cluster_view import ClusterView
    from meshd.rpc.peer_client import PeerClient
    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, Upload
    from meshd.store.replica.changes import Change
    from meshd.util.clock import Clock
    from meshwire.cluster import Node

_T = TypeVar("_T")
WriteAction = Callable[[WriteContext], Awaitable[_T]]
"""A write to the local store, under the fence of the context that it is called with."""
PARALLEL_CHANGES: Final = 64
"""Changes that are sent at the same time."""
_UNSETTLED_NS: Final = int(2e9 * WRITE_TIMEOUT)
"""Nanoseconds after which a write is either acknowledged or given up."""
_MAP_WAIT: Final = 2.0  # seconds to wait for a map that another process of this node already has
_RESTAMP_ATTEMPTS: Final = 3
_log = logging.getLogger(__name__)


class PrimaryWrites:
    """Commits writes of names that this node is the primary of, and replicates them. One per process.
    `store`: this node's own."""

    def __init__(self, store: ObjectStore, mesh: ClusterView, peers: PeerClient, clock: Clock) -> None:
        self._store, self._mesh, self._clock = store, mesh, clock
        self.replicator = Replicator(mesh, peers, store, clock)
        self.forwarder = StoreForwarder(mesh, peers, clock)
        self.handover = PrimaryHandover(mesh, peers, clock)
        self._read_barrier = ReadBarrier(mesh, clock)
        self._running: set[asyncio.Future[Any]] = set()

    def __repr__(self) -> str:
        return f"<PrimaryWrites of {self._mesh.node_id} to {self._store!r}>"

    # before the commit ------------------------------------------------------------------------------------

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

    async def run_checked(self, bucket: str, key: str, act: WriteAction[_T], context: WriteContext) -> _T:
        """Runs `act` as primary; if a condition did not hold, replicates what it was checked against
        first."""
        try:
            return await self.run_as_primary(bucket, key, act, context)
        except (ConditionFailedError, ConditionMissingError):
            await self.confirm_newest(bucket, key)
            raise

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
            for start in range(0, len(removals), PARALLEL_CHANGES):
                some = removals[start : start + PARALLEL_CHANGES]
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

    # after the commit -------------------------------------------------------------------------------------

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

    async def replicate_and_restamp(
        self, bucket: str, key: str, record: Record, had: Iterable[str] = (), newest: int = 0
    ) -> Record:
        """Replicates a version committed here to the nodes that lack it; returns the final record, which may
        have a newer stamp."""
        newest = await self.replicate_version(bucket, key, record, had, newest)
        return await self.restamp_if_behind(bucket, key, record, newest)

    async def replicate_version(
        self, bucket: str, key: str, record: Record, had: Iterable[str] = (), newest: int = 0
    ) -> int:
        """Replicates a version of this node to the nodes that lack it; returns the newest stamp that they
        know of the name."""
        replicator = self.replicator
        return await replicator.replicate(
            bucket, key, lambda node: replicator.send_version(node, bucket, key, record), had, newest
        )

    async def confirm_newest(self, bucket: str, key: str) -> None:
        """Replicates the state by which a request was rejected: it must not be lost after the client was
        answered."""
        newest = self._store.newest_version(bucket, key)
        if newest is not None:
            await self.replicate_change(self.replicator.confirmation_of(bucket, key, newest), bucket, key)
        else:
            await self.replicate_tombstone(bucket, key, "")
        removals = self._unsettled_removals(bucket, key)
        for start in range(0, len(removals), PARALLEL_CHANGES):
            some = removals[start : start + PARALLEL_CHANGES]
            await asyncio.gather(*[self.replicate_change(gone, bucket, key) for gone in some])

    def _unsettled_removals(self, bucket: str, key: str) -> list[VersionGone]:
        """Returns recent removals of versions, which some nodes may not have yet."""
        after = self._clock.stamp() - _UNSETTLED_NS
        return [VersionGone(bucket, key, *gone) for gone in self._store.removals_since(bucket, key, after)]

    async def replicate_tombstone(self, bucket: str, key: str, version: str) -> None:
        """Replicates the tombstone of a deletion that found nothing: it may belong to an earlier,
        unacknowledged deletion."""
        tombstone = self._store.tombstone_stamp(bucket, key, version)
        if tombstone:
            await self.replicate_change(VersionGone(bucket, key, version, tombstone), bucket, key)

    async def confirm_next(self, bucket: str, key: str) -> None:
        """Replicates the version that became the newest through a removal before the removal itself. It may
        be unacknowledged, and replicas that knew only the removal would serve an even older version."""
        newest = self._store.newest_version(bucket, key)
        if newest is not None and self._clock.stamp() - newest.stamp < _UNSETTLED_NS:
            await self.replicate_change(self.replicator.confirmation_of(bucket, key, newest), bucket, key)

    # restamping -------------------------------------------------------------------------------------------

    async def restamp_if_behind(self, bucket: str, key: str, record: Record, newest: int) -> Record:
        """Returns `record`, which every node of the write set has, or the same version rewritten above
        `newest`, the highest stamp that any of them knows of its name.

        If the version was replaced here meanwhile, that write takes care of it: rewriting would undo it.
        Raises NotReplicatedError.
        """
        for _ in range(_RESTAMP_ATTEMPTS):
            if newest <= record.stamp or record.version or self.knows_stamp(bucket, key, newest):
                return record
            found = self._store.get_version(bucket, key, NULL)
            if found is None or found.stamp != record.stamp:
                return record
            epoch = self.require_still_primary(bucket, key)
            _log.warning("a replica has a newer version of a name than its primary: rewriting it above")
            again = msgspec.structs.replace(without_local_fields(record), stamp=newest + 1)
            if record.marker:
                with _under_fence(epoch) as fenced:
                    await self._store.apply_change(Marked(bucket, key, again), context=fenced)
                newest = await self.replicate_change(Marked(bucket, key, again), bucket, key)
            else:
                with _under_fence(epoch) as fenced:
                    await self._rewrite_data(bucket, key, record, again, fenced)
                newest = await self.replicate_version(bucket, key, again)
            record = self._store.newest_version(bucket, key) or again
            if record.stamp != again.stamp:
                return again  # overwritten meanwhile
        raise NotReplicatedError("other nodes write to this name at the same time; try again shortly")

    async def restamp_removal(self, gone: VersionGone, newest: int) -> None:
        """Rewrites a deletion of the null version above `newest`, as `restamp_if_behind` does with a version,
        unless a newer version was put since. Raises NotReplicatedError."""
        bucket, key = gone.bucket, gone.key
        found = self._store.get_version(bucket, key, NULL)
        if gone.version or newest <= gone.stamp or (found is not None and found.stamp > gone.stamp):
            return
        if not self.knows_stamp(bucket, key, newest):
            again = VersionGone(bucket, key, "", newest + 1)
            with _under_fence(self.require_still_primary(bucket, key)) as fenced:
                await self._store.apply_change(again, context=fenced)
            await self.replicate_change(again, bucket, key)

    async def _rewrite_data(
        self, bucket: str, key: str, record: Record, again: Record, fenced: WriteContext
    ) -> None:
        writer = self._store.replica_writer(bucket, key, size=record.size)
        try:
            async for piece in self.replicator.read_chunks(record):
                await writer.write(piece)
            await writer.commit_at_stamp(again, context=fenced)
        finally:
            await writer.abort()

    def knows_stamp(self, bucket: str, key: str, stamp: int) -> bool:
        """Returns True if this node has a version or a deletion of the null version at or above this
        stamp."""
        newest = self._store.newest_version(bucket, key)
        return (newest is not None and newest.stamp >= stamp) or self._store.tombstone_stamp(
            bucket, key
        ) >= stamp

    # parts and uploads ------------------------------------------------------------------------------------

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
        await self.replicate_upload_end(upload)

    async def replicate_upload_end(self, upload: Upload) -> None:
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


@contextmanager
def _under_fence(epoch: int) -> Iterator[WriteContext]:
    """Yields the context that binds a rewrite to this map version. Raises NotReplicatedError instead of
    StaleEpochError."""
    try:
        yield WriteContext(epoch=epoch)
    except StaleEpochError as error:
        raise NotReplicatedError(f"{error}; the write may or may not have taken effect; try again") from error
