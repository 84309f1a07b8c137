"""POST Object (browser form uploads): the form's fields, its signature, and the policy that its signer set.

Law: pure; the time is an argument. A field means what the header of that name means for PutObject. A
condition of the policy must cover every field, or the form is rejected: what the signer did not list is not
allowed.
https://docs.aws.amazon.com/AmazonS3/latest/API/RESTObjectPOST.html
https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-HTTPPOSTConstructPolicy.html
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from hmac import compare_digest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from meshwire.errors import S3Error
from meshwire.http_values import dates, percent_encoding
from meshwire.s3 import acl_xml, checksum_headers, request_headers, settings_xml
from meshwire.s3.operations import PutObject
from meshwire.s3.request_head import invalid_argument
from meshwire.sigv4.signer import hmac_sha256, signing_key
from meshwire.sigv4.sigv2 import sigv2_signature_matches
from meshwire.sigv4.verifier import read_credential
from meshwire.strict_json import PlanError, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.sigv4 import Scope


MAX_FORM_FILE_BYTES = 5 << 30
_UNCOVERED = frozenset({"policy", "signature", "x-amz-signature", "awsaccesskeyid", "file"})
_FREE = ("x-ignore-", "x-amz-checksum-")  # a checksum grants nothing; it can only reject
_LISTS = frozenset({"content-type"})


@dataclass(frozen=True, slots=True)
class PostCondition:
    """A condition of a policy. `operator` is `eq` or `starts-with`, `name` a lower-case field name."""

    operator: str
    name: str
    value: str

    def holds(self, value: str) -> bool:
        if self.operator == "eq":
            return value == self.value
        if self.name in _LISTS and "," in value:
            return all(piece.strip().startswith(self.value) for piece in value.split(","))
        return value.startswith(self.value)

    def __str__(self) -> str:
        return f'["{self.operator}", "${self.name}", "{self.value}"]'


@dataclass(frozen=True, slots=True)
class PostPolicy:
    """The policy of a form. `expires_ms` since the epoch; the file must have `least` to `most` bytes."""

    expires_ms: int
    conditions: tuple[PostCondition, ...]
    least: int = 0
    most: int = MAX_FORM_FILE_BYTES

    def check(self, fields: Mapping[str, str], bucket: str, now_ms: int) -> None:
        """Return if a form with these fields (lower-case names) is allowed now. Raises S3Error
        AccessDenied."""
        if now_ms > self.expires_ms:
            _deny("Policy expired.")
        judged = {**fields, "bucket": bucket}
        for condition in self.conditions:
            value = judged.get(condition.name)
            if value is None or not condition.holds(value):
                _deny(f"Policy Condition failed: {condition}")
        covered = {condition.name for condition in self.conditions}
        for name in judged:
            if name not in covered and name not in _UNCOVERED and not name.startswith(_FREE):
                _deny(f"Extra input fields: {name[:64]}")


def parse_post_policy(text: str) -> PostPolicy:
    """Parse the policy in a form's `policy` field (base64 of JSON). Raises S3Error InvalidPolicyDocument."""
    try:
        document = read_json(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError, PlanError) as error:
        raise _invalid("Invalid JSON.") from error
    if not isinstance(document, dict):
        raise _invalid("Invalid JSON.")
    expires = document.get("expiration")
    expires_ms = dates.parse_iso(expires) if isinstance(expires, str) else None
    if "expiration" not in document:
        raise _invalid("Policy missing expiration.")
    if expires_ms is None:
        raise _invalid(f"Invalid 'expiration' value: '{str(expires)[:64]}'")
    conditions = document.get("conditions")
    if not isinstance(conditions, list):
        raise _invalid("Policy missing conditions.")
    return _policy(expires_ms, conditions)


