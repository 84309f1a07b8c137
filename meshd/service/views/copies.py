"""What a view puts together, written out as an ordinary object.

Law: the same bytes as a GET gives, hashed on the way like any upload's; stored only if every member was still
the one that was laid out.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from typing import TYPE_CHECKING

from meshwire.checksums import BodyVerifier
from meshwire.s3.errors import S3Error
from meshwire.s3.operations import BodyDigests, ObjectHeaders, PutObject

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from meshd.service.views.kinds import Made
    from meshd.store.records import Record, Span
    from meshwire.checksums import BodyDigest
    from meshwire.s3.operations import CopyObject


class MadeBody:
    """`meshd.service.bodies.Body` over the groups of an object that is made."""

    def __init__(self, made: Made) -> None:
        self._size = made.record.size
        self._groups = made.groups(0, self._size)
        self._digest: BodyDigest | None = None

    def __repr__(self) -> str:
        return f"<MadeBody of {self._size} bytes>"

    @property
    def size(self) -> int | None:
        return self._size

    async def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        verifier = BodyVerifier(digests, extra=also)
        async with aclosing(self._groups) as groups:
            async for spans in groups:
                data = await asyncio.to_thread(_read, spans)
                await asyncio.to_thread(verifier.update, data)
                yield data
        self._digest = verifier.finish()

    def digest(self) -> BodyDigest:
        if self._digest is None or self._digest.size != self._size:
            raise S3Error("IncompleteBody")
        return self._digest

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        if self._size > limit:
            raise S3Error("MaxMessageLengthExceeded")
        return b"".join([piece async for piece in self.pieces(digests)])


def _read(spans: Sequence[Span]) -> bytes:
    return b"".join([os.pread(span.fd, span.length, span.offset) for span in spans])


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
