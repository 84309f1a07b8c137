"""AWS STS Query protocol: the form of a request at `POST /`, and the XML of answers and errors.

Law: syntax only. Only what AssumeRoleWithWebIdentity and GetCallerIdentity need is understood; a parameter
that would change the meaning of a request and is not supported is refused.
https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRoleWithWebIdentity.html
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlencode

from meshwire.errors import S3Error
from meshwire.s3.xml_io import parse_xml, xml_element

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.s3.xml_io import Element

FORM_TYPE: Final = "application/x-www-form-urlencoded"
VERSION: Final = "2011-06-15"
MAX_FORM_BYTES: Final = 64 << 10
ASSUME_ROLE_WITH_WEB_IDENTITY: Final = "AssumeRoleWithWebIdentity"
GET_CALLER_IDENTITY: Final = "GetCallerIdentity"
_NAMESPACE: Final = "https://sts.amazonaws.com/doc/2011-06-15/"
_MAX_FIELDS: Final = 64
_STATUS: Final[Mapping[str, int]] = {
    "AccessDenied": 403,
    "IDPRejectedClaim": 403,
    "InvalidClientTokenId": 403,
    "SignatureDoesNotMatch": 403,
    "Throttling": 400,
    "ServiceUnavailable": 503,
    "InternalFailure": 500,
}


class StsError(Exception):
    """An error of the STS protocol. The message carries no token and no secret."""

    def __init__(self, code: str, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.status = status or _STATUS.get(code, 400)

    def __repr__(self) -> str:
        return f"StsError({self.code}: {self.message})"


@dataclass(frozen=True, slots=True)
class WebIdentityRequest:
    """AssumeRoleWithWebIdentity: `role` is the role's name; `policy` a document, or "". `duration_seconds` is
    None if the request does not say."""

    role: str
    session_name: str
    token: str = field(repr=False)
    duration_seconds: int | None = None
    policy: str = ""


@dataclass(frozen=True, slots=True)
class AssumedRole:
    """The answer to AssumeRoleWithWebIdentity. `expiration` is in ISO 8601; `provider` the issuer."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str = field(repr=False)
    expiration: str
    role: str = ""
    session_name: str = ""
    subject: str = ""
    audience: str = ""
    provider: str = ""


# --- requests -----------------------------------------------------------------------------------------------


def parse_form(body: bytes) -> Mapping[str, str]:
    """Return the fields of a form. Raises StsError ValidationError."""
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=True,
            errors="strict",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError:  # its message would quote the form
        raise StsError("ValidationError", f"The body must be a form ({FORM_TYPE}) of UTF-8 text.") from None
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise StsError("ValidationError", "A parameter is given twice.")
    return fields


def read_action(fields: Mapping[str, str]) -> str:
    """Return the action of a form. Raises StsError MissingAction, InvalidAction (another API version)."""
    if "Action" not in fields:
        raise StsError("MissingAction", "The form has no parameter Action.")
    if fields.get("Version") != VERSION:
        raise StsError("InvalidAction", f"Version must be {VERSION}.")
    return fields["Action"]


_KNOWN: Final = frozenset(
    {
        "Action",
        "Version",
        "RoleArn",
        "RoleSessionName",
        "WebIdentityToken",
        "DurationSeconds",
        "Policy",
    }
)


def read_web_identity_request(fields: Mapping[str, str]) -> WebIdentityRequest:
    """Read an AssumeRoleWithWebIdentity. Raises StsError ValidationError."""
    unknown = next((name for name in fields if name not in _KNOWN), None)
    if unknown is not None:
        shown = unknown[:64] if unknown.isidentifier() else "of an unknown name"
        raise StsError("ValidationError", f"The parameter {shown} is not supported.")
    for name in ("RoleArn", "RoleSessionName", "WebIdentityToken"):
        if not fields.get(name):
            raise StsError("ValidationError", f"The parameter {name} is missing or empty.")
    return WebIdentityRequest(
        read_role_arn(fields["RoleArn"]),
        fields["RoleSessionName"],
        fields["WebIdentityToken"],
        _seconds(fields["DurationSeconds"]) if "DurationSeconds" in fields else None,
        fields.get("Policy", ""),
    )


def read_role_arn(arn: str) -> str:
    """Return the name of a role: `train` for `arn:aws:iam:::role/train`; the account is ignored. Raises
    StsError ValidationError."""
    parts = arn.split(":", 5)
    kind, _, name = parts[-1].partition("/")
    if len(parts) != 6 or parts[:4] != ["arn", "aws", "iam", ""] or kind != "role" or not name:
        raise StsError("ValidationError", "RoleArn must have the form arn:aws:iam:::role/NAME.")
    return name


