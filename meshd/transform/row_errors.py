"""The errors that end one row of a slice, and how a reply describes each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.transform.errors import BadSampleError, OpFailedError
from meshd.transform.source_files import SourceDamagedError, SourceGoneError

if TYPE_CHECKING:
    from meshd.transform.messages import FailureKind

RowError = BadSampleError | SourceDamagedError | SourceGoneError | OpFailedError
ROW_ERRORS: Final = (BadSampleError, SourceDamagedError, SourceGoneError, OpFailedError)


def row_failure(error: RowError) -> tuple[FailureKind, str, str]:
    """Return (kind, op, message) of the failure of a row."""
    if isinstance(error, BadSampleError):
        return "bad", error.op, error.reason
    if isinstance(error, SourceDamagedError):
        return "damaged", "read", str(error)
    if isinstance(error, SourceGoneError):
        return "read", "read", str(error)
    return "op", error.op, str(error)
