"""Archive upload: a PUT of a tar whose members become objects.

The form is that of S3 Snowball and MinIO: user metadata `snowball-auto-extract: true`. Every member is read,
named and authorized before the first is written, so a bad archive changes nothing; then all are committed
together (`StoreWriter.put_many`).
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec
from awscrt import checksums

from meshd.core.api_errors import store_errors
from meshd.store.records import INTERNAL_WRITE, Meta, NewObject
from meshd.util.async_tasks import CooperativeYield
from meshd.util.tenant_limits import ByteSemaphore
from meshwire.checksums.body_checksums import DEFAULT_ALGORITHM, new_hasher
from meshwire.errors import S3Error
from meshwire.names import KeyNameError, KeyTooLongError, check_key
from meshwire.s3.request_headers import object_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from meshd.auth.identity import Identity
    from meshd.objects.delete import OriginWriteBack
    from meshd.objects.object_reader import VersionLookup
    from meshd.objects.service import ObjectService
    from meshd.store.api import StoreWriter
    from meshd.store.records import WriteContext
    from meshwire.s3.operations import PutObject

MAX_ARCHIVE_BYTES: Final = 32 << 20
"""Largest archive, packed and unpacked: all of it is in memory, and committed at once."""
_UNPACKED: Final = 8 * MAX_ARCHIVE_BYTES
"""Limit of a process's unpacked archives that wait for their commit: 32 KiB of gzip can become 32 MiB."""
MAX_MEMBERS: Final = 10_000
OBJECTS_HEADER: Final = "x-mesh-objects"
"""Response header: how many objects were made of the archive."""
_UNVERIFIED_READS: Final = 128 << 10
"""Reads of larger objects are not verified by the node, so these have a checksum for clients to compare."""
_PAX_HEADER: Final = "minio.metadata."
_GZIP: Final = b"\x1f\x8b"
_COMPRESSED: Final = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}


class UnpackOptions(msgspec.Struct, frozen=True):
    """How an archive is unpacked: the prefix of the keys, whether folders become no objects, and whether
    members that cannot be objects are left out instead of refusing the archive."""

    prefix: str
    ignore_folders: bool
    ignore_errors: bool


class Member(msgspec.Struct, frozen=True):
    """A member as an object: its key, the headers that are stored with it, its bytes."""

    key: str
    headers: Mapping[str, str]
    data: bytes


def unpack_options(metadata: Mapping[str, str]) -> UnpackOptions | None:
    """Return how the body is to be unpacked; None if it is to be stored as it is."""
    if not _is_true(metadata, "snowball-auto-extract"):
        return None
    return UnpackOptions(
        metadata.get("minio-snowball-prefix", "").strip("/"),
        _is_true(metadata, "minio-snowball-ignore-dirs"),
        _is_true(metadata, "minio-snowball-ignore-errors"),
    )


def _is_true(metadata: Mapping[str, str], name: str) -> bool:
    return metadata.get(name, "").lower() == "true"


def read_members(data: bytes, options: UnpackOptions) -> list[Member]:
    """Return the members of a tar, which may be compressed by gzip; of members with one name the last.
    Raises S3Error InvalidArgument, KeyTooLongError, EntityTooLarge."""
    members: dict[str, Member] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(_decompress(data)), mode="r:") as tar:
            for count, info in enumerate(tar):
                if count >= MAX_MEMBERS:
                    raise _too_large(f"more than {MAX_MEMBERS} members")
                try:
                    member = _member(tar, info, options)
                except S3Error:
                    if options.ignore_errors:
                        continue
                    raise
                if member is not None:
                    members[member.key] = member
    except (tarfile.TarError, EOFError, UnicodeError, ValueError, RecursionError) as error:
        raise _invalid(f"the body is not a tar archive, or is damaged: {error}") from error
    return list(members.values())


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo, options: UnpackOptions) -> Member | None:
    name = info.name.removeprefix("./").lstrip("/")
    if info.isdir():
        if options.ignore_folders or name in {"", "."}:
            return None
        name = name.rstrip("/") + "/"
    elif not info.isreg() or info.issparse():
        raise _invalid(f"{info.name} is neither a file nor a folder")
    if ".." in name.split("/"):
        raise _invalid(f"{info.name} leads out of the archive")
    key = f"{options.prefix}/{name}" if options.prefix else name
    try:
        check_key(key)
    except KeyTooLongError as error:
        raise S3Error("KeyTooLongError", f"{error}: {key[:64]}…") from error
    except KeyNameError as error:
        raise _invalid(f"{info.name}: {error}") from error
    headers = {
        header.removeprefix(_PAX_HEADER).lower(): value
        for header, value in info.pax_headers.items()
        if header.startswith(_PAX_HEADER)
    }
    file = tar.extractfile(info)
    body = b"" if file is None else file.read()
    if len(body) != (0 if info.isdir() else info.size):
        raise tarfile.ReadError(f"{info.name} is truncated")
    return Member(key, headers, body)


