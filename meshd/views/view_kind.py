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
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from meshd.core.api_errors import BatchError
from meshd.core.read_source import FailoverRead
from meshd.telemetry import metrics
from meshd.telemetry.metric_registry import bounded_label
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from meshd.auth.identity import Caller
    from meshd.core.read_source import ReadSource
    from meshd.peer_reads.load_window import LoadWindow
    from meshd.store.integrity.verification import VerifiedExtents
    from meshd.store.records import Record, Span
    from meshwire.s3.operations import ListObjects
    from meshwire.s3.result_types import ObjectListing


V_contra = TypeVar("V_contra", contravariant=True)


class StoredResult(msgspec.Struct, frozen=True):
    """An object of a view whose bytes and ETag are those of a stored object.

    `rebuild`: computes the bytes again if the stored object cannot be read. Raises BatchError.
    """

    bucket: str
    key: str
    rebuild: Callable[[], Awaitable[bytes]]


class AssembledObject(msgspec.Struct, frozen=True):
    """A view's object that is put together while it is sent. `record`: size, ETag, time and headers.
    `sources`: the ways to its bytes, in order of preference; what cannot be made raises S3Error or StoreError
    before the first group. `verified_sources`: those of a copy, where spans of no extent have bytes of stored
    objects in them. `add_places`: adds what stored bytes it takes to send `length` bytes from `offset` to a
    window; None where frames are rendered, which are read ahead on their own.
    """

    record: Record
    sources: Sequence[ReadSource]
    verified_sources: Callable[[VerifiedExtents], Sequence[ReadSource]] | None = None
    add_places: Callable[[LoadWindow, int, int], Awaitable[None]] | None = None

    def open_range(self, offset: int, length: int, name: str = "") -> FailoverRead:
        """Returns a read of these bytes; see `FailoverRead` for `name`."""
        return FailoverRead(self.sources, offset, length, name)

    def groups_for_copy(
        self, proofs: VerifiedExtents, offset: int, length: int
    ) -> AsyncGenerator[Sequence[Span], None]:
        """Yields these bytes for a copy. Raises CorruptExtentError, too."""
        sources = self.sources if self.verified_sources is None else self.verified_sources(proofs)
        return FailoverRead(sources, offset, length).groups()


class ViewKind(Protocol[V_contra]):
    """Reads the views of one kind, for a worker."""

    async def find_object(self, view: V_contra, key: str) -> StoredResult | AssembledObject:
        """Return the object with a key. Raises S3Error NoSuchKey, UnprocessableSource, SlowDown."""
        ...

    async def list_page(self, view: V_contra, operation: ListObjects) -> ObjectListing:
        """Return a page in the order of UTF-8 bytes; every size and ETag is that of a GET."""
        ...


ViewCompleter = Callable[["Caller", Any], Awaitable[Any]]
"""Completes a parsed view before it is stored: op builds, plans. Raises PlanError, BatchError, op errors."""


_REFUSED = frozenset({"BadSample", "TooLarge", "OpFailed", "InvalidPlan"})
_GONE = frozenset({"UnknownOpBuild", "UnknownOp", "NoSuchAsset", "NoSuchPlan", "NoSuchSnapshot"})


def to_s3_error(error: BatchError) -> S3Error:
    """Translate an error for an object made of current sources: a retry uses the sources as they are then."""
    if error.code == "SnapshotChanged":
        return _later(error)
    return pinned_to_s3_error(error)


def pinned_to_s3_error(error: BatchError) -> S3Error:
    """Translate an error for an object made of pinned sources: a retry does not bring a replaced one back."""
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
    """Translate errors of other nodes, or their absence, into S3 errors."""
    try:
        yield
    except BatchError as error:
        raise to_s3_error(error) from error


def _later(error: BatchError) -> S3Error:
    return S3Error("SlowDown", error.message, headers={"retry-after": str(error.retry_after or 1)})


_current_view: Final = ContextVar("view", default="")  # labels metrics; nothing else reads it


def set_current_view(name: str) -> None:
    """Count the results of this context for this view from now on."""
    _current_view.set(name)


def count_result(*, kept: bool) -> None:
    """Count a requested result.

    Both counters exist from the first result on, so that a view without hits has a hit ratio, too.
    """
    label = bounded_label("view", _current_view.get())
    metrics.view_results.labels("hit", label).inc(kept)
    metrics.view_results.labels("miss", label).inc(not kept)
