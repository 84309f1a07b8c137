"""Copies of assembled objects: turns a copy of a view object or archive member into an upload.

Law: a copy has the bytes of a GET and is hashed like any upload. It is stored only if every member is
still the version in the layout and its extents pass verification.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from meshd.core.read_source import split_spans
from meshd.objects.copy_object import check_copy_source, check_source_conditions, copy_part_range
from meshd.store.integrity.verification import StreamVerifier, VerifiedExtents, read_spans
from meshwire.checksums.body_checksums import BodyDigests, BodyVerifier
from meshwire.errors import S3Error
from meshwire.s3.operations import ObjectHeaders, PutObject, UploadPart

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from meshd.store.records import Record, Span
    from meshd.views.view_kind import AssembledObject
    from meshwire.checksums.body_checksums import BodyDigest
    from meshwire.s3.operations import CopyObject, UploadPartCopy

_PIECE: Final = 1 << 20


class CopyBody(ABC):
    """A `meshd.core.object_io.Body` of `size` bytes that the nodes read themselves, for a copy."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._digest: BodyDigest | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._size} bytes>"

    @property
    def size(self) -> int | None:
        return self._size

    @abstractmethod
    def read_verified(self, verifier: BodyVerifier) -> AsyncGenerator[bytes, None]:
        """Yield the bytes, each piece when the verifier has seen it."""

    async def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        verifier = BodyVerifier(digests, extra=also)
        async with aclosing(self.read_verified(verifier)) as pieces:
            async for piece in pieces:
                yield piece
        self._digest = verifier.finish()

    def digest(self) -> BodyDigest:
        if self._digest is None or self._digest.size != self._size:
            raise S3Error("IncompleteBody")
        return self._digest

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        if self._size > limit:
            raise S3Error("MaxMessageLengthExceeded")
        return b"".join([piece async for piece in self.pieces(digests)])


class AssembledBody(CopyBody):
    """The groups of an assembled object, or of a range of one."""

    def __init__(self, made: AssembledObject, offset: int = 0, length: int | None = None) -> None:
        super().__init__(made.record.size - offset if length is None else length)
        self._proofs = VerifiedExtents()
        self._groups = made.groups_for_copy(self._proofs, offset, self._size)

    async def read_verified(self, verifier: BodyVerifier) -> AsyncGenerator[bytes, None]:
        passing = StreamVerifier()
        async with aclosing(self._groups) as groups:
            async for spans in groups:
                await self._proofs.require_verified(spans)
                for few in split_spans(spans, _PIECE):
                    yield await asyncio.to_thread(_read, few, verifier, passing)


def _read(spans: Sequence[Span], verifier: BodyVerifier, passing: StreamVerifier) -> bytes:
    data, _ = read_spans(spans, passing)
    verifier.update(data)
    return data


def copy_as_put(operation: CopyObject, source: Record) -> PutObject:
    """Return the upload that a copy amounts to."""
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


def copy_as_upload_part(operation: UploadPartCopy) -> UploadPart:
    """Return the part upload that a part copy amounts to."""
    return UploadPart(
        operation.bucket, operation.key, operation.upload_id, operation.part_number, BodyDigests()
    )


def assembled_upload(operation: CopyObject, source: AssembledObject) -> tuple[PutObject, AssembledBody]:
    """Return a copy of an assembled object as an upload. Raises S3Error."""
    check_copy_source(source.record, operation, versioned=False)
    return copy_as_put(operation, source.record), AssembledBody(source)


def assembled_part(operation: UploadPartCopy, source: AssembledObject) -> tuple[UploadPart, AssembledBody]:
    """Return a part copy of an assembled object, or of a range of one, as a part upload. Raises S3Error."""
    check_source_conditions(operation.source_conditions, source.record)
    span = copy_part_range(operation.range, source.record.size)
    return copy_as_upload_part(operation), AssembledBody(source, *span)
