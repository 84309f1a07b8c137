"""What a kind of view is to the node: a reader, one a kind, and what it finds.

Law: a reader is given the view's parsed document and knows nothing of requests, rights or other kinds. What
it finds is either an object of the store or is made while it is sent; the dispatcher answers both alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from meshd.service.authorization.access import Caller
    from meshd.service.semantics.tearing import Tear
    from meshd.store.proving import Proofs
    from meshd.store.records import Record, Span
    from meshwire.s3.operations import ListObjects
    from meshwire.s3.results import ObjectListing

V_contra = TypeVar("V_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Kept:
    """A view's object whose bytes are those of a stored one, ETag and all. `again`: makes them anew, where
    the stored one cannot be read. Raises BatchError."""

    bucket: str
    key: str
    again: Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Made:
    """A view's object that is put together while it is sent. `record`: size, ETag, time and headers.
    `groups(offset, length)`: those bytes as open files, a group at a time, each valid until the next is asked
    for; what cannot be made raises S3Error or StoreError before the first. `proved`: the same, where spans of
    no extent have bytes of stored objects in them. `mended`: `groups`, told where one cannot be read to its
    end: they go on from there.
    """

    record: Record
    groups: Callable[[int, int], AsyncGenerator[Sequence[Span], None]]
    proved: Callable[[Proofs, int, int], AsyncGenerator[Sequence[Span], None]] | None = None
    mended: Callable[[Tear, int, int], AsyncGenerator[Sequence[Span], None]] | None = None

    def copied(self, proofs: Proofs, offset: int, length: int) -> AsyncGenerator[Sequence[Span], None]:
        """`groups`, for a copy. Raises CorruptExtentError, too."""
        if self.proved is None:
            return self.groups(offset, length)
        return self.proved(proofs, offset, length)


class ViewKind(Protocol[V_contra]):
    """Reads the views of one kind. One a worker."""

    async def find(self, view: V_contra, key: str) -> Kept | Made:
        """The object called `key`. Raises S3Error NoSuchKey, UnprocessableSource, SlowDown."""
        ...

    async def listing(self, view: V_contra, operation: ListObjects) -> ObjectListing:
        """A page, in order of UTF-8 bytes; every size and ETag is what a GET would give."""
        ...


Maker = Callable[["Caller", Any], Awaitable[Any]]
"""Completes a parsed view before it is kept: op builds, plans. Raises PlanError, BatchError, op errors."""
