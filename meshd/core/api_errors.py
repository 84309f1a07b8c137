"""Errors that clients get: BatchError of the native API, and store and control-store errors as S3 errors.

Law: the code classifies the error, the message states what is wrong, `help` states what to do. An error
never carries an HTTP status or a traceback. It survives serialization between processes. Every store error
that reaches an S3 client passes through `store_errors`; the cause stays chained for the log. An object that
was written back to its origin between lookup and read is looked up again from the start, because nothing
has been sent yet.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from meshd.store import errors
from meshwire.errors import S3Error, precondition_failed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from meshd.control.control_api import ControlError


Code = Literal[
    "BadRequest",
    "InvalidPlan",
    "UnknownOp",
    "AccessDenied",
    "NoSuchBucket",
    "NoSuchSnapshot",
    "NoSuchPlan",
    "NoSuchKey",
    "NoSuchView",
    "NoSuchAsset",
    "Gone",
    "InUse",
    "ViewExists",
    "BucketExists",
    "CredentialsMissing",
    "NoSuchJob",
    "SnapshotChanged",
    "UnknownOpBuild",
    "BadSample",
    "NotOwner",
    "Busy",
    "OpFailed",
    "CorruptData",
    "TooLarge",
    "MethodNotAllowed",
    "NotImplemented",
    "InternalError",
]


class BatchError(Exception):
    """An error of the native API. `detail`: plain JSON values for programs. `retry_after`: seconds, if
    retrying may succeed."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        help: str = "",
        detail: dict[str, Any] | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message, self.help = message, help
        self.detail = detail or {}
        self.retry_after = retry_after

    def __repr__(self) -> str:
        return f"BatchError({self.code}: {self.message})"

    def to_document(self) -> dict[str, Any]:
        """Returns plain JSON values that `from_document` turns back into the error."""
        return {
            "code": self.code,
            "message": self.message,
            "help": self.help,
            "detail": self.detail,
            "retry_after": self.retry_after,
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> BatchError:
        return cls(
            document["code"],
            document["message"],
            help=document["help"],
            detail=document["detail"],
            retry_after=document["retry_after"],
        )


def damaged(name: str, message: str, detail: dict[str, Any], *, final: bool = False) -> BatchError:
    """Returns the error for stored bytes that differ from those written; no other bytes may replace them.
    `final`: no copy is left, so another attempt cannot help."""
    return BatchError(
        "CorruptData",
        f"{name} is damaged on disk: {message}",
        help="put the same bytes again under this key (existing plans keep working, because the ETag stays), "
        "or remove it and create a new snapshot; meshd fsck lists other damage",
        detail=detail | ({"damaged": True} if final else {}),
    )


def busy(message: str) -> BatchError:
    """Returns an error that asks the client to retry in a second."""
    return BatchError("Busy", message, help="retry after the time in Retry-After", retry_after=1)


def in_progress(message: str, progress: float, shards: tuple[int, int] | None = None) -> BatchError:
    """Returns the error for work in progress; `progress` is between 0 and 1; `shards`: how many of how many
    are done. A later retry finds it further along."""
    counted = {} if shards is None else {"shards": {"done": shards[0], "all": shards[1]}}
    return BatchError(
        "Busy",
        message,
        help="retry: the work continues",
        detail={"progress": round(progress, 4), **counted},
        retry_after=1,
    )


_T = TypeVar("_T")
_TRIES: Final = 5
_NOT_CACHED: Final = (
    "The bucket has an origin, and the request needs objects that are not in the cache: read the objects "
    "once, or `mesh prefetch` them."
)


class NotCachedHereError(S3Error):
    """The request needs objects that are at an origin, not in the store."""

    def __init__(self) -> None:
        super().__init__("ServiceUnavailable", _NOT_CACHED)


async def retry_if_written_back(attempt: Callable[[], Awaitable[_T]]) -> _T:
    """Returns the result of `attempt`, which looks up an object and reads it; repeats it a few times if the
    object was written back to its origin in between. Raises what `attempt` raises."""
    for _ in range(_TRIES - 1):
        with suppress(NotCachedHereError):
            return await attempt()
    return await attempt()


log = logging.getLogger("meshd.errors")

_CODES: dict[type[errors.StoreError], str] = {
    errors.ConditionMissingError: "NoSuchKey",
    errors.DiskFullError: "InsufficientStorage",
    errors.DiskFailedError: "InternalError",
    errors.ExhaustedError: "SlowDown",
    errors.NoSuchUploadError: "NoSuchUpload",
    errors.NoSuchVersionError: "NoSuchKey",
    errors.InvalidPartError: "InvalidPart",
    errors.SizeMismatchError: "IncompleteBody",
    errors.MetadataTooLargeError: "MetadataTooLarge",
    errors.ExtentGoneError: "NoSuchKey",
    errors.StoreClosedError: "ServiceUnavailable",
    errors.NotReplicatedError: "SlowDown",
    errors.StaleEpochError: "SlowDown",
    errors.CorruptExtentError: "InternalError",
}

_NOT_REPLICATED = (
    "Not every node that must hold this write could store it, or another node is now the primary of its "
    "name. The write may or may not have taken effect: try again."
)
_NO_CONTROL = (
    "Buckets, settings, users, keys and jobs cannot be changed now: the control store is unreachable or "
    "read-only. The change may or may not have taken effect: try again."
)


def _level_of(error: errors.CorruptExtentError) -> int:
    """Returns the level to log a read of damaged bytes at: quarantine was logged when it began."""
    return logging.DEBUG if isinstance(error, errors.QuarantinedError) else logging.ERROR


def to_s3_error(error: errors.StoreError, name: str = "") -> S3Error:
    """Translates a store error into an S3 error; logs what an operator must look at under its own line.
    `name`: the object's, for an error that does not know it."""
    if isinstance(error, errors.NodeFullError):
        log.warning("write not acknowledged: %s (%s)", error, error.__cause__ or "just now")
        return S3Error("InsufficientStorage", str(error))
    if isinstance(error, errors.CorruptExtentError):
        log.log(_level_of(error), "corrupt extent, not served: %s %s", error.name or name, error)
    elif isinstance(error, errors.DiskFailedError | errors.DiskFullError):
        log.error("disk error: %s", error)
    elif isinstance(error, errors.ExhaustedError):
        log.error("request failed: out of file descriptors or memory: %s", error)
    if isinstance(error, errors.ConditionFailedError):
        return precondition_failed(error.condition)
    if isinstance(error, errors.NotCachedError):
        return NotCachedHereError()
    if isinstance(error, errors.NotReplicatedError | errors.StaleEpochError):
        log.warning("write not acknowledged: %s", error)
        return S3Error(
            "SlowDown", str(error) if isinstance(error, errors.ClocksDifferError) else _NOT_REPLICATED
        )
    if isinstance(error, errors.CorruptExtentError) and (known := error.name or name):
        return S3Error("InternalError", f"{known} is damaged on disk; put the same bytes again.")
    if isinstance(error, errors.IndexFullError):
        return S3Error("InsufficientStorage", error.told)
    return S3Error(_CODES.get(type(error), "InternalError"))


def to_batch_error(error: errors.StoreError) -> BatchError:
    """Translates a store error into an error of the native API."""
    if isinstance(error, errors.IndexMapFullError):
        what = "the node's index has reached its limit"
        help = "set a higher index-map and restart the node, or delete objects"
        return BatchError("Busy", what, help=help, retry_after=60)
    if isinstance(error, errors.IndexFullError):
        what, help = "the file system of the node's index is full", "free space under its --index-dir"
        return BatchError("Busy", what, help=help, retry_after=60)
    if isinstance(error, errors.DiskFullError):
        return BatchError(
            "Busy", "the node's disk is full", help="delete data or enlarge the disk", retry_after=60
        )
    if isinstance(error, errors.CorruptExtentError):
        log.log(_level_of(error), "corrupt extent, not served: %s", error)
        what = error.name or "stored bytes"
        return BatchError(
            "InternalError", f"{what}: damaged on the disk, so it is not served; run meshd fsck"
        )
    return BatchError("InternalError", f"the store failed: {type(error).__name__}")


def control_error_to_s3(error: ControlError) -> S3Error:
    """Translates a change that the control store rejected or did not confirm in time into an S3 error; logs
    the reason."""
    log.warning("the control store did not confirm a change: %s", error)
    return S3Error("ServiceUnavailable", _NO_CONTROL)


class _StoreErrors:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, errors.StoreError):
            raise to_s3_error(error) from error


_store_errors = _StoreErrors()


def store_errors() -> _StoreErrors:
    """Translates store errors raised inside the block into `S3Error`."""
    return _store_errors
