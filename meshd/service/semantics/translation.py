"""The border between the store's errors and S3's words.

Law: every error of the store that reaches a client passes here; the cause stays chained for the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from meshd.service.semantics.refinding import NotCachedHereError
from meshd.store import errors
from meshwire.s3.errors import S3Error, precondition_failed

if TYPE_CHECKING:
    from meshd.control.interface import ControlError

log = logging.getLogger("meshd.service.translation")

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
    "Not every node that must have this write could take it, or another one decides about its name now. "
    "It may or may not have taken place: try again."
)
_NO_CONTROL = (
    "Buckets, settings, users, keys and jobs cannot be changed now: the control store cannot be reached, "
    "or takes no changes. It may or may not have taken place: try again."
)


def translate(error: errors.StoreError) -> S3Error:
    """S3's word for an error of the store; what an operator must look at is logged under its own line."""
    if isinstance(error, errors.CorruptExtentError):
        log.error("corrupt extent, not served: %s %s", error.name, error)
    elif isinstance(error, errors.DiskFailedError | errors.DiskFullError):
        log.error("disk trouble: %s", error)
    elif isinstance(error, errors.ExhaustedError):
        log.error("not done for want of descriptors or memory: %s", error)
    if isinstance(error, errors.ConditionFailedError):
        return precondition_failed(error.condition)
    if isinstance(error, errors.NotCachedError):
        return NotCachedHereError()
    if isinstance(error, errors.NotReplicatedError | errors.StaleEpochError):
        log.warning("not acknowledged: %s", error)
        return S3Error("SlowDown", _NOT_REPLICATED)
    if isinstance(error, errors.CorruptExtentError) and error.name:
        return S3Error("InternalError", f"{error.name} is damaged on the disk; put the same bytes again.")
    return S3Error(_CODES.get(type(error), "InternalError"))


def translate_control(error: ControlError) -> S3Error:
    """S3's word for a change that the control store did not take, or not in time; why is logged."""
    log.warning("the control store did not do what was asked: %s", error)
    return S3Error("ServiceUnavailable", _NO_CONTROL)


class _StoreErrors:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, errors.StoreError):
            raise translate(error) from error


_store_errors = _StoreErrors()


def store_errors() -> _StoreErrors:
    """Within it, an error of the store leaves as an `S3Error`."""
    return _store_errors