def _policy(expires_ms: int, conditions: list[Any]) -> PostPolicy:
    found: list[PostCondition] = []
    least, most = 0, MAX_FORM_FILE_BYTES
    for condition in conditions:
        if isinstance(condition, dict):
            found.extend(_exact(condition))
        elif isinstance(condition, list) and condition and _lower(condition[0]) == "content-length-range":
            low, high = _range(condition)
            least, most = max(least, low), min(most, high)
        else:
            found.append(_comparison(condition))
    return PostPolicy(expires_ms, tuple(found), least, most)


def _exact(condition: dict[str, Any]) -> list[PostCondition]:
    if len(condition) != 1:
        raise _invalid("Invalid Simple-Condition: it must have exactly one property.")
    ((name, value),) = condition.items()
    if not isinstance(value, str):
        raise _invalid("Invalid Simple-Condition: value must be a string.")
    return [PostCondition("eq", name.lower(), value)]


def _comparison(condition: Any) -> PostCondition:
    if not isinstance(condition, list) or len(condition) != 3:
        raise _invalid("Invalid Condition: a condition must have an operator, a field and a value.")
    operator, name, value = _lower(condition[0]), condition[1], condition[2]
    if operator not in {"eq", "starts-with"}:
        raise _invalid(f"Invalid Condition operator: {str(condition[0])[:64]}")
    if not isinstance(name, str) or not name.startswith("$") or not isinstance(value, str):
        raise _invalid("Invalid Condition: the field must begin with $, and its value must be a string.")
    return PostCondition(operator, name[1:].lower(), value)


def _range(condition: list[Any]) -> tuple[int, int]:
    if len(condition) != 3:
        raise _invalid("Invalid content-length-range: it must have two limits.")
    low, high = (_size(limit) for limit in condition[1:])
    if low > high:
        raise _invalid("Invalid content-length-range: the first limit exceeds the second.")
    return low, high


def _size(limit: Any) -> int:
    """Parse a limit; boto3 passes it unchanged, as a number or as text."""
    text = str(limit)
    if isinstance(limit, bool) or not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _invalid("Invalid content-length-range: its limits must be numbers of bytes.")
    return int(text)


def _lower(value: Any) -> str:
    return value.lower() if isinstance(value, str) else ""


def _invalid(message: str) -> S3Error:
    return S3Error("InvalidPolicyDocument", f"Invalid Policy: {message}")


def _deny(message: str) -> NoReturn:
    raise S3Error("AccessDenied", f"Invalid according to Policy: {message}")


_NOTHING: Mapping[str, str] = MappingProxyType({})
_STATUSES = {"200": 200, "201": 201, "204": 204}
# Fields that are signed or identify the signer; ${filename} is not replaced in them.
_AUTHENTICATION = frozenset(
    {
        "policy",
        "signature",
        "awsaccesskeyid",
        "x-amz-algorithm",
        "x-amz-credential",
        "x-amz-date",
        "x-amz-security-token",
        "x-amz-signature",
    }
)


@dataclass(frozen=True, slots=True)
class FormClaim:
    """The unverified signature of a form. `scope` is None for version 2; `timestamp` in SigV4's form, or
    empty."""

    access_key: str
    signature: str
    policy: str
    scope: Scope | None = None
    timestamp: str = ""
    session_token: str | None = None


def read_form_claim(form: Mapping[str, str]) -> FormClaim | None:
    """Return the claim of a form, or None if it has no policy and signature. Raises S3Error
    InvalidArgument, AccessDenied."""
    new = "x-amz-signature" in form or "x-amz-algorithm" in form or "x-amz-credential" in form
    if new:
        return _read_new(form)
    if not any(name in form for name in ("policy", "signature", "awsaccesskeyid")):
        return None
    policy, signature, access_key = (
        _require_field(form, name) for name in ("policy", "Signature", "AWSAccessKeyId")
    )
    return FormClaim(access_key, signature, policy, session_token=form.get("x-amz-security-token"))