def _seconds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7):
        raise StsError("ValidationError", "DurationSeconds must be a number of seconds.")
    return int(text)


def web_identity_form(role_arn: str, session_name: str, token: str, seconds: int | None = None) -> bytes:
    """Return the form with which a client exchanges `token`."""
    fields = {
        "Action": ASSUME_ROLE_WITH_WEB_IDENTITY,
        "Version": VERSION,
        "RoleArn": role_arn,
        "RoleSessionName": session_name,
        "WebIdentityToken": token,
    }
    if seconds is not None:
        fields["DurationSeconds"] = str(seconds)
    return urlencode(fields).encode("ascii")


# --- answers ------------------------------------------------------------------------------------------------


def render_assumed_role(answer: AssumedRole, request_id: str) -> bytes:
    """Return the XML of an AssumeRoleWithWebIdentity."""
    credentials = (
        xml_element("AccessKeyId", answer.access_key)
        + xml_element("SecretAccessKey", answer.secret_key)
        + xml_element("SessionToken", answer.session_token)
        + xml_element("Expiration", answer.expiration)
    )
    user = xml_element("Arn", assumed_role_arn(answer.role, answer.session_name)) + xml_element(
        "AssumedRoleId", f"{answer.role}:{answer.session_name}"
    )
    result = (
        f"<Credentials>{credentials}</Credentials><AssumedRoleUser>{user}</AssumedRoleUser>"
        + xml_element("SubjectFromWebIdentityToken", answer.subject)
        + xml_element("Audience", answer.audience)
        + xml_element("Provider", answer.provider)
    )
    return _response(ASSUME_ROLE_WITH_WEB_IDENTITY, result, request_id)


def render_caller_identity(user_id: str, arn: str, request_id: str) -> bytes:
    """Return the XML of a GetCallerIdentity. There are no accounts; AWS's clients expect the element."""
    result = xml_element("Arn", arn) + xml_element("UserId", user_id) + xml_element("Account", "")
    return _response(GET_CALLER_IDENTITY, result, request_id)


def assumed_role_arn(role: str, session_name: str) -> str:
    """Return the ARN of a session of a role."""
    return f"arn:aws:sts:::assumed-role/{role}/{session_name}"


def _response(action: str, result: str, request_id: str) -> bytes:
    metadata = f"<ResponseMetadata>{xml_element('RequestId', request_id)}</ResponseMetadata>"
    return (
        f'<{action}Response xmlns="{_NAMESPACE}"><{action}Result>{result}</{action}Result>'
        f"{metadata}</{action}Response>"
    ).encode()


def render_sts_error(error: StsError, request_id: str) -> bytes:
    """Return the XML of an error."""
    kind = "Receiver" if error.status >= 500 else "Sender"
    told = xml_element("Type", kind) + xml_element("Code", error.code) + xml_element("Message", error.message)
    return (
        f'<ErrorResponse xmlns="{_NAMESPACE}"><Error>{told}</Error>'
        f"{xml_element('RequestId', request_id)}</ErrorResponse>"
    ).encode()


def parse_assumed_role(body: bytes) -> AssumedRole:
    """Parse the XML of an AssumeRoleWithWebIdentity, as a client. Raises StsError InvalidResponse."""
    root = _parse_body(body, f"{ASSUME_ROLE_WITH_WEB_IDENTITY}Response")
    result = root.find_first(f"{ASSUME_ROLE_WITH_WEB_IDENTITY}Result")
    keys = None if result is None else result.find_first("Credentials")
    if result is None or keys is None:
        raise StsError("InvalidResponse", "the answer has no credentials")
    answer = AssumedRole(
        keys.child_text("AccessKeyId"),
        keys.child_text("SecretAccessKey"),
        keys.child_text("SessionToken"),
        keys.child_text("Expiration"),
        subject=result.child_text("SubjectFromWebIdentityToken"),
        audience=result.child_text("Audience"),
        provider=result.child_text("Provider"),
    )
    if not (answer.access_key and answer.secret_key and answer.session_token and answer.expiration):
        raise StsError("InvalidResponse", "the answer has no credentials")
    return answer


def parse_sts_error(body: bytes, status: int) -> StsError:
    """Parse the XML of an error, as a client; what is not one gives an error of that status."""
    try:
        error = _parse_body(body, "ErrorResponse").find_first("Error")
    except StsError:
        error = None
    if error is None:
        return StsError("InvalidResponse", f"the server answered {status}, but not like an STS", status)
    return StsError(error.child_text("Code"), error.child_text("Message"), status)


def _parse_body(body: bytes, root: str) -> Element:
    try:
        return parse_xml(body, root=root, max_bytes=MAX_FORM_BYTES)
    except S3Error as error:
        raise StsError("InvalidResponse", error.message) from None
