"""Unconfirmed writes: writes that some nodes have, but that were never acknowledged to a client.

A primary may find one when it deletes, checks conditions or commits: a write of an earlier primary, or of a
failed request. Law: before a response reveals a state to a client, every node of the write set has that
state. A replica may hold an unacknowledged write of an earlier primary with a higher stamp; the current
primary then writes the null version again with a stamp above it. Other versions coexist without restamping.
Tags and ACLs, and the parts of an upload, are written again in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.cluster.replication.replicator import WRITE_TIMEOUT
from meshd.store.engine.member_header import version_id_of
from meshd.store.errors import NoSuchUploadError, NotReplicatedError, StaleEpochError
from meshd.store.records import NULL, Record, WriteContext
from meshd.store.replica.changes import (
    Amended,
    Marked,
    PartOf,
    VersionGone,
    part_without_local_fields,
    upload_without_local_fields,
    without_local_fields,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshd.cluster.replication.replicator import Replicator
    from meshd.store.api import ObjectStore
    from meshd.store.records import Upload
    from meshd.store.replica.changes import ReplicaAck
    from meshd.util.clock import Clock
    from meshwire.cluster import Node

PARALLEL_CHANGES: Final = 64
"""Changes that are sent at the same time."""
_RESTAMP_ATTEMPTS: Final = 3
_UNSETTLED_NS: Final = int(2e9 * WRITE_TIMEOUT)
"""Nanoseconds after which a write is either acknowledged or given up."""
_LAST_ENDS: Final = 64
_log = logging.getLogger(__name__)


def unsettled_removals(store: ObjectStore, clock: Clock, bucket: str, key: str) -> list[VersionGone]:
    """Returns recent removals of versions, which some nodes may not have yet."""
    after = clock.stamp() - _UNSETTLED_NS
    return [VersionGone(bucket, key, *gone) for gone in store.removals_since(bucket, key, after)]


def unsettled_ends(store: ObjectStore, clock: Clock, bucket: str, key: str) -> list[tuple[str, int]]:
    """Returns (id, stamp) of ended uploads that some nodes may take for uploads in progress: the recent ends,
    and of the earlier ones the last, because an end that nobody was told of stays at its primary."""
    after = clock.stamp() - _UNSETTLED_NS
    ends = store.ended_uploads(bucket, key)
    return [end for number, end in enumerate(ends) if number < _LAST_ENDS or end[1] > after]


def completed_version(store: ObjectStore, bucket: str, key: str, stamp: int) -> Record | None:
    """Returns the version that an upload became when it ended with this stamp, unless it was replaced."""
    for version in (version_id_of(stamp), NULL):
        found = store.get_version(bucket, key, version)
        if found is not None and found.stamp == stamp:
            return found
    return None


class UnconfirmedWrites:
    """Confirms or replaces unconfirmed writes of names that this node is the primary of. One per process.
    `require_primary(bucket, key)` returns the map version under which it is, or raises NotReplicatedError."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        replicator: Replicator,
        require_primary: Callable[[str, str], int],
    ) -> None:
        self._store, self._clock = store, clock
        self._replicator, self._require_primary = replicator, require_primary

    def __repr__(self) -> str:
        return f"<UnconfirmedWrites of {self._store!r}>"

    # what a client is answered by ---------------------------------------------------------------------------

    async def confirm_newest(self, bucket: str, key: str) -> None:
        """Replicates the state by which a request was rejected: it must not be lost after the client was
        answered."""
        newest = self._store.newest_version(bucket, key)
        if newest is not None:
            await self.confirm_version(bucket, key, newest)
        else:
            await self.replicate_tombstone(bucket, key, "")
        removals = unsettled_removals(self._store, self._clock, bucket, key)
        for start in range(0, len(removals), PARALLEL_CHANGES):
            some = removals[start : start + PARALLEL_CHANGES]
            await asyncio.gather(*[self._replicator.replicate_change(gone, bucket, key) for gone in some])

    async def confirm_version(self, bucket: str, key: str, record: Record) -> None:
        """Makes sure that every node of the write set has a version."""
        await self._replicator.replicate_change(
            self._replicator.confirmation_of(bucket, key, record), bucket, key
        )

    async def replicate_tombstone(self, bucket: str, key: str, version: str) -> None:
        """Replicates the tombstone of a deletion that found nothing: it may belong to an earlier,
        unacknowledged deletion."""
        tombstone = self._store.tombstone_stamp(bucket, key, version)
        if tombstone:
            await self._replicator.replicate_change(VersionGone(bucket, key, version, tombstone), bucket, key)

    async def confirm_next(self, bucket: str, key: str) -> None:
        """Replicates the version that became the newest through a removal before the removal itself. It may
        be unacknowledged, and replicas that knew only the removal would serve an even older version."""
        newest = self._store.newest_version(bucket, key)
        if newest is not None and self._clock.stamp() - newest.stamp < _UNSETTLED_NS:
            await self.confirm_version(bucket, key, newest)

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
            epoch = self._require_primary(bucket, key)
            _log.warning("a replica has a newer version of a name than its primary: rewriting it above")
            again = msgspec.structs.replace(without_local_fields(record), stamp=newest + 1)
            if record.marker:
                with _under_fence(epoch) as fenced:
                    await self._store.apply_change(Marked(bucket, key, again), context=fenced)
                newest = await self._replicator.replicate_change(Marked(bucket, key, again), bucket, key)
            else:
                with _under_fence(epoch) as fenced:
                    await self._rewrite_data(bucket, key, record, again, fenced)
                newest = await self._replicator.replicate_version(bucket, key, again)
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
            with _under_fence(self._require_primary(bucket, key)) as fenced:
                await self._store.apply_change(again, context=fenced)
            await self._replicator.replicate_change(again, bucket, key)

    async def replicate_amendment(self, bucket: str, key: str, record: Record) -> Record:
        """Replicates tags and ACL of a version that were changed here, above all that any node has for it.
        Returns the final record. Raises NotReplicatedError."""
        for _ in range(_RESTAMP_ATTEMPTS):
            known = await self._send_amendment(bucket, key, record)
            found = self._store.get_version(bucket, key, record.version or NULL)
            if known <= record.amended or found is None:
                return record
            if (found.stamp, found.amended) != (record.stamp, record.amended):
                return record  # that change takes care of it
            record = msgspec.structs.replace(record, amended=known + 1)
            with _under_fence(self._require_primary(bucket, key)) as fenced:
                change = Amended(bucket, key, without_local_fields(record))
                await self._store.apply_change(change, context=fenced)
        raise NotReplicatedError("other nodes change this version at the same time; try again shortly")

    async def _send_amendment(self, bucket: str, key: str, record: Record) -> int:
        """Returns the highest stamp that another node has for the tags and ACL of the version."""
        change, known = Amended(bucket, key, without_local_fields(record)), 0

        async def send(node: Node) -> ReplicaAck:
            nonlocal known
            ack = await self._replicator.send_change(node, change)
            known = max(known, ack.amended)
            return ack

        await self._replicator.replicate(bucket, key, send)
        return known

    async def rewrite_part(self, upload: Upload, number: int, newest: int) -> bool:
        """Writes the current part of this number again above stamp `newest`, which another node has for it.
        Returns False if there is no need, or no such part any more. Raises NotReplicatedError."""
        bucket, key = upload.bucket, upload.key
        part = next(iter(self._store.list_parts(upload, number - 1, 1).parts), None)
        if part is None or part.number != number or part.stamp >= newest:
            return False
        record = Record(part.size, part.etag, newest + 1, part.modified, part.extents)
        again = msgspec.structs.replace(part_without_local_fields(part), stamp=newest + 1)
        with _under_fence(self._require_primary(bucket, key)) as fenced, suppress(NoSuchUploadError):
            about = PartOf(upload_without_local_fields(upload), again)
            await self._rewrite_data(bucket, key, record, record, fenced, about)
        return True

    async def _rewrite_data(
        self,
        bucket: str,
        key: str,
        record: Record,
        again: Record,
        fenced: WriteContext,
        part: PartOf | None = None,
    ) -> None:
        writer = self._store.replica_writer(bucket, key, size=record.size)
        try:
            async for piece in self._replicator.read_chunks(record):
                await writer.write(piece)
            await writer.commit_at_stamp(again, part, context=fenced)
        finally:
            await writer.abort()

    def knows_stamp(self, bucket: str, key: str, stamp: int) -> bool:
        """Returns True if this node has a version or a deletion of the null version at or above this
        stamp."""
        newest = self._store.newest_version(bucket, key)
        return (newest is not None and newest.stamp >= stamp) or self._store.tombstone_stamp(
            bucket, key
        ) >= stamp


@contextmanager
def _under_fence(epoch: int) -> Iterator[WriteContext]:
    """Yields the context that binds a rewrite to this map version. Raises NotReplicatedError instead of
    StaleEpochError."""
    try:
        yield WriteContext(epoch=epoch)
    except StaleEpochError as error:
        raise NotReplicatedError(f"{error}; the write may or may not have taken effect; try again") from error
