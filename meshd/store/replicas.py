"""Writing what another node decided: the bytes of a version or of a part, entered at exactly its stamp.

Law: as `writing`; what was told of already is entered once, however often it comes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.store.changes import (
    Amended,
    Applied,
    Marked,
    UploadBegun,
    UploadCompleted,
    UploadEnded,
    VersionGone,
    bare,
    bare_upload,
)
from meshd.store.errors import SizeMismatchError
from meshd.store.graves import Graves
from meshd.store.index import object_key
from meshd.store.replicaintents import (
    TakeAbort,
    TakeAmendment,
    TakeCompletion,
    TakeMarker,
    TakePart,
    TakeRemoval,
    TakeUpload,
    TakeVersion,
    standing_in,
)
from meshd.store.writing import StoredWriter

if TYPE_CHECKING:
    from meshd.store.changes import (
        Change,
        PartOf,
    )
    from meshd.store.index import Index
    from meshd.store.intents import Intent, Payload
    from meshd.store.records import Record
    from meshd.store.replicaintents import Standing
    from meshd.store.writing import WriteShop


class StoredReplicaWriter(StoredWriter):
    """See ReplicaWriter."""

    def __init__(self, shop: WriteShop, index: Index, bucket: str, key: str, size: int | None) -> None:
        super().__init__(shop, bucket, key, size)
        self._index = index

    async def settle(self) -> None:
        self._expect_open()
        await self._all()

    async def _all(self) -> Payload:
        try:
            return await super()._all()
        except BaseException:
            await self.abort()
            raise

    async def commit_as(self, record: Record, part: PartOf | None = None) -> Applied:
        self._expect_open()
        if self._total != record.size or (part is not None and self._total != part.part.size):
            raise SizeMismatchError(f"{self._total} bytes of {record.size} were written")
        if part is not None:
            return await self._commit_part(part)
        record = bare(record)
        found, grave, newest, mend = self._look(record)
        if found not in ("new", "stale") and not mend:
            await self.abort()
            return Applied(max(newest, grave), False)
        if found == "new" or mend:
            applied: Applied
            applied, found = await self._enter(
                TakeVersion(self._bucket, self._key, record, await self._all(), mend=mend)
            )
            if found != "stale":
                return applied
        else:
            await self.abort()
        change = Amended(self._bucket, self._key, record)
        amended: Applied = await asyncio.shield(self._shop.committer.submit(TakeAmendment(change)))
        return amended

    async def _commit_part(self, part: PartOf) -> Applied:
        begun = UploadBegun(bare_upload(part.upload))
        with self._index.reading() as txn:
            known = self._index.get_upload(txn, self._bucket, self._key, part.upload.upload_id)
        if known is None:
            await asyncio.shield(self._shop.committer.submit(TakeUpload(begun)))
        applied: Applied = await self._enter(TakePart(part, await self._all()))
        return applied

    async def _enter(self, intent: Intent) -> Any:
        """As the end of `StoredWriter.commit`; a file that was not needed goes."""
        try:
            future = self._shop.committer.submit(intent)
        except BaseException:
            await self.abort()
            raise
        self._finish("committing")
        future.add_done_callback(self._taken)
        return await asyncio.shield(future)

    def _taken(self, future: asyncio.Future[Any]) -> None:
        self._committed(future)
        if self._own is not None:
            self._own.discard_draft()

    def _look(self, record: Record) -> tuple[Standing, int, int, bool]:
        """Where the version stands, the stamp of its grave, and of the newest that there is; whether it is in
        quarantine here."""
        name = object_key(self._bucket, self._key)
        with self._index.reading() as txn:
            graves = Graves(self._index, txn)
            grave = graves.of(txn, name, record.version)
            newest = self._index.versions.newest(txn, name)
            null_grave = graves.of(txn, name) if record.version else grave
            return (
                standing_in(self._index, txn, name, record, grave),
                null_grave,
                newest.stamp if newest is not None else 0,
                self._broken(txn, name, record),
            )

    def _broken(self, txn: Any, name: bytes, record: Record) -> bool:
        existing = self._index.versions.at(txn, name, record.stamp)
        return existing is not None and existing.broken and existing.version == record.version


def intent_of(change: Change) -> Intent:
    """What the committer has to do for a change."""
    if isinstance(change, Marked):
        return TakeMarker(msgspec.structs.replace(change, record=bare(change.record)))
    if isinstance(change, Amended):
        return TakeAmendment(change)
    if isinstance(change, VersionGone):
        return TakeRemoval(change)
    if isinstance(change, UploadBegun):
        return TakeUpload(UploadBegun(bare_upload(change.upload)))
    if isinstance(change, UploadEnded):
        return TakeAbort(change)
    assert isinstance(change, UploadCompleted)
    return TakeCompletion(msgspec.structs.replace(change, record=bare(change.record)))
