"""What a service asks of a request's body.

Law: the bytes come in order and only once; nothing may be committed before `digest` was asked for, because
that is where a wrong length, checksum or signature shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from meshwire.checksums import BodyDigest, BodyDigests

MAX_PUT_BYTES: Final = 5 << 30
"""Of a single PUT or part, and of the source of a copy."""


class Body(Protocol):
    """The bytes a client sends, without their transfer coding."""

    @property
    def size(self) -> int | None:
        """Length in bytes as declared, None when the client did not say."""

    def pieces(self, digests: BodyDigests, also: tuple[str, ...] = ()) -> AsyncGenerator[bytes, None]:
        """The body in pieces of bounded size, checked against `digests` on the way; `also` names checksums to
        compute besides. A piece is valid until the next is asked for."""

    def digest(self) -> BodyDigest:
        """The digests of the whole, once `pieces` is exhausted. Raises S3Error when anything did not
        match."""

    async def whole(self, digests: BodyDigests, limit: int) -> bytes:
        """All of a small body, checked. Raises S3Error MaxMessageLengthExceeded above `limit` bytes."""


def check_size(size: int | None) -> None:
    """Raise S3Error EntityTooLarge above what S3 takes in one request."""
    if size is not None and size > MAX_PUT_BYTES:
        raise S3Error(
            "EntityTooLarge", extra={"ProposedSize": str(size), "MaxSizeAllowed": str(MAX_PUT_BYTES)}
        )
