"""Listings of objects and of uploads in progress.

Law: a page costs what it returns; pages are cut by the store, never here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.service.translation import store_errors
from meshwire.s3.results import ObjectListing, Owner, UploadEntry, UploadListing

if TYPE_CHECKING:
    from meshd.control.identities import IdentityTable
    from meshd.store.interface import ObjectStore
    from meshd.store.records import Upload
    from meshwire.s3.operations import ListMultipartUploads, ListObjects

PAGE_LIMIT = 1000


class ListingService:
    """Pages of at most 1,000 entries, whatever is asked for."""

    def __init__(self, store: ObjectStore, identities: IdentityTable) -> None:
        self._store, self._identities = store, identities

    def list_objects(self, operation: ListObjects) -> ObjectListing:
        """A page of either version. An owner is told where S3 tells it: always in version 1, on demand in
        2."""
        if operation.max_keys <= 0:
            return ObjectListing()
        with store_errors():
            page = self._store.list_entries(
                operation.bucket,
                prefix=operation.prefix,
                delimiter=operation.delimiter,
                after=operation.after,
                limit=min(operation.max_keys, PAGE_LIMIT),
            )
        entries = page.entries
        if operation.version == 1 or operation.fetch_owner:
            owners = self._owners()
            entries = tuple(
                entry._replace(owner=owners.get(owner) or Owner(owner))
                for entry, owner in zip(entries, page.owners, strict=True)
            )
        return ObjectListing(entries, page.prefixes, page.truncated, page.next_after)

    def list_uploads(self, operation: ListMultipartUploads) -> UploadListing:
        """A page of uploads in progress, by key, then by start."""
        if operation.max_uploads <= 0:
            return UploadListing()
        with store_errors():
            page = self._store.list_uploads(
                operation.bucket,
                prefix=operation.prefix,
                delimiter=operation.delimiter,
                key_marker=operation.key_marker,
                id_marker=operation.upload_id_marker,
                limit=min(operation.max_uploads, PAGE_LIMIT),
            )
        owners = self._owners()
        return UploadListing(
            tuple(_upload_entry(upload, owners) for upload in page.uploads),
            page.prefixes,
            page.truncated,
            page.next_key,
            page.next_id,
        )

    def _owners(self) -> dict[str, Owner]:
        users = self._identities.users()
        return {name: Owner(name, user.display_name) for name, user in users.items()}


def _upload_entry(upload: Upload, owners: dict[str, Owner]) -> UploadEntry:
    return UploadEntry(
        upload.key,
        upload.upload_id,
        upload.initiated,
        owners.get(upload.owner, Owner(upload.owner)),
        upload.checksum_algorithm,
        upload.checksum_type,
    )
