"""The border between the store's errors and S3's words.

Law: every error of the store that reaches a client passes here; the cause stays chained for the log.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from meshd.store import errors
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_CODES: dict[type[errors.StoreError], str] = {
    errors.ConditionFailedError: "PreconditionFailed",
    errors.ConditionMissingError: "NoSuchKey",
    errors.DiskFullError: "InsufficientStorage",
    errors.DiskFailedError: "InternalError",
    errors.NoSuchUploadError: "NoSuchUpload",
    errors.NoSuchVersionError: "NoSuchKey",
    errors.InvalidPartError: "InvalidPart",
    errors.SizeMismatchError: "IncompleteBody",
    errors.MetadataTooLargeError: "MetadataTooLarge",
    errors.ExtentGoneError: "NoSuchKey",
    errors.StoreClosedError: "ServiceUnavailable",
    errors.CorruptExtentError: "InternalError",
}


def translate(error: errors.StoreError) -> S3Error:
    """S3's word for an error of the store; what an operator must look at is logged under its own line."""
    if isinstance(error, errors.CorruptExtentError):
        log.error("corrupt extent, not served: %s", error)
    elif isinstance(error, errors.DiskFailedError | errors.DiskFullError):
        log.error("disk trouble: %s", error)
    return S3Error(_CODES.get(type(error), "InternalError"))


@contextmanager
def store_errors() -> Iterator[None]:
    """Within it, an error of the store leaves as an `S3Error`."""
    try:
        yield
    except errors.StoreError as error:
        raise translate(error) from error
