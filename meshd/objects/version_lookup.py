"""Version lookup: the version of an object that a request names, and its version-id and expiration headers.

All code that accepts a version id looks it up here. `find_version` returns readable versions only; a
delete marker raises an error whose headers say so.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/DeleteMarker.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.core.error_mapping import store_errors
from meshd.core.object_io import NOTHING
from meshd.objects.lifecycle_rules import expiration_header
from meshd.store.engine.member_header import stamp_of_version_id
from meshd.store.records import NULL
from meshwire.errors import S3Error
from meshwire.http_values import dates
from meshwire.s3.request_head import invalid_argument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.buckets import BucketTable
    from meshd.store.api import StoreReader
    from meshd.store.records import Record, Upload
    from meshwire.s3.bucket_settings import Acl, Versioning
    from meshwire.s3.operations import CopySource


class VersionLookup:
    """Looks versions up. Stateless; every lookup takes microseconds."""

    def __init__(self, store: StoreReader, buckets: BucketTable) -> None:
        self._store, self._buckets = store, buckets

    def has_bucket(self, name: str) -> bool:
        """Whether the bucket exists (still)."""
        return self._buckets.get(name) is not None

    def bucket_created(self, name: str) -> int:
        """Return the creation time, which tells a bucket from an earlier one of its name; 0 if there is
        none."""
        return self._buckets.created_at_ms(name)

    def is_of_current_bucket(self, upload: Upload) -> bool:
        """Whether an upload was begun in the bucket that has the name now. A node that was away while the
        bucket was deleted and created again still stores earlier uploads."""
        return upload.born in (0, self.bucket_created(upload.bucket))

    def require_same_bucket(self, name: str, born: int) -> None:
        """Raise S3Error NoSuchBucket if the bucket was deleted since `born`, even if the name exists
        again."""
        if self.bucket_created(name) != born:
            raise S3Error("NoSuchBucket", extra={"BucketName": name})

    def versioning_of(self, bucket: str) -> Versioning:
        """Return the bucket's present versioning status."""
        found = self._buckets.get(bucket)
        return "" if found is None else found.versioning

    def version_header(self, bucket: str, record: Record) -> str:
        """Return x-amz-version-id of a read: the id, `null`, or empty if the bucket never had versioning. A
        write returns ids only."""
        return record.version or ("null" if self.versioning_of(bucket) else "")

    def owner_for_write(self, bucket: str, writer: str, acl: Acl | None) -> str:
        """Return the owner of an object that `writer` writes with this ACL: the bucket's owner, if its
        ownership setting says so."""
        found = self._buckets.get(bucket)
        if found is None or found.ownership in {"", "ObjectWriter"}:
            return writer
        given = acl is not None and acl.canned == "bucket-owner-full-control"
        return found.owner if given or found.ownership == "BucketOwnerEnforced" else writer

    def expiration_headers(self, bucket: str, key: str, record: Record) -> Mapping[str, str]:
        """Return x-amz-expiration of a current object, if a lifecycle rule will remove it."""
        found = self._buckets.get(bucket)
        if found is None or not found.lifecycle:
            return NOTHING
        told = expiration_header(found.lifecycle, key, record.size, record.tags, record.modified)
        return {"x-amz-expiration": told} if told else NOTHING

    def find_version(self, bucket: str, key: str, version: str | None = None) -> Record:
        """Return the named version, or the current one. Raises S3Error NoSuchKey, NoSuchVersion,
        InvalidArgument (a malformed id), MethodNotAllowed (a delete marker requested by its id)."""
        with store_errors():
            record = (
                self._store.get(bucket, key)
                if version is None
                else self._store.get_version(bucket, key, version)
            )
        if record is None:
            raise self._missing(bucket, key, version)
        if record.marker:
            raise _unreadable(record)
        return record

    def find_copy_source(self, source: CopySource) -> Record:
        """Return the version that a copy reads. Raises S3Error NoSuchKey, NoSuchVersion, InvalidRequest (a
        delete marker)."""
        try:
            return self.find_version(source.bucket, source.key, source.version)
        except S3Error as error:
            if error.code != "MethodNotAllowed":
                raise
            raise S3Error(
                "InvalidRequest",
                "The source of a copy request may not specifically refer to a delete marker by version id.",
            ) from error

    def _missing(self, bucket: str, key: str, version: str | None) -> S3Error:
        if version is not None:
            check_version_id(version)
            return S3Error("NoSuchVersion", extra={"Key": key, "VersionId": version})
        headers = {}
        if self.versioning_of(bucket):
            with store_errors():
                newest = self._store.newest_version(bucket, key)
            if newest is not None and newest.marker:
                headers = _marker_headers(newest)
        return S3Error("NoSuchKey", headers=headers, extra={"Key": key})


def check_version_id(version: str) -> None:
    """Raise S3Error InvalidArgument for a text that cannot be a version id here."""
    if version != NULL and stamp_of_version_id(version) is None:
        raise invalid_argument("versionId", version, "Invalid version id specified")


def _unreadable(marker: Record) -> S3Error:
    modified = dates.format_http(marker.modified // 1000)
    return S3Error(
        "MethodNotAllowed",
        headers={**_marker_headers(marker), "allow": "DELETE", "last-modified": modified},
        extra={"Method": "GET", "ResourceType": "DeleteMarker"},
    )


def _marker_headers(marker: Record) -> dict[str, str]:
    return {"x-amz-delete-marker": "true", "x-amz-version-id": marker.version or NULL}
