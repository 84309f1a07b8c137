"""The Origin interface: object facts, responses, listings, and the errors that an origin raises.

Law: keys are the keys of the bucket; the prefix at the origin is internal. An implementation caches and
shares nothing. An error message names the origin, never a credential; foreign text is truncated.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  msgspec reads the annotations
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from meshd.errors import MeshdError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Sequence


class OriginError(MeshdError):
    """Base of what an origin raises on purpose."""


class OriginMissingError(OriginError):
    """The origin has no such object."""


class OriginChangedError(OriginError):
    """The object is not the version that was asked for any more."""


class OriginRangeError(OriginError):
    """The range begins behind the object's end."""


class OriginRefusedError(OriginError):
    """The origin does not let these credentials do that, or they cannot be used."""


class OriginDownError(OriginError):
    """The origin cannot be reached, or answers errors; what is cached is served."""


class OriginPieceError(OriginDownError):
    """The origin has answered, and a disk here cannot take, or give, what came: it is to be asked again."""


class OriginKeyError(OriginError):
    """A key that origins cannot be asked for."""


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object at its origin. `etag` without quotes; `modified` in ms since the epoch; `headers` by S3's
    lower-case names."""

    size: int
    etag: str
    modified: int
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OriginResponse:
    """Bytes of an object from `offset` on, as they come; `length` of them."""

    facts: ObjectFacts
    offset: int
    length: int
    pieces: AsyncGenerator[bytes, None]


@dataclass(frozen=True, slots=True)
class OriginEntry:
    """An object in a listing."""

    key: str
    size: int
    etag: str
    modified: int

    def facts(self) -> ObjectFacts:
        """What is known of it without asking."""
        return ObjectFacts(self.size, self.etag, self.modified)


@dataclass(frozen=True, slots=True)
class OriginListing:
    """One page in order of UTF-8 bytes; `after`: where the next begins, "" at the end."""

    entries: tuple[OriginEntry, ...] = ()
    prefixes: tuple[str, ...] = ()
    after: str = ""


class Origin(Protocol):
    """One place. Every method raises OriginRefusedError, OriginDownError and OriginKeyError."""

    async def get(self, key: str, offset: int, length: int, *, etag: str = "") -> OriginResponse:
        """Up to `length` bytes from `offset`; of version `etag` only, if given. Raises OriginMissingError,
        OriginChangedError, OriginRangeError."""
        ...

    async def head(self, key: str) -> ObjectFacts:
        """What there is. Raises OriginMissingError."""
        ...

    async def list(self, prefix: str, delimiter: str, after: str, limit: int) -> OriginListing:
        """A page of keys and common prefixes after `after`."""
        ...

    async def put(self, key: str, body: AsyncIterable[bytes], facts: ObjectFacts) -> str:
        """Store an object; its ETag there. Where it raises OriginDownError it may be there all the same."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove these; missing ones are fine."""
        ...