def _read_new(form: Mapping[str, str]) -> FormClaim:
    policy, signature = _require_field(form, "policy"), _require_field(form, "X-Amz-Signature")
    if _require_field(form, "X-Amz-Algorithm") != "AWS4-HMAC-SHA256":
        raise invalid_argument(
            "X-Amz-Algorithm", form["x-amz-algorithm"], "Only AWS4-HMAC-SHA256 is supported."
        )
    access_key, scope = read_credential(_require_field(form, "X-Amz-Credential"), "InvalidArgument")
    timestamp = _require_field(form, "X-Amz-Date")
    if dates.parse_amz(timestamp) is None or timestamp[:8] != scope.date:
        raise invalid_argument(
            "X-Amz-Date", timestamp, "X-Amz-Date must be on the day given in the credential."
        )
    token = form.get("x-amz-security-token")
    return FormClaim(access_key, signature, policy, scope, timestamp, token)


def _require_field(form: Mapping[str, str], name: str) -> str:
    value = form.get(name.lower())
    if not value:
        raise invalid_argument(name, "", f"Bucket POST must contain a field named '{name}'.")
    return value


def verify_policy_signature(claim: FormClaim, secret_key: str) -> bool:
    """Whether the form's policy was signed with this secret, compared in constant time."""
    try:
        if claim.scope is None:
            return sigv2_signature_matches(claim.policy, secret_key, claim.signature)
        scope = claim.scope
        key = signing_key(secret_key, scope.date, scope.region, scope.service)
        computed = hmac_sha256(key, percent_encoding.to_bytes(claim.policy)).hex()
        return compare_digest(computed.encode(), percent_encoding.to_bytes(claim.signature))
    except percent_encoding.PercentError:
        return False


def expand_filename(form: Mapping[str, str], filename: str) -> dict[str, str]:
    """Replace `${filename}` in the fields with the name of the user's file, without its folders."""
    base = filename.replace("\\", "/").rpartition("/")[2]
    return {
        name: value if name in _AUTHENTICATION else value.replace("${filename}", base)
        for name, value in form.items()
    }


def read_post_object(form: Mapping[str, str], bucket: str, sent: Mapping[str, str] = _NOTHING) -> PutObject:
    """Return the PutObject of a form; conditions may be in its fields or in the request's own headers
    (`sent`). Raises S3Error: UserKeyMustBeSpecified, NotImplemented (a field whose meaning would be lost)
    and whatever a PUT with these headers raises."""
    key = form.get("key", "")
    if not key:
        raise S3Error("UserKeyMustBeSpecified", "The form must have a field named key before the file.")
    request_headers.check_key(key)
    headers = form_headers(form)
    request_headers.reject_unsupported_headers(headers)
    tags = settings_xml.parse_tagging(form["tagging"].encode()) if form.get("tagging") else {}
    return PutObject(
        bucket,
        key,
        request_headers.object_headers(headers),
        checksum_headers.read_digests(headers),
        request_headers.read_conditions({**sent, **headers}),
        tags=tags,
        acl=acl_xml.read_acl_headers(headers),
    )


def form_headers(form: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that an equivalent PUT would carry."""
    headers = {name: value for name, value in form.items() if name not in _AUTHENTICATION}
    if "acl" in headers:
        headers["x-amz-acl"] = headers.pop("acl")
    algorithm = headers.pop("x-amz-checksum-algorithm", None)
    if algorithm is not None:
        headers.setdefault("x-amz-sdk-checksum-algorithm", algorithm)
    return headers


def read_status(form: Mapping[str, str]) -> int:
    """Return the status of a success; S3 ignores unknown values."""
    return _STATUSES.get(form.get("success_action_status", ""), 204)


def read_redirect(form: Mapping[str, str]) -> str:
    """Return where a success redirects the browser; empty for no redirect or an invalid web URL."""
    url = form.get("success_action_redirect") or form.get("redirect") or ""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return url if parts.scheme in {"http", "https"} and parts.netloc and url.isprintable() else ""
