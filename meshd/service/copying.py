"""Copies: what may be copied, and the bytes of a source where they must be read.

Law: a whole copy shares extents and reads nothing, unless a checksum is asked for that is not known yet.
Invariant: bytes are read off the event loop, a bounded piece at a time.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from meshd.service.translation import store_errors
from meshd.store.records import Meta
from meshwire import checksums as sums
from meshwire.conditions import judge_read
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from meshd.store.interface import ObjectStore
    from meshd.store.records import Record, Span
    from meshwire.conditions import Conditions
    from meshwire.s3.operations import CopyObject

PIECE = 1 << 20

_UNCHANGED = (
    "This copy request is illegal because it is trying to copy an object to itself without changing the "
    "object's metadata, storage class, website redirect location or encryption attributes."
)


def checked_source(source: Record, operation: CopyObject, max_bytes: int) -> None:
    """Raise S3Error unless `source` may be copied as `operation` asks."""
    judge_source(operation.source_conditions, source)
    if source.size > max_bytes:
        raise S3Error(
            "InvalidRequest",
            "The specified copy source is larger than the maximum allowable size for a copy source: "
            f"{max_bytes}",
        )
    same = (operation.source.bucket, operation.source.key) == (operation.bucket, operation.key)
    if same and not operation.replace:
        raise S3Error("InvalidRequest", _UNCHANGED)


def judge_source(conditions: Conditions | None, source: Record) -> None:
    """x-amz-copy-source-if-*: any verdict but `proceed` is a 412, also where a GET would answer 304."""
    if conditions is None:
        return
    if judge_read(conditions, source.etag, source.modified // 1000) != "proceed":
        raise S3Error("PreconditionFailed")


def copied_meta(
    source: Record, operation: CopyObject, owner: str, checksums: Mapping[str, str], checksum_type: str
) -> Meta:
    """What the copy is called: the source's headers, or with REPLACE those of the request."""
    headers = operation.headers.system if operation.replace else source.headers
    metadata = operation.headers.metadata if operation.replace else source.metadata
    return Meta(source.etag, dict(headers), dict(metadata), dict(checksums), checksum_type, owner)


async def checksums_of(
    store: ObjectStore, source: Record, algorithm: str | None
) -> tuple[Mapping[str, str], str]:
    """(checksums, type) of the copy: the source's, unless `algorithm` asks for another of the whole."""
    known = source.checksum_type != "COMPOSITE" and algorithm in source.checksums
    if algorithm is None or known:
        return source.checksums, source.checksum_type
    hasher = sums.new(algorithm)
    async for piece in read_pieces(store, source, 0, source.size):
        await asyncio.to_thread(hasher.update, piece)
    return {algorithm: hasher.base64()}, "FULL_OBJECT"


async def read_pieces(
    store: ObjectStore, record: Record, offset: int, length: int
) -> AsyncGenerator[bytes, None]:
    """The bytes of a stored object in pieces of at most a MiB. Close it when it is left early."""
    with store_errors(), store.reading(record, offset, length) as spans:
        for span in spans:
            at, end = span.offset, span.offset + span.length
            while at < end:
                piece = await asyncio.to_thread(_read_exactly, span, at, min(PIECE, end - at))
                at += len(piece)
                yield piece


def _read_exactly(span: Span, offset: int, length: int) -> bytes:
    piece = os.pread(span.fd, length, offset)
    if not piece:
        raise S3Error("InternalError")
    return piece
