"""The Origin interface: object facts, responses, listings, and the errors that an origin raises.

Keys are the keys of the bucket; the prefix at the origin is internal. An implementation caches and shares
nothing. An error message names the origin, never a credential; foreign text is truncated.
"""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  msgspec reads the annotations
from typing import TYPE_CHECKING, Protocol

import msgspec

from meshd.errors import MeshdError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Sequence


class OriginError(MeshdError):
    """Base of the errors that an origin raises deliberately."""


class OriginMissingError(OriginError):
    """The object does not exist at the origin."""


class OriginChangedError(OriginError):
    """The object is no longer the requested version."""


class OriginRangeError(OriginError):
    """The range begins after the object's end."""


class OriginRefusedError(OriginError):
    """The origin refuses these credentials, or they are unusable."""


class OriginCredentialsError(OriginRefusedError):
    """This node does not have the credentials, or not yet."""


class OriginDownError(OriginError):
    """The origin cannot be reached, or returns errors; cached data is served."""


class OriginPieceError(OriginDownError):
    """The origin answered, but a disk of this node cannot write or read the data: the request can be
    retried."""


class OriginKeyError(OriginError):
    """The key cannot be requested from an origin."""


class ObjectFacts(msgspec.Struct, frozen=True):
    """An object at its origin. `etag` is without quotes; `modified` is in ms since the epoch; `headers` have
    S3's lower-case names."""

    size: int
    etag: str
    modified: int
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    metadata: Mapping[str, str] = msgspec.field(default_factory=dict)


class OriginResponse(msgspec.Struct, frozen=True):
    """`length` bytes of an object from `offset` on, as a stream."""

    facts: ObjectFacts
    offset: int
    length: int
    pieces: AsyncGenerator[bytes, None]


class OriginEntry(msgspec.Struct, frozen=True):
    """An object in a listing."""

    key: str
    size: int
    etag: str
    modified: int

    def facts(self) -> ObjectFacts:
        """Return the facts that the listing contains."""
        return ObjectFacts(self.size, self.etag, self.modified)


class OriginListing(msgspec.Struct, frozen=True):
    """One page in order of UTF-8 bytes. `after`: where the next page begins; "" on the last page."""

    entries: tuple[OriginEntry, ...] = ()
    prefixes: tuple[str, ...] = ()
    after: str = ""


def list_page(
    every: Sequence[OriginEntry | str], prefix: str, delimiter: str, after: str, limit: int
) -> OriginListing:
    """Cut one page from all entries, which come in any order; strings are common prefixes."""
    found: dict[bytes, OriginEntry | str] = {}
    for each in every:
        key = each if isinstance(each, str) else each.key
        if not key.startswith(prefix):
            continue
        at = key.find(delimiter, len(prefix)) if delimiter else -1
        shown: OriginEntry | str = key[: at + len(delimiter)] if at >= 0 else each
        name = shown if isinstance(shown, str) else key
        if name > after:
            found[name.encode()] = shown
    names = sorted(found)
    page = [found[name] for name in names[:limit]]
    return OriginListing(
        tuple(each for each in page if isinstance(each, OriginEntry)),
        tuple(each for each in page if isinstance(each, str)),
        names[limit - 1].decode() if len(names) > limit else "",
    )


class Origin(Protocol):
    """One origin. Every method raises OriginRefusedError, OriginDownError and OriginKeyError."""

    async def get(self, key: str, offset: int, length: int, *, etag: str = "") -> OriginResponse:
        """Return up to `length` bytes from `offset`, of version `etag` only if given. Raises
        OriginMissingError, OriginChangedError, OriginRangeError."""
        ...

    async def head(self, key: str) -> ObjectFacts:
        """Return the object's facts. Raises OriginMissingError."""
        ...

    async def list(self, prefix: str, delimiter: str, after: str, limit: int) -> OriginListing:
        """Return a page of keys and common prefixes after `after`."""
        ...

    async def list_all(self, prefix: str) -> Sequence[OriginEntry]:
        """Return all keys below a prefix, in order of UTF-8 bytes."""
        ...

    async def put(self, key: str, body: AsyncIterable[bytes], facts: ObjectFacts) -> str:
        """Store an object and return its ETag. It may be stored even if this raises OriginDownError."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete these keys; missing ones are ignored."""
        ...
