"""What an origin is to the rest of the daemon; `remote` speaks to real ones.

Law: keys are the bucket's; the origin's prefix is its own business. Nothing is kept, nothing is shared.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  msgspec reads the annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Sequence


@dataclass(frozen=True, slots=True)
class Facts:
    """An object at its origin. `etag` without quotes; `modified` in ms since the epoch; `headers` by S3's
    lower-case names."""

    size: int
    etag: str
    modified: int
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """Bytes of an object from `offset` on, as they come; `length` of them."""

    facts: Facts
    offset: int
    length: int
    pieces: AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a listing."""

    key: str
    size: int
    etag: str
    modified: int

    def facts(self) -> Facts:
        """What is known of it without asking."""
        return Facts(self.size, self.etag, self.modified)


@dataclass(frozen=True, slots=True)
class Listing:
    """One page in order of UTF-8 bytes; `after`: where the next begins, "" at the end."""

    entries: tuple[Entry, ...] = ()
    prefixes: tuple[str, ...] = ()
    after: str = ""


class Origin(Protocol):
    """One place. Every method raises OriginRefusedError, OriginDownError and OriginKeyError."""

    async def get(self, key: str, offset: int, length: int, *, etag: str = "") -> Reply:
        """Up to `length` bytes from `offset`; of version `etag` only, if given. Raises OriginMissingError,
        OriginChangedError, OriginRangeError."""
        ...

    async def head(self, key: str) -> Facts:
        """What there is. Raises OriginMissingError."""
        ...

    async def list(self, prefix: str, delimiter: str, after: str, limit: int) -> Listing:
        """A page of keys and common prefixes after `after`."""
        ...

    async def put(self, key: str, body: AsyncIterable[bytes], facts: Facts) -> str:
        """Store an object; its ETag there. Where it raises OriginDownError it may be there all the same."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove these; missing ones are fine."""
        ...
