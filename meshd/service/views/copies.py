"""What a view puts together, written out as an ordinary object.

Law: the same bytes as a GET gives, hashed on the way like any upload's; stored only if every member was still
the one that was laid out, and what lies in the store is what was stored there.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from awscrt.checksums import combine_crc32c

from meshd.store.errors import CorruptExtentError
from meshd.store.proving import Passing, Proofs
from meshd.telemetry import metrics
from meshwire.checksums import BodyDigests, BodyVerifier
from meshwire.s3.errors import S3Error
from meshwire.s3.operations import ObjectHeaders, PutObject, UploadPart

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

    from meshd.service.views.kinds import Made
    from meshd.store.records import Record, Span
    from meshwire.checksums import BodyDigest
    from meshwire.s3.operations import CopyObject, UploadPartCopy

_PIECE: Final = 1 << 20


class MadeBody:
    """`meshd.service.semantics.bodies.Body` over the groups of (a range of) an object that is made."""

    def __init__(self, made: Made, offset: int = 0, length: int | None = None) -> None:
        self._size = made.record.size - offset if length is None else length
        self._proofs = Proofs()
        self._groups = made.copied(self._proofs, offset, self._size)
        self._digest: BodyDigest | None = None

    def __repr__(self) -> str:
        return f"<MadeBody of {self._size} bytes>"

    @property
    def size(self) -> int | None:
        return self._size

    async def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        verifier, passing = BodyVerifier(digests, extra=also), Passing()
        async with aclosing(self._groups) as groups:
            async for spans in groups:
                await self._proofs.require(spans)
                for few in cut_spans(spans, _PIECE):
                    yield await asyncio.to_thread(_read, few, verifier, passing)
        self._digest = verifier.finish()

    def digest(self) -> BodyDigest:
        if self._digest is None or self._digest.size != self._size:
            raise S3Error("IncompleteBody")
        return self._digest

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        if self._size > limit:
            raise S3Error("MaxMessageLengthExceeded")
        return b"".join([piece async for piece in self.pieces(digests)])


def cut_spans(spans: Iterable[Span], most: int) -> Iterator[list[Span]]:
    """Spans to be read at a time, of `most` bytes at most: a large member is one span."""
    held: list[Span] = []
    room = most
    for span in spans:
        at = 0
        while at < span.length:
            length = min(span.length - at, room)
            held.append(span.part(at, length))
            at, room = at + length, room - length
            if not room:
                yield held
                held, room = [], most
    if held:
        yield held


def read_spans(spans: Sequence[Span], passing: Passing, crc: int = 0) -> tuple[bytes, int]:
    """Their bytes, joined, and `crc` gone on with over them (blocking). Raises CorruptExtentError."""
    read = [os.pread(span.fd, span.length, span.offset) for span in spans]
    for span, data in zip(spans, read, strict=True):
        if len(data) != span.length:
            metrics.store_corrupt_reads.inc()
            raise CorruptExtentError("bytes of a member are missing; run meshd fsck", span.name)
        crc = combine_crc32c(crc, passing.take(span, data), len(data))
    return read[0] if len(read) == 1 else b"".join(read), crc


def _read(spans: Sequence[Span], verifier: BodyVerifier, passing: Passing) -> bytes:
    data, _ = read_spans(spans, passing)
    verifier.update(data)
    return data


def as_upload(operation: CopyObject, source: Record) -> PutObject:
    """The copy as the upload that it is."""
    wanted = () if operation.checksum_algorithm is None else (operation.checksum_algorithm,)
    return PutObject(
        operation.bucket,
        operation.key,
        operation.headers if operation.replace else ObjectHeaders(dict(source.headers)),
        BodyDigests(wanted=wanted),
        operation.conditions,
        operation.tags or {},
        operation.acl,
    )


def as_part(operation: UploadPartCopy) -> UploadPart:
    """The part as the upload that it is."""
    return UploadPart(
        operation.bucket, operation.key, operation.upload_id, operation.part_number, BodyDigests()
    )
