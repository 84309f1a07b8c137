"""Exceptions of the SDK, one family under `MeshError`.

Law: everything the SDK raises about the outside world is a MeshError whose message says what to do about
it.
Invariant: no message contains a credential; text from a server is capped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

_CAP = 2000
_KEY_CODES = frozenset({"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"})


class MeshError(Exception):
    """Base of the family."""


class ConfigurationError(MeshError, ValueError):
    """An endpoint, key or argument is missing or makes no sense."""


class ConnectError(MeshError, ConnectionError):
    """The endpoint could not be reached, or hung up before the answer was complete."""


class DeadlineError(MeshError, TimeoutError):
    """Retries went on until the deadline; the cause is the last failure."""


class ClosedError(MeshError):
    """The loader or client was closed, or another pass was begun, while this one was still in use."""


class CorruptFrameError(ConnectError):
    """A frame's checksum or layout is wrong: it is dropped and asked for again."""


class StateMismatchError(MeshError, ValueError):
    """A loader state belongs to something else; `field` names what differs."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.field)


class ServerError(MeshError):
    """The server refused. `status` and `code` are its own; `detail` what it said beyond the message."""

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
        """Whether other keys would be answered: these are over, unknown or not of this node."""
        return self.code in _KEY_CODES

    def saying(self, more: str) -> Self:
        """The same with a longer message."""
        return _rebuild(type(self), f"{self.args[0]} {more}", self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args[0], self.__dict__)


class BusyError(ServerError):
    """429 or 503: the server asks for patience. Retried until the deadline."""


class NotFoundError(ServerError):
    """No such bucket, key, snapshot or plan."""


class AccessError(ServerError):
    """The credentials are wrong or do not permit this."""


class PreconditionError(ServerError):
    """The object is not the version asked for."""


class SnapshotChangedError(ServerError):
    """An object of the snapshot was replaced or deleted: open the dataset again."""


class BadSampleError(ServerError):
    """A sample could not be prepared and the plan says `on_bad="raise"`, or more than `max_bad` are bad."""


class InvalidPlanError(ServerError):
    """The plan names an unknown op, a missing field or an impossible argument."""


class PreflightError(MeshError):
    """A job with this dataset cannot work; the message says why and what to do."""


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
    """The error of the family that fits a server's answer; `advice` is appended to its message."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, ServerError)
    text = f"{message or code or 'the server gave no reason'} [{status} {code}]".replace(" ]", "]")
    advice = advice or _ADVICE.get(code, "")
    if advice:
        text = f"{text} {advice}"
    return kind(text, status=status, code=code, request_id=request_id, detail=detail, retry_after=retry_after)


_ADVICE = {
    "InvalidAccessKeyId": "Check AWS_ACCESS_KEY_ID, or pass access_key= to mesh.connect(); a key that was "
    "disabled or removed is refused in these words, too.",
    "SignatureDoesNotMatch": "Check AWS_SECRET_ACCESS_KEY, or pass secret_key= to mesh.connect().",
    "ExpiredToken": "Get new keys (`meshd admin sts`); for a job that outlives them, have them in a file "
    "that is renewed, and name it in MESH_CREDENTIALS_FILE.",
    "InvalidToken": "Check AWS_SESSION_TOKEN: it belongs to one access key, and lasts as long as that one.",
    "RequestTimeTooSkewed": "The clocks of this machine and of the node are more than 15 minutes apart: set "
    "the one whose `date -u` is wrong (NTP).",
    "NoSuchBucket": "List the buckets with `mesh ls`, or make it with `mesh mb s3://NAME`.",
    "BucketNotEmpty": "Delete what is in it first: `mesh rm -r s3://NAME`.",
    "NoSuchKey": "List what is there with `mesh ls`.",
    "SnapshotChanged": "Open the dataset again to pin what is stored now.",
}
