"""What goes wrong while a view's object is made, in S3's words.

Law: a bad source is never retried by a client, a busy node always; the message names the object and the op.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshd.assembly.errors import BatchError
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Iterator

_REFUSED = frozenset({"BadSample", "TooLarge", "OpFailed", "InvalidPlan"})
_GONE = frozenset({"UnknownOpBuild", "UnknownOp", "NoSuchAsset", "NoSuchPlan", "NoSuchSnapshot"})


def refusal(error: BatchError) -> S3Error:
    """Of an object that is made of sources as they are now: asked again, it is made of what is there then."""
    if error.code == "SnapshotChanged":
        return _later(error)
    return pinned_refusal(error)


def pinned_refusal(error: BatchError) -> S3Error:
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
def unreachable() -> Iterator[None]:
    """What other nodes refuse or do not answer, in S3's words."""
    try:
        yield
    except BatchError as error:
        raise refusal(error) from error


def _later(error: BatchError) -> S3Error:
    return S3Error("SlowDown", error.message, headers={"retry-after": str(error.retry_after or 1)})
