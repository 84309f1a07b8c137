"""Listings of objects, versions and multipart uploads, on this node or merged over all nodes.

A page costs what it returns: the store cuts pages, this module only renders them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from meshd.core.api_errors import store_errors
from meshd.store.records import NULL
from meshwire.s3.result_types import (
    ObjectListing,
    Owner,
    UploadEntry,
    UploadListing,
    VersionEntry,
    VersionListing,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshd.control.buckets import BucketTable
    from meshd.control.identities import IdentityTable, User
    from meshd.peer_reads.listing import MergedListings
    from meshd.store.api import StoreReader
    from meshd.store.records import Record, Upload
    from meshwire.s3.operations import ListMultipartUploads, ListObjects, ListObjectVersions

PAGE_LIMIT = 1000


class ListingService:
    """Lists objects, versions and uploads of all nodes, in pages of at most 1,000 entries."""

    def __init__(
        self,
        store: StoreReader,
        identities: IdentityTable,
        buckets: BucketTable,
        merged: MergedListings | None = None,
    ) -> None:
        self._store, self._identities, self._buckets = store, identities, buckets
        self._all_nodes = merged
        self._users: Mapping[str, User] = {}
        self._known: dict[str, Owner] = {}

    @property
    def _merged(self) -> MergedListings | None:
        """The listings of all nodes; None on a single node, which has everything."""
        return None if self._all_nodes is None or self._all_nodes.single_node else self._all_nodes

    async def list_objects(self, operation: ListObjects) -> ObjectListing:
        """Return a page of either API version. Owners are included as in S3: always in version 1, on demand
        in 2. Raises S3Error."""
        if operation.max_keys <= 0:
            return ObjectListing()
        arguments = _entries_of(operation)
        if (merged := self._merged) is not None:
            page = await merged.list_entries(operation.bucket, **arguments)
        else:
            with store_errors():
                page = self._store.list_entries(operation.bucket, **arguments)
        entries = page.entries
        if operation.version == 1 or operation.fetch_owner:
            owners = self._owners()
            entries = tuple(
                entry._replace(owner=owners.get(owner) or Owner(owner))
                for entry, owner in zip(entries, page.owners, strict=True)
            )
        return ObjectListing(entries, page.prefixes, page.truncated, page.next_after)

    async def list_versions(self, operation: ListObjectVersions) -> VersionListing:
        """Return a page of versions and delete markers. A marker belongs to the bucket's owner. Raises
        S3Error."""
        if operation.max_keys <= 0:
            return VersionListing()
        arguments = _versions_of(operation)
        if (merged := self._merged) is not None:
            page = await merged.list_versions(operation.bucket, **arguments)
        else:
            with store_errors():
                page = self._store.list_versions(operation.bucket, **arguments)
        owners, bucket = self._owners(), self._buckets.get(operation.bucket)
        landlord = "" if bucket is None else bucket.owner
        entries = tuple(
            _version_entry(key, record, latest, owners, landlord)
            for (key, record), latest in zip(page.entries, page.latest, strict=True)
        )
        return VersionListing(entries, page.prefixes, page.truncated, page.next_key, page.next_version)

    async def list_uploads(self, operation: ListMultipartUploads) -> UploadListing:
        """Return a page of uploads in progress, ordered by key, then by start. Raises S3Error."""
        if operation.max_uploads <= 0:
            return UploadListing()
        arguments = _uploads_of(operation)
        if (merged := self._merged) is not None:
            page = await merged.list_uploads(operation.bucket, **arguments)
        else:
            with store_errors():
                page = self._store.list_uploads(operation.bucket, **arguments)
        owners = self._owners()
        return UploadListing(
            tuple(
                _upload_entry(upload, owners)
                for upload in page.uploads
                if upload.born in (0, self._buckets.created_at_ms(upload.bucket))
            ),
            page.prefixes,
            page.truncated,
            page.next_key,
            page.next_id,
        )

    def _owners(self) -> dict[str, Owner]:
        users = self._identities.users()
        if users is not self._users:
            self._users = users
            self._known = {name: Owner(name, user.display_name) for name, user in users.items()}
        return self._known


class _PageArguments(TypedDict):
    prefix: str
    delimiter: str
    limit: int


class _EntryArguments(_PageArguments):
    after: str


class _VersionArguments(_PageArguments):
    key_marker: str
    version_marker: str


class _UploadArguments(_PageArguments):
    key_marker: str
    id_marker: str


def _entries_of(operation: ListObjects) -> _EntryArguments:
    return {
        "prefix": operation.prefix,
        "delimiter": operation.delimiter,
        "after": operation.after,
        "limit": min(operation.max_keys, PAGE_LIMIT),
    }


def _versions_of(operation: ListObjectVersions) -> _VersionArguments:
    return {
        "prefix": operation.prefix,
        "delimiter": operation.delimiter,
        "key_marker": operation.key_marker,
        "version_marker": operation.version_marker,
        "limit": min(operation.max_keys, PAGE_LIMIT),
    }


def _uploads_of(operation: ListMultipartUploads) -> _UploadArguments:
    return {
        "prefix": operation.prefix,
        "delimiter": operation.delimiter,
        "key_marker": operation.key_marker,
        "id_marker": operation.upload_id_marker,
        "limit": min(operation.max_uploads, PAGE_LIMIT),
    }


def _version_entry(
    key: str, record: Record, latest: bool, owners: dict[str, Owner], landlord: str
) -> VersionEntry:
    owner = record.owner or landlord
    return VersionEntry(
        key,
        record.version or NULL,
        latest,
        record.modified,
        owners.get(owner, Owner(owner)),
        record.marker,
        record.size,
        record.etag,
        next(iter(record.checksums), ""),
        record.checksum_type,
    )


def _upload_entry(upload: Upload, owners: dict[str, Owner]) -> UploadEntry:
    return UploadEntry(
        upload.key,
        upload.upload_id,
        upload.initiated,
        owners.get(upload.owner, Owner(upload.owner)),
        upload.checksum_algorithm,
        upload.checksum_type,
    )
