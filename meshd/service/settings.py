"""A bucket's settings: read, put, deleted.

Law: a document is read into values before anything changes; the table decides races. Invariant: a setting
that cannot be carried out is refused, never kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from meshwire.s3 import settingdocuments as docs
from meshwire.s3.errors import S3Error
from meshwire.s3.results import SettingDocument, SettingStored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshd.control.buckets import Bucket, BucketTable
    from meshwire.s3.operations import DeleteBucketSetting, GetBucketSetting, PutBucketSetting
    from meshwire.s3.settings import BucketSetting

    Change = Callable[[Bucket], Bucket]


class SettingService:
    """The use cases of bucket settings. One per process."""

    def __init__(self, table: BucketTable) -> None:
        self._table = table

    def get(self, operation: GetBucketSetting) -> SettingDocument:
        """Raises S3Error: S3's own code for a setting that was never made."""
        bucket = self._table.get(operation.bucket)
        if bucket is None:
            raise _no_bucket(operation.bucket)
        reader = _READERS.get(operation.setting)
        if reader is None:
            return SettingDocument(docs.never_set(operation.setting))
        return reader(bucket)

    async def put(self, operation: PutBucketSetting, body: bytes) -> SettingStored:
        """Durable when it returns. Raises S3Error."""
        await self._change(operation.bucket, _WRITERS[operation.setting](body))
        return SettingStored()

    async def delete(self, operation: DeleteBucketSetting) -> SettingStored:
        """What was never set is a success."""
        change = _REMOVERS.get(operation.setting)
        if change is not None:
            await self._change(operation.bucket, change)
        return SettingStored()

    async def _change(self, name: str, change: Change) -> None:
        if await self._table.update(name, change) is None:
            raise _no_bucket(name)


def _no_bucket(name: str) -> S3Error:
    return S3Error("NoSuchBucket", extra={"BucketName": name})


def _get_versioning(bucket: Bucket) -> SettingDocument:
    return SettingDocument(docs.versioning(bucket.versioning))


def _put_versioning(body: bytes) -> Change:
    status = docs.parse_versioning(body)
    return lambda bucket: replace(bucket, versioning=status)


_READERS: Mapping[BucketSetting, Callable[[Bucket], SettingDocument]] = {"versioning": _get_versioning}
_WRITERS: Mapping[BucketSetting, Callable[[bytes], Change]] = {"versioning": _put_versioning}
_REMOVERS: Mapping[BucketSetting, Change] = {}
