"""Tags of objects: read, set, taken away, on the current version or a named one.

Law: tags change in place: neither the version, nor its time, nor its ETag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.service.semantics.translation import store_errors
from meshwire.s3.results import ObjectTagged, ObjectTags

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.service.semantics.versions import Versions
    from meshd.store.interface import ObjectStore
    from meshwire.s3.operations import DeleteObjectTagging, GetObjectTagging, PutObjectTagging


class TaggingService:
    """The use cases of object tags. One per process."""

    def __init__(self, store: ObjectStore, versions: Versions) -> None:
        self._store, self._versions = store, versions

    def get(self, operation: GetObjectTagging) -> ObjectTags:
        """Raises S3Error NoSuchKey, NoSuchVersion, MethodNotAllowed (a delete marker)."""
        record = self._versions.find(operation.bucket, operation.key, operation.version)
        return ObjectTags(record.tags, self._versions.name(operation.bucket, record))

    async def put(self, operation: PutObjectTagging, tags: Mapping[str, str]) -> ObjectTagged:
        """All tags at once, in place of those there were. Raises like `get`."""
        return await self._set(operation, tags)

    async def delete(self, operation: DeleteObjectTagging) -> ObjectTagged:
        """Raises like `get`."""
        return await self._set(operation, {})

    async def _set(
        self, operation: PutObjectTagging | DeleteObjectTagging, tags: Mapping[str, str]
    ) -> ObjectTagged:
        bucket, key = operation.bucket, operation.key
        self._versions.find(bucket, key, operation.version)
        with store_errors():
            record = await self._store.amend(bucket, key, operation.version, tags=dict(tags))
        return ObjectTagged(self._versions.name(bucket, record))
