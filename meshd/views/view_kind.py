"""The interface of a view kind: what its reader finds, which S3 errors it raises, and hit counters.

Law: a reader receives the parsed view document and knows nothing of requests, rights or other kinds. It
returns a stored result or an object that is assembled while it is sent. A bad source is never retried
by clients, a busy node always is; the error names the object and the op. The dispatcher sets the name
of the current view for the hit counters before it calls a reader.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from meshd.core.api_errors import BatchError
from meshd.telemetry import metrics
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.auth.authorizer import Caller
    from meshd.core.object_io import TruncationReport
    from meshd.store.integrity.verification import VerifiedExtents
    from meshd.store.records import Record, Span
    from meshwire.s3.operations import ListObjects
    from meshwire.s3.results import ObjectListing


V_contra = TypeVar("V_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A view's object whose bytes are those of a stored one, ETag and all. `again`: makes them anew, where
    the stored one cannot be read. Raises BatchError."""

    bucket: str
    key: str
    rebuild: Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class AssembledObject:
    """A view's object that is put together while it is sent. `record`: size, ETag, time and headers.
    `groups(offset, length)`: those bytes as open files, a group at a time, each valid until the next is asked
    for; what cannot be made raises S3Error or StoreError before the first. `proved`: the same, where spans of
    no extent have bytes of stored objects in them. `mended`: `groups`, told where one cannot be read to its
    end: they go on from there.
    """

    record: Record
    groups: Callable[[int, int], AsyncGenerator[Sequence[Span], None]]
    verified_groups: Callable[[VerifiedExtents, int, int], AsyncGenerator[Sequence[Span], None]] | None = None
    resumable_groups: Callable[[TruncationReport, int, int], AsyncGenerator[Sequence[Span], None]] | None = (
        None
    )

    def groups_for_copy(
        self, proofs: VerifiedExtents, offset: int, length: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        """`groups`, for a copy. Raises CorruptExtentError, too."""
        if self.verified_groups is None:
            return self.groups(offset, length)
        return self.verified_groups(proofs, offset, length)


class ViewKind(Protocol[V_contra]):
    """Reads the views of one kind. One a worker."""

    async def find_object(self, view: V_contra, key: str) -> StoredResult | AssembledObject:
        """The object called `key`. Raises S3Error NoSuchKey, UnprocessableSource, SlowDown."""
        ...

    async def list_page(self, view: V_contra, operation: ListObjects) -> ObjectListing:
        """A page, in order of UTF-8 bytes; every size and ETag is what a GET would give."""
        ...


ViewCompleter = Callable[["Caller", Any], Awaitable[Any]]
"""Completes a parsed view before it is kept: op builds, plans. Raises PlanError, BatchError, op errors."""


_REFUSED = frozenset({"BadSample", "TooLarge", "OpFailed", "InvalidPlan"})
_GONE = frozenset({"UnknownOpBuild", "UnknownOp", "NoSuchAsset", "NoSuchPlan", "NoSuchSnapshot"})


def to_s3_error(error: BatchError) -> S3Error:
    """Of an object that is made of sources as they are now: asked again, it is made of what is there then."""
    if error.code == "SnapshotChanged":
        return _later(error)
    return pinned_to_s3_error(error)


def pinned_to_s3_error(error: BatchError) -> S3Error:
    """Of an object that is made of pinned sources: what was replaced does not come back by asking again."""
    if error.code in _REFUSED:
        return S3Error("UnprocessableSource", error.message)
    if error.code == "NoSuchKey":
        return S3Error("NoSuchKey")
    if error.code == "Busy":
        return _later(error)
    if error.code == "SnapshotChanged":
        return S3Error("SourceChanged", error.message)
    if error.code in _GONE:
        return S3Error("ViewOutdated", error.message)
    return S3Error("InternalError", error.message)


@contextmanager
def translate_peer_errors() -> Iterator[None]:
    """What other nodes refuse or do not answer, in S3's words."""
    try:
        yield
    except BatchError as error:
        raise to_s3_error(error) from error


def _later(error: BatchError) -> S3Error:
    return S3Error("SlowDown", error.message, headers={"retry-after": str(error.retry_after or 1)})


_current_view: Final = ContextVar("view", default="")


def set_current_view(name: str) -> None:
    """From here on results are of this view."""
    _current_view.set(name)


def count_result(*, kept: bool) -> None:
    """A result was asked for. Both are told from the first one on: a view without hits has a ratio, too."""
    label = metrics.view_label(_current_view.get())
    metrics.view_results.labels("hit", label).inc(kept)
    metrics.view_results.labels("miss", label).inc(not kept)
