"""Errors of transforms.

Law: BadSampleError means that the data is at fault, and `on_bad` applies. Any other error of an op is a
defect of the op (OpFailedError) and stops the job regardless of `on_bad`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.transform.source_files import SourceDamagedError, SourceGoneError
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from meshd.transform.messages import FailureKind


_SHOWN = 300
EMPTY: Final = "the file is empty (0 bytes)"


class TransformError(Exception):
    """Base of the errors that this package raises on purpose, except PlanError."""


class BadSampleError(TransformError):
    """The bytes of a sample are not what the op needs. The chain that ran the op sets `op`."""

    def __init__(self, reason: str, *, op: str = "") -> None:
        super().__init__(reason[:_SHOWN])
        self.reason = reason[:_SHOWN]
        self.op = op


class OutOfMemoryError(TransformError):
    """An op ran out of memory. The process is at fault, unless the same happens in a fresh process."""

    def __init__(self, op: str) -> None:
        super().__init__("the sample needs more memory than a transform process may use (transform-memory)")
        self.op = op


class OpFailedError(TransformError):
    """An op failed on bytes that it should accept or refuse: a programming error. Chains the cause."""

    def __init__(self, op: str, cause: BaseException) -> None:
        super().__init__(f"{op}: {type(cause).__name__}: {str(cause)[:_SHOWN]}")
        self.op = op


class WrongOutputError(TransformError):
    """An op returned a value of another type than it declared when the plan was compiled."""


class MissingLibraryError(TransformError):
    """This node lacks the library of an op. `extra`: the extra of shardmesh that installs it."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(
            f"this node lacks the Python package {library}: install shardmesh[{extra}] on every node"
        )


class UnknownOpError(PlanError):
    """No op has this name; the message suggests one."""


class UnknownBuildError(PlanError):
    """The op exists, but not in the version of the plan, so this node cannot reproduce the plan."""


class PoolClosedError(TransformError):
    """The pool was closed while rows were waiting."""


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
