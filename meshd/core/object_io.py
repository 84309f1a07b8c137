"""Object I/O types: request bodies and lookup results.

A body yields its bytes once and in order. Nothing may be committed before `digest` returns, because it
raises on a wrong length, checksum or signature.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from meshd.store.records import Record
    from meshwire.checksums.body_checksums import BodyDigest, BodyDigests
    from meshwire.s3.result_types import ObjectHead


MAX_PUT_BYTES: Final = 5 << 30
"""Largest size of a single PUT or part, and of the source of a copy."""


class Body(Protocol):
    """The bytes that a client sends, without their transfer coding."""

    @property
    def size(self) -> int | None:
        """The declared length in bytes; None if the client did not declare one."""

    def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        """Yields the body in pieces of bounded size, checked against `digests` on the way; `also` names
        additional checksums to compute. A piece is valid until the next one is requested."""

    def digest(self) -> BodyDigest:
        """Returns the digests of the whole body once `pieces` is exhausted. Raises S3Error if anything did
        not match."""

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        """Returns all of a small body, checked. Raises S3Error MaxMessageLengthExceeded above `limit`
        bytes."""


def check_put_size(size: int | None) -> None:
    """Raises S3Error EntityTooLarge above the size that S3 accepts in one request."""
    if size is not None and size > MAX_PUT_BYTES:
        raise S3Error(
            "EntityTooLarge", extra={"ProposedSize": str(size), "MaxSizeAllowed": str(MAX_PUT_BYTES)}
        )


NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
StoredCallback = Callable[[str, str, "Record"], Awaitable[None] | None]
"""Called with bucket, key and record of every object that was stored; returns what is to be awaited, if
anything is."""


class LookupResult(NamedTuple):
    """What to send of an object: `length` bytes from `offset`; `partial` if a range or part was requested.
    `base`: where the object begins in the record, if it is a member of an archive."""

    record: Record
    head: ObjectHead
    offset: int
    length: int
    partial: bool
    base: int = 0
