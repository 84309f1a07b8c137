"""BatchError: the error type of the native API, with code, message, help and detail.

Law: the code classifies the error, the message states what is wrong, `help` states what to do. An error
never carries an HTTP status or a traceback. It survives serialization between processes.
"""

from __future__ import annotations

from typing import Any, Literal

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


def damaged(name: str, message: str, detail: dict[str, Any]) -> BatchError:
    """Returns the error for stored bytes that differ from those written; no other bytes may replace them."""
    return BatchError(
        "CorruptData",
        f"{name} is damaged on disk: {message}",
        help="put the same bytes again under this key (existing plans keep working, because the ETag stays), "
        "or remove it and create a new snapshot; meshd fsck lists other damage",
        detail=detail,
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
