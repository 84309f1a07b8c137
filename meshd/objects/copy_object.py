"""Copy rules: which sources may be copied, the copy's metadata, and reading a source's bytes.

A whole copy shares extents and reads no bytes, unless the request asks for a checksum that is not known.
Bytes are read off the event loop, one bounded chunk at a time.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeVar

import msgspec

from meshd.core.api_errors import store_errors
from meshd.core.object_io import MAX_PUT_BYTES
from meshd.store.errors import ExtentGoneError
from meshd.store.integrity import verification
from meshd.store.integrity.verification import VerifiedExtents, damage_context
from meshd.store.records import Meta
from meshwire.checksums import body_checksums as sums
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.errors import S3Error, precondition_failed
from meshwire.http_values.conditional_requests import failed_read_condition

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from meshd.store.api import StoreReader
    from meshd.store.records import Record
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.operations import CopyObject, CopySource

CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5
_REDIRECT = "x-amz-website-redirect-location"
_T = TypeVar("_T")

_UNCHANGED = (
    "This copy request is illegal because it is trying to copy an object to itself without changing the "
    "object's metadata, storage class, website redirect location or encryption attributes."
)


def check_copy_source(source: Record, operation: CopyObject, *, versioned: bool) -> None:
    """Raise S3Error unless `source` may be copied as `operation` asks.

    A copy onto itself must change something, unless it brings back a version (`versioned` buckets).
    """
    check_source_conditions(operation.source_conditions, source)
    if source.size > MAX_PUT_BYTES:
        raise S3Error(
            "InvalidRequest",
            "The specified copy source is larger than the maximum allowable size for a copy source: "
            f"{MAX_PUT_BYTES}",
        )
    same = (operation.source.bucket, operation.source.key) == (operation.bucket, operation.key)
    restores = versioned and operation.source.version is not None
    changes = operation.replace or operation.reclass or _REDIRECT in operation.headers.system
    if same and not (changes or restores):
        raise S3Error("InvalidRequest", _UNCHANGED)


def check_source_conditions(conditions: Conditions | None, source: Record) -> None:
    """Check x-amz-copy-source-if-*: each failed condition is a 412, even where a GET would answer 304."""
    if conditions is None:
        return
    failed = failed_read_condition(conditions, source.etag, source.modified // 1000)
    if failed:
        raise precondition_failed(f"x-amz-copy-source-{failed}")


def copy_part_range(asked: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """Return (offset, length) of x-amz-copy-source-range in a source of `size` bytes. Raises S3Error
    InvalidArgument."""
    first, last = asked or (0, size - 1)
    if asked is not None and not first <= last < size:
        raise S3Error(
            "InvalidArgument",
            f"Range specified is not valid for source object of size: {size}",
            extra={"ArgumentName": "x-amz-copy-source-range"},
        )
    return first, last - first + 1


def copy_meta(source: Record, operation: CopyObject, owner: str, *, through: bool = False) -> Meta:
    """Return the copy's metadata: the source's headers and tags, or those that replace them. A redirect and
    the ACL never come from the source."""
    asked = operation.headers
    if operation.replace:
        headers, metadata = dict(asked.system), dict(asked.metadata)
    else:
        headers, metadata = dict(source.headers), dict(source.metadata)
        headers.pop(_REDIRECT, None)
        headers |= {_REDIRECT: asked.system[_REDIRECT]} if _REDIRECT in asked.system else {}
    return Meta(
        source.etag,
        headers,
        metadata,
        dict(source.checksums),
        source.checksum_type,
        owner,
        dict(source.tags if operation.tags is None else operation.tags),
        operation.acl,
        through=through,
    )


async def add_checksum(store: StoreReader, source: Record, algorithm: str | None) -> Record:
    """Return `source` with the requested checksum of the whole object. If that is unknown, the bytes are
    read, and the ETag becomes their MD5: the copy then has one part, whatever parts the source had."""
    known = source.checksum_type != "COMPOSITE" and algorithm in source.checksums
    if algorithm is None or known:
        return source
    verifier = sums.BodyVerifier(BodyDigests(), extra=(algorithm,))
    async with aclosing(read_chunks(store, source, 0, source.size)) as pieces:
        async for piece in pieces:
            await asyncio.to_thread(verifier.update, piece)
    digest = verifier.finish()
    return msgspec.structs.replace(
        source,
        etag=digest.md5_hex,
        checksums=dict(digest.checksums),
        checksum_type="FULL_OBJECT",
        parts=(),
    )


async def retry_if_moved(attempt: Callable[[], Awaitable[_T]], source: CopySource) -> _T:
    """Return the result of `attempt` on `source`. Repeat it, up to five times, when the source was replaced,
    or moved by compaction, meanwhile. Raises S3Error."""
    for _ in range(_ATTEMPTS):
        with store_errors(), damage_context(f"s3://{source.bucket}/{source.key}"):
            try:
                return await attempt()
            except ExtentGoneError:
                continue
    raise S3Error("SlowDown", "The source changes faster than it can be copied. Please try again.")


async def read_chunks(
    store: StoreReader, record: Record, offset: int, length: int
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a stored object in chunks of at most a MiB and verify them against its checksums.
    The bytes are verified only if this generator ends normally. Close it if you stop early.

    Raises StoreError; ExtentGoneError only before the first chunk.
    """
    with store.open_spans(record, offset, length) as spans:
        await VerifiedExtents().require_verified(spans)
        async for piece in verification.read_chunks(spans, CHUNK_BYTES):
            yield piece
