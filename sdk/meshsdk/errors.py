"""Exceptions of the SDK, all derived from `MeshError`.

Law: every failure of the environment (servers, network, arguments, data) raises a MeshError whose message
says what to do about it.
Invariant: no message contains a credential; text from a server is truncated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

_CAP = 2000
_KEY_CODES = frozenset({"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"})


class MeshError(Exception):
    """Base class of all errors of the SDK."""


class ConfigurationError(MeshError, ValueError):
    """An endpoint, key or argument is missing or invalid."""


class ConnectError(MeshError, ConnectionError):
    """The endpoint could not be reached, or it closed the connection before the response was complete."""


class DeadlineError(MeshError, TimeoutError):
    """All retries failed until the deadline; `__cause__` is the last failure."""


class ClosedError(MeshError):
    """The loader or client was closed, or another iteration was started, while this one was in use."""


class CorruptFrameError(ConnectError):
    """The checksum or layout of a frame is wrong; the frame is discarded and requested again."""


class StateMismatchError(MeshError, ValueError):
    """A loader state belongs to another plan or setup; `field` names what differs."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.field)


class ServerError(MeshError):
    """The server refused a request.

    Attributes `status` and `code` are those of the response, `request_id` identifies the request in the
    node's log, and `detail` holds further facts as a dict.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: str = "",
        request_id: str = "",
        detail: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message[:_CAP])
        self.status = status
        self.code = code
        self.request_id = request_id
        self.detail = dict(detail or {})
        self.retry_after = retry_after

    @property
    def blames_keys(self) -> bool:
        """Whether the keys are the reason (expired, unknown or of another mesh), so that others may work."""
        return self.code in _KEY_CODES

    def saying(self, more: str) -> Self:
        """Return the same error with the sentence `more` appended to the message."""
        message = str(self.args[0])
        end = "" if message.endswith((".", "!", "?")) else "."
        return _rebuild(type(self), f"{message}{end} {more}", self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.__dict__)


class BusyError(ServerError):
    """The server is overloaded (429) or not ready (503); the SDK retries until the deadline."""


class NotFoundError(ServerError):
    """The bucket, key, snapshot or plan does not exist."""


class AccessError(ServerError):
    """The credentials are wrong, or do not permit the request."""


class PreconditionError(ServerError):
    """The object is not the requested version."""


class SnapshotChangedError(ServerError):
    """An object of the snapshot was replaced or deleted; open the dataset again."""


class BadSampleError(ServerError):
    """A sample cannot be prepared and the plan has `on_bad="raise"`, or more than `max_bad` are bad."""


class InvalidPlanError(ServerError):
    """The plan names an unknown op or a missing field, or an argument is invalid."""


class PreflightError(MeshError):
    """A job with this dataset would fail; the message says why and what to do."""


_BY_CODE: dict[str, type[ServerError]] = {
    "SnapshotChanged": SnapshotChangedError,
    "BadSample": BadSampleError,
    "InvalidPlan": InvalidPlanError,
    "UnknownOp": InvalidPlanError,
    "UnknownOpBuild": InvalidPlanError,
    "NoSuchAsset": InvalidPlanError,
    "Gone": NotFoundError,
    "Busy": BusyError,
    "SlowDown": BusyError,
    "PreconditionFailed": PreconditionError,
    "ExpiredToken": AccessError,
    "InvalidToken": AccessError,
}
_BY_STATUS: dict[int, type[ServerError]] = {
    401: AccessError,
    403: AccessError,
    404: NotFoundError,
    412: PreconditionError,
    429: BusyError,
    503: BusyError,
}


_Refusal = TypeVar("_Refusal", bound=ServerError)


def _rebuild(kind: type[_Refusal], message: str, state: dict[str, Any]) -> _Refusal:
    error = kind(message)
    error.__dict__.update(state)
    return error


def server_error(
    status: int,
    code: str,
    message: str,
    *,
    request_id: str = "",
    detail: Mapping[str, Any] | None = None,
    advice: str = "",
    retry_after: float | None = None,
) -> ServerError:
    """Return the error for a refusal by a server, by its code or status; `advice` ends its message."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, ServerError)
    text = f"{message or code or 'the server gave no reason'} [{status} {code}]".replace(" ]", "]")
    advice = advice or _ADVICE.get(code, "")
    if (bucket := (detail or {}).get("bucket")) is not None:
        advice = advice.replace("s3://NAME", f"s3://{bucket}")
    if advice:
        text = f"{text} {advice}"
    return kind(text, status=status, code=code, request_id=request_id, detail=detail, retry_after=retry_after)


def is_clock_skewed(error: MeshError) -> bool:
    """Return whether a node refused a request because its clock and this machine's differ too much."""
    return isinstance(error, ServerError) and error.code == "RequestTimeTooSkewed"


_ADVICE = {
    "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID, or pass access_key= to mesh.connect(). A disabled or "
    "deleted key gives the same error.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY, or pass secret_key= to mesh.connect().",
    "ExpiredToken": "Get new keys (`meshd admin sts`). For a job that outlives its keys, renew them in a "
    "file and name that in MESH_CREDENTIALS_FILE.",
    "InvalidToken": "Check AWS_SESSION_TOKEN: a token is valid only with its own access key and until that "
    "expires.",
    "RequestTimeTooSkewed": "The clocks of this machine and the node are more than 15 minutes apart: compare "
    "`date -u` on both and correct the wrong one (NTP).",
    "NoSuchBucket": "List the buckets with `mesh ls`, or create it with `mesh mb s3://NAME`.",
    "BucketNotEmpty": "Delete its objects first: `mesh rm -r s3://NAME`.",
    "NoSuchKey": "List the existing objects with `mesh ls`.",
    "SnapshotChanged": "Open the dataset again to pin the current objects.",
}
