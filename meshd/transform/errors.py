"""Errors of transforms.

Law: BadSampleError means that the data is at fault, and `on_bad` applies. Any other error of an op is a
defect of the op (OpFailedError) and stops the job regardless of `on_bad`.
"""

from __future__ import annotations

from meshwire.strict_json import PlanError

_SHOWN = 300


class TransformError(Exception):
    """Base of what this package raises on purpose, besides PlanError."""


class BadSampleError(TransformError):
    """The bytes of a sample cannot be what the op needs. `op`: set by the chain that ran it."""

    def __init__(self, reason: str, *, op: str = "") -> None:
        super().__init__(reason[:_SHOWN])
        self.reason = reason[:_SHOWN]
        self.op = op


class OutOfMemoryError(TransformError):
    """An op got no more memory: the process' fault, unless it is so in a fresh one, too."""

    def __init__(self, op: str) -> None:
        super().__init__("the sample needs more memory than a transform process may take (transform-memory)")
        self.op = op


class OpFailedError(TransformError):
    """An op broke on bytes it should have taken or refused: a programming error. Chains the cause."""

    def __init__(self, op: str, cause: BaseException) -> None:
        super().__init__(f"{op}: {type(cause).__name__}: {str(cause)[:_SHOWN]}")
        self.op = op


class WrongOutputError(TransformError):
    """An op made something else than it promised when the plan was compiled."""


class UnknownOpError(PlanError):
    """No op has this name; the message suggests one."""


class UnknownBuildError(PlanError):
    """The op exists, but not in the version the plan was made with: this node cannot reproduce the plan."""


class PoolClosedError(TransformError):
    """The pool was closed while rows were waiting."""
