"""When a replica knows something newer of a name than its decider ever saw.

A write that an earlier decider never acknowledged may lie at one replica, with a stamp of a clock that was
ahead. What is acknowledged now has to be the newest everywhere: it is entered again above that stamp.

Law: only null versions; a version of its own stands beside others, whatever their order. Only by whoever
decides about the name still: what is newer may as well be what another decider has acknowledged since.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from meshd.store.changes import Marked, VersionGone, bare
from meshd.store.epochs import decided_by
from meshd.store.errors import NotReplicatedError, StaleEpochError
from meshd.store.records import NULL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.cluster.replicating import ReplicatedStore
    from meshd.store.records import Record

_log = logging.getLogger(__name__)
_TRIES = 3


async def overtaken(store: ReplicatedStore, bucket: str, key: str, record: Record, newest: int) -> Record:
    """`record`, which every writer has, or the same again above `newest`, the highest stamp any of them knows
    of its name. One that was replaced here is left to the write that did it: written again it would undo that
    one. Raises NotReplicatedError."""
    for _ in range(_TRIES):
        if newest <= record.stamp or record.version or store.knows(bucket, key, newest):
            return record
        found = store.get_version(bucket, key, NULL)
        if found is None or found.stamp != record.stamp:
            return record
        epoch = store.still(bucket, key)
        _log.warning("a replica has a newer version of a name than its decider: written again above it")
        again = msgspec.structs.replace(bare(record), stamp=newest + 1)
        if record.marker:
            with fenced(epoch):
                await store.apply(Marked(bucket, key, again))
            newest = await store.tell(Marked(bucket, key, again), bucket, key)
        else:
            with fenced(epoch):
                await _again(store, bucket, key, record, again)
            newest = await store.tell_version(bucket, key, again)
        record = store.newest(bucket, key) or again
        if record.stamp != again.stamp:
            return again  # overwritten meanwhile
    raise NotReplicatedError("others decide about this name at the same time; try again in a moment")


async def restamp_removal(store: ReplicatedStore, gone: VersionGone, newest: int) -> None:
    """Enters a deletion of the null version again above `newest`, as `overtaken` does a version, unless
    another version was put since. Raises NotReplicatedError."""
    bucket, key = gone.bucket, gone.key
    found = store.get_version(bucket, key, NULL)
    if gone.version or newest <= gone.stamp or (found is not None and found.stamp > gone.stamp):
        return
    if not store.knows(bucket, key, newest):
        again = VersionGone(bucket, key, "", newest + 1)
        with fenced(store.still(bucket, key)):
            await store.apply(again)
        await store.tell(again, bucket, key)


@contextmanager
def fenced(epoch: int) -> Iterator[None]:
    """What is written again within it is decided by this version of the map. Raises NotReplicatedError."""
    try:
        with decided_by(epoch):
            yield
    except StaleEpochError as error:
        raise NotReplicatedError(f"{error}; it may or may not have taken place; try again") from error


async def _again(store: ReplicatedStore, bucket: str, key: str, record: Record, again: Record) -> None:
    writer = store.replica_writer(bucket, key, size=record.size)
    try:
        async for piece in store.delivery.pieces(record):
            await writer.write(piece)
        await writer.commit_as(again)
    finally:
        await writer.abort()
