"""Archive members for S3 clients: look up by name or key, list, copy.

Permission on the archive's key covers its members, however a request names them. A stored key, in any
version, is that object and never a member. A member's ETag changes with the archive.
"""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from meshd.core.api_errors import BatchError, store_errors, to_s3_error
from meshd.core.read_source import GeneratedSource
from meshd.objects.copy_object import check_source_conditions
from meshd.objects.object_reader import ReplacedError, lookup_result
from meshd.store.errors import ExtentGoneError, StoreError
from meshd.store.integrity.verification import damage_context
from meshd.store.records import Record
from meshd.views.copy_out import AssembledBody, assembled_part, copy_as_put
from meshd.views.view_kind import AssembledObject
from meshwire import names
from meshwire.dataset.archive_paths import MEMBER_SEPARATOR, archive_kind, member_paths, name_page
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3.result_types import MemberEntry, MemberListing, ObjectEntry, ObjectListing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from meshd.core.object_io import LookupResult
    from meshd.datasets.archives.archive_service import ArchiveService, MemberLocation
    from meshd.objects.object_reader import VersionLookup
    from meshd.store.api import StoreReader
    from meshd.store.records import Span
    from meshwire.dataset.archive_index import ArchiveIndex

_GROUP: Final = 1 << 20
_PAGE: Final = 1000
_TYPES: Final = mimetypes.MimeTypes()  # Python's own table: the same on every machine


