"""Shortcuts for tests that write to a store and read it back.

Law: asserts nothing; the suites do.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from awscrt import checksums

from meshd.store.records import INTERNAL_WRITE, Meta, NewObject

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from meshd.store.api import ObjectStore, StoreWriter
    from meshd.store.records import Location, Record, Upload, WriteContext
    from meshwire.http_values.conditional_requests import Conditions
    from meshwire.s3.bucket_settings import Versioning

E = TypeVar("E", bound=BaseException)
LARGE = 300_000
"""More than the small-object limit that engines under test are opened with (64 KiB)."""


async def put_object(
    store: StoreWriter,
    key: str,
    data: bytes = b"",
    *,
    bucket: str = "b",
    conditions: Conditions | None = None,
    size: int | None = None,
    versioning: Versioning = "",
    context: WriteContext = INTERNAL_WRITE,
    **about: Any,
) -> Record:
    """Writes one object in uneven pieces; its ETag is its length and first bytes."""
    writer = store.writer(bucket, key, size=size)
    for start in range(0, len(data), 70_001):
        await writer.write(data[start : start + 70_001])
    return await writer.commit(
        Meta(fake_etag(data), **about), conditions=conditions, versioning=versioning, context=context
    )


def new_object(key: str, data: bytes, **about: Any) -> NewObject:
    """An object for `put_many`, with the ETag that `put_object` gives it."""
    return NewObject(key, Meta(fake_etag(data), **about), data, checksums.crc32c(data))


async def put_part(store: StoreWriter, upload: Upload, number: int, data: bytes) -> Record:
    """Writes one part."""
    writer = store.part_writer(upload, number, len(data))
    await writer.write(data)
    return await writer.commit(Meta(fake_etag(data)))


def fake_etag(data: bytes) -> str:
    """A stand-in for an MD5."""
    return f"{len(data)}-{data[:8].hex()}"


async def error_of(kind: type[E], doing: Awaitable[Any]) -> E:
    """The error of this kind that `doing` must raise."""
    try:
        await doing
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def read_spans(store: ObjectStore, record: Record, offset: int, length: int) -> bytes:
    """The bytes by way of descriptors."""
    with store.open_spans(record, offset, length) as found:
        return b"".join(os.pread(span.fd, span.length, span.offset) for span in found)


def read_location(location: Location) -> bytes:
    with open(location.path, "rb") as file:
        return os.pread(file.fileno(), location.length, location.offset)
