"""The object services over a store in memory, and one bucket `b`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from meshd.auth.identity import Identity
from meshd.control.buckets import Bucket, BucketTable
from meshd.control.identities import IdentityTable
from meshd.datasets.archives.background_indexer import IndexQueue
from meshd.objects.delete import DeleteService
from meshd.objects.list_objects import ListingService
from meshd.objects.multipart_upload import UploadService
from meshd.objects.object_metadata import TaggingService
from meshd.objects.object_reader import ObjectReader, VersionLookup
from meshd.objects.service import ObjectService
from meshwire.checksums.body_checksums import BodyDigest, BodyDigests, BodyVerifier
from meshwire.errors import S3Error
from meshwire.s3 import operations as ops
from meshwire.s3.xml_documents import CompletedPart, DeleteRequest
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from meshwire.s3 import result_types as res
    from meshwire.s3.bucket_settings import Versioning
    from meshwire.s3.xml_documents import DeleteKey

ALICE = Identity("alice", "Alice", "AK")
MIB = 1 << 20
NEVER = "0" * 15 + "1"  # a version id that was never given
T = TypeVar("T")


class BytesBody:
    """A body that is there already."""

    def __init__(self, data: bytes) -> None:
        self._data, self._digest = data, BodyDigest("", {}, 0)

    @property
    def size(self) -> int | None:
        return len(self._data)

    async def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        verifier = BodyVerifier(digests, extra=also)
        verifier.update(self._data)
        yield self._data
        self._digest = verifier.finish()

    def digest(self) -> BodyDigest:
        return self._digest

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        return self._data


class Desk:
    """`versioning` can be set at any time."""

    def __init__(self, versioning: Versioning = "", store: type[MemoryStore] = MemoryStore) -> None:
        clock = ManualClock()
        control = MemoryControl(clock)
        self.clock, self.buckets, self.store = clock, BucketTable(control), store(clock)
        run(self.buckets.create(Bucket("b", "alice", 0, versioning=versioning)))
        self.versions = VersionLookup(self.store, self.buckets)
        self.objects = ObjectService(self.store, self.store, self.versions, IndexQueue(self.store).enqueue)
        self.reader = ObjectReader(self.store, self.versions)
        self.uploads = UploadService(self.store, self.store, self.objects, self.versions)
        self.deleter = DeleteService(self.store, self.versions)
        self.tagging = TaggingService(self.store, self.versions)
        self.listings = ListingService(self.store, IdentityTable(control), self.buckets)

    def set(self, versioning: Versioning) -> None:
        bucket = Bucket("b", "alice", 0, versioning=versioning)
        run(self.buckets.update("b", lambda _: bucket))

    def put(self, key: str, data: bytes, **options: Any) -> res.ObjectStored:
        operation = ops.PutObject("b", key, ops.ObjectHeaders(), BodyDigests(), **options)
        return run(self.objects.put_object(operation, ALICE, BytesBody(data)))

    def head(self, key: str, version: str | None = None, **options: Any) -> res.ObjectHead:
        return self.reader.find_object(ops.GetObject("b", key, version=version, **options)).head

    def read(self, key: str, version: str | None = None) -> bytes:
        operation = ops.GetObject("b", key, version=version)
        return self.reader.read_range(operation, self.reader.find_object(operation))

    def delete(self, key: str, version: str | None = None, **options: Any) -> res.ObjectDeleted:
        return run(self.deleter.delete_object(ops.DeleteObject("b", key, version=version, **options)))

    def delete_many(self, *keys: DeleteKey, quiet: bool = False) -> res.DeleteResult:
        operation = ops.DeleteObjects("b", BodyDigests())
        return run(self.deleter.delete_objects(operation, DeleteRequest(keys, quiet)))

    def copy(self, source: str, key: str, version: str | None = None, **options: Any) -> res.CopyResult:
        options = {"replace": False, "headers": ops.ObjectHeaders(), **options}
        operation = ops.CopyObject("b", key, ops.CopySource("b", source, version), **options)
        return run(self.objects.copy_object(operation, ALICE))

    def begin(self, key: str, **options: Any) -> str:
        operation = ops.CreateMultipartUpload("b", key, ops.ObjectHeaders(), **options)
        return run(self.uploads.create_upload(operation, ALICE)).upload_id

    def part(self, key: str, upload: str, number: int, data: bytes) -> CompletedPart:
        operation = ops.UploadPart("b", key, upload, number, BodyDigests())
        return CompletedPart(number, run(self.uploads.put_part(operation, BytesBody(data))).etag)

    def complete(self, key: str, upload: str, *parts: CompletedPart, **options: Any) -> res.CompleteResult:
        options = {"digests": BodyDigests(), **options}
        return run(
            self.uploads.complete_upload(ops.CompleteMultipartUpload("b", key, upload, **options), parts)
        )

    def tags(self, key: str, version: str | None = None) -> dict[str, str]:
        return dict(self.tagging.get_tags(ops.GetObjectTagging("b", key, version)).tags)

    def tag(self, key: str, tags: dict[str, str], version: str | None = None) -> res.ObjectTagged:
        operation = ops.PutObjectTagging("b", key, BodyDigests(), version)
        return run(self.tagging.put_tags(operation, tags))

    def listed(self, **options: Any) -> list[tuple[str, str, bool, bool]]:
        """(key, version, latest, marker) of a page of versions."""
        page = run(self.listings.list_versions(ops.ListObjectVersions("b", **options)))
        return [(e.key, e.version, e.latest, e.marker) for e in page.entries]


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def refusal(call: Any, *arguments: Any, **options: Any) -> S3Error:
    try:
        call(*arguments, **options)
    except S3Error as error:
        return error
    raise AssertionError("it was not refused")