class MemberService:
    """Members of archives as objects. One instance per worker. `is_view`: whether a bucket is a view."""

    def __init__(
        self,
        store: StoreReader,
        versions: VersionLookup,
        archives: ArchiveService,
        is_view: Callable[[str], bool],
    ) -> None:
        self._store, self._versions, self._archives, self._is_view = store, versions, archives, is_view

    def __repr__(self) -> str:
        return f"<MemberService over {self._archives!r}>"

    def resolve_member_key(self, operation: ops.Operation) -> ops.Operation:
        """Return the operation; if its key names a member (`x.tar/-/a.jpg`), on the archive with that
        member."""
        if (
            isinstance(operation, ops.GetObject)
            and MEMBER_SEPARATOR in operation.key
            and operation.member is None
        ):
            found = self._archive_of(operation.bucket, operation.key)
            return operation if found is None else replace(operation, key=found[0], member=found[1])
        if (
            isinstance(operation, ops.CopyObject | ops.UploadPartCopy)
            and MEMBER_SEPARATOR in operation.source.key
        ):
            source = operation.source
            found = self._archive_of(source.bucket, source.key)
            if found is not None:
                return replace(operation, source=replace(source, key=found[0], member=found[1]))
        return operation

    def _archive_of(self, bucket: str, key: str) -> tuple[str, str] | None:
        with store_errors():
            if self._store.newest_version(bucket, key) is not None:
                return None
            for path in member_paths(key):
                if path.member and self._store.newest_version(bucket, path.key) is not None:
                    return path
        return None

    async def find_member(self, operation: ops.GetObject) -> LookupResult:
        """Return the response to GET or HEAD of a member. Raises S3Error as for an object, and
        UnprocessableSource."""
        assert operation.member is not None
        bucket, key, member = operation.bucket, operation.key, operation.member
        record = self._record(bucket, key, operation.version)
        place = (await self._index(bucket, key, record)).find(member)
        if place is None:
            raise _missing(key, member)
        version = self._versions.version_header(bucket, record)
        found = lookup_result(operation, _as_object(record, member, place[1]), version)
        if operation.head or not found.length:  # without bytes, nothing has to be decompressed
            return found
        with _archive_errors():
            plain = await self._archives.decompressed(bucket, key, record)
        return found._replace(record=plain, base=place[0])

    async def member_as_upload(self, operation: ops.CopyObject) -> tuple[ops.PutObject, AssembledBody] | None:
        """Turn a copy of a member into an upload; return None for a copy of an object."""
        if operation.source.member is None:
            return None
        made = await self.open_member(operation.source)
        check_source_conditions(operation.source_conditions, made.record)
        return copy_as_put(operation, made.record), AssembledBody(made)

    async def member_as_part(
        self, operation: ops.UploadPartCopy
    ) -> tuple[ops.UploadPart, AssembledBody] | None:
        """Turn a part copied from a member into an uploaded part; return None for a part of an object. Raises
        S3Error InvalidArgument."""
        if operation.source.member is None:
            return None
        return assembled_part(operation, await self.open_member(operation.source))

    async def open_member(self, source: ops.CopySource) -> AssembledObject:
        """Return a member as the source of a copy. Raises S3Error."""
        assert source.member is not None
        record = self._record(source.bucket, source.key, source.version)
        place = await self._place(source.bucket, source.key, record, source.member)
        pretended = _as_object(record, source.member, place.size)
        name = f"s3://{source.bucket}/{source.key}"
        groups = GeneratedSource(lambda offset, length: self._groups(place, name, offset, length))
        return AssembledObject(pretended, [groups])

    async def list_members(self, operation: ops.ListMembers) -> MemberListing:
        """Return a page of an archive's files. Raises S3Error."""
        record = self._record(operation.bucket, operation.key, operation.version)
        index = await self._index(operation.bucket, operation.key, record)
        known, numbers = await asyncio.to_thread(lambda: index.ordered)
        page = name_page(known, operation.prefix, "", operation.after, operation.limit)
        entries = tuple(_entry(record, index, known[place], numbers[place]) for place in page.places)
        version = self._versions.version_header(operation.bucket, record)
        return MemberListing(
            index.kind, record.etag, record.size, len(known), entries, page.next_after, version
        )

    async def list_member_keys(
        self, operation: ops.ListObjects, may_read: Callable[[str], bool]
    ) -> ObjectListing | None:
        """Return a page of an archive's files as keys if the prefix leads into an archive (`x.tar/-/`) and no
        stored key has the prefix; None for any other listing. `may_read`: whether the archive's key may be
        read."""
        found = self._listed_archive(operation)
        if found is None or not may_read(found[0]):
            return None
        key, within = found
        record = self._versions.find_version(operation.bucket, key)
        index = await self._index(operation.bucket, key, record)
        base = key + MEMBER_SEPARATOR
        known, numbers = await asyncio.to_thread(lambda: index.ordered)
        after = operation.after[len(base) :] if operation.after.startswith(base) else ""
        if operation.after > base and not after:
            return ObjectListing()
        limit = min(operation.max_keys, _PAGE)
        page = name_page(known, within, operation.delimiter, after, limit)
        entries = []
        for place in page.places:
            try:
                names.check_key(base + known[place])
            except names.NameProblemError:  # no request could name this file
                continue
            size = int(index.sizes[numbers[place]])
            etag = member_etag(record, known[place])
            entries.append(ObjectEntry(base + known[place], size, etag, record.modified))
        more = page.next_after is not None and limit > 0
        return ObjectListing(
            tuple(entries), tuple(base + each for each in page.prefixes), more, base + (page.next_after or "")
        )

    def _listed_archive(self, operation: ops.ListObjects) -> tuple[str, str] | None:
        if MEMBER_SEPARATOR not in operation.prefix or self._is_view(operation.bucket):
            return None
        with store_errors():
            if self._store.list(operation.bucket, prefix=operation.prefix, limit=1).entries:
                return None
            for path in member_paths(operation.prefix):
                if self._store.get(operation.bucket, path.key) is not None:
                    return path
        return None

    # --- used by all of the above -----------------------------------------------------------------------

    def _record(self, bucket: str, key: str, version: str | None) -> Record:
        if self._is_view(bucket):
            raise S3Error("NotImplemented", "Members can be read of stored archives only, not of a view's.")
        record = self._versions.find_version(bucket, key, version)
        if archive_kind(key) is None:
            raise S3Error(
                "InvalidRequest",
                "The key must end in .tar, .tar.gz, .tgz, .tar.zst, .tzst or .zip to be read as an archive.",
            )
        return record

    async def _index(self, bucket: str, key: str, record: Record) -> ArchiveIndex:
        with _archive_errors():
            return await self._archives.get_index(bucket, key, record)

    async def _place(self, bucket: str, key: str, record: Record, member: str) -> MemberLocation:
        with _archive_errors():
            place = await self._archives.locate_member(bucket, key, record, member)
        if place is None:
            raise _missing(key, member)
        return place

    async def _groups(
        self, place: MemberLocation, name: str, offset: int, length: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        for at in range(offset, offset + length, _GROUP):
            taken = min(_GROUP, offset + length - at)
            with (
                damage_context(name),
                self._store.open_spans(place.record, place.offset + at, taken) as spans,
            ):
                yield [span.with_name(name) for span in spans]


def member_etag(archive: Record, member: str) -> str:
    """Return a member's ETag, in the form of a multipart object's, so that no client takes it for an MD5."""
    content = f"{archive.etag}\0{archive.size}\0{member}".encode()
    return f"{hashlib.blake2b(content, digest_size=16).hexdigest()}-1"


def _as_object(archive: Record, member: str, size: int) -> Record:
    """Return the record that a member would have if it were stored as an object."""
    kind, encoding = _TYPES.guess_type(f"x/{member}", strict=False)
    headers = {"content-type": kind} if kind and not encoding else {}
    return msgspec.structs.replace(
        Record(size, member_etag(archive, member), archive.stamp, archive.modified, ()), headers=headers
    )


def _missing(key: str, member: str) -> S3Error:
    return S3Error("NoSuchKey", "The archive has no such member.", extra={"Key": key, "Member": member})


def _entry(archive: Record, index: ArchiveIndex, name: str, number: int) -> MemberEntry:
    offset = None if index.inflated else int(index.offsets[number])
    return MemberEntry(name, int(index.sizes[number]), member_etag(archive, name), offset)


@contextmanager
def _archive_errors() -> Iterator[None]:
    """Translate errors of an archive into S3Errors; raise ReplacedError if the archive was replaced."""
    try:
        yield
    except ExtentGoneError as error:
        raise ReplacedError from error
    except StoreError as error:
        raise to_s3_error(error) from error
    except BatchError as error:
        raise _s3_error(error) from error


def _s3_error(error: BatchError) -> S3Error:
    if error.code in ("BadSample", "TooLarge"):
        return S3Error("UnprocessableSource", "; ".join(filter(None, (error.message, error.help))))
    if error.code == "Busy":
        return S3Error("SlowDown", error.message, headers={"retry-after": str(error.retry_after or 1)})
    return S3Error("InternalError", error.message)