def _decompress(data: bytes) -> bytes:
    """Raises S3Error EntityTooLarge, InvalidArgument."""
    for magic, name in _COMPRESSED.items():
        if data.startswith(magic):
            raise _invalid(f"the archive is compressed by {name}; use gzip, or send the tar as it is")
    if not data.startswith(_GZIP):
        return data
    found = bytearray()
    while data:
        stream = zlib.decompressobj(wbits=31)
        try:
            found += stream.decompress(data, MAX_ARCHIVE_BYTES + 1 - len(found))
        except zlib.error as error:
            raise _invalid(f"the archive cannot be decompressed: {error}") from error
        if len(found) > MAX_ARCHIVE_BYTES:
            raise _too_large("too many bytes, unpacked")
        if not stream.eof:
            raise _invalid("the archive is truncated")
        data = stream.unused_data.lstrip(b"\0")
    return bytes(found)


def _invalid(why: str) -> S3Error:
    return S3Error("InvalidArgument", f"Nothing was stored: {why}.")


def _too_large(why: str) -> S3Error:
    return S3Error(
        "EntityTooLarge",
        f"Nothing was stored: the archive has {why}; up to {MAX_MEMBERS} members and "
        f"{MAX_ARCHIVE_BYTES >> 20} MiB are unpacked. Send several archives.",
    )


class ArchiveUploads:
    """Unpacks uploads. One per process."""

    def __init__(
        self,
        replicated: StoreWriter,
        versions: VersionLookup,
        objects: ObjectService,
        backed: OriginWriteBack | None = None,
    ) -> None:
        self._replicated, self._versions, self._objects, self._backed = replicated, versions, objects, backed
        self._memory = ByteSemaphore(_UNPACKED)

    def check(self, operation: PutObject, size: int | None) -> None:
        """Refuse an archive before its body is read. Raises S3Error."""
        if operation.conditions is not None:
            raise S3Error("NotImplemented", "An upload that is unpacked cannot have conditional headers.")
        if self._backed is not None and self._backed.is_backed(operation.bucket):
            raise S3Error("NotImplemented", "Uploads cannot be unpacked into a bucket with an origin.")
        if size is not None and size > MAX_ARCHIVE_BYTES:
            raise _too_large(f"{size} bytes")

    async def put_archive(
        self,
        operation: PutObject,
        options: UnpackOptions,
        identity: Identity,
        data: bytes,
        authorize: Callable[[PutObject], None],
        *,
        born: int,
        context: WriteContext = INTERNAL_WRITE,
    ) -> tuple[str, ...]:
        """Store the members of the archive `data`, with the tags and the ACL of the request, in the bucket
        that was created at `born`. Returns their keys. `authorize` raises for a member that may not be
        written. Raises S3Error."""
        async with self._memory.hold(MAX_ARCHIVE_BYTES if data.startswith(_GZIP) else len(data)):
            bucket = operation.bucket
            members = await asyncio.to_thread(read_members, data, options)
            turn = CooperativeYield()
            for member in members:
                authorize(replace(operation, key=member.key))
                await turn.yield_if_due()
            owner = self._versions.owner_for_write(bucket, identity.user_id, operation.acl)
            objects = await asyncio.to_thread(lambda: list(_new_objects(members, operation, owner)))
            self._versions.require_same_bucket(bucket, born)
            setting = self._versions.versioning_of(bucket)
            with store_errors():
                records = await self._replicated.put_many(
                    bucket, objects, versioning=setting, context=context
                )
            for new, record in zip(objects, records, strict=True):
                await self._objects.finish_write(bucket, new.key, record, context=context)
            return tuple(new.key for new in objects)


def _new_objects(members: Sequence[Member], operation: PutObject, owner: str) -> Iterator[NewObject]:
    """Raises S3Error for headers that cannot be stored."""
    for member in members:
        headers = object_headers(member.headers)
        kept = {}
        if len(member.data) > _UNVERIFIED_READS:
            hasher = new_hasher(DEFAULT_ALGORITHM)
            hasher.update(member.data)
            kept[DEFAULT_ALGORITHM] = hasher.base64()
        meta = Meta(
            etag=hashlib.md5(member.data, usedforsecurity=False).hexdigest(),
            headers=dict(headers.system),
            metadata=dict(headers.metadata),
            checksums=kept,
            checksum_type="FULL_OBJECT" if kept else "",
            owner=owner,
            tags=dict(operation.tags),
            acl=operation.acl,
        )
        yield NewObject(member.key, meta, member.data, checksums.crc32c(member.data))
