"""The fields of an upload form, read: who signed it, what is to be stored, how it is to be answered.

Law: pure; syntax only, nothing is believed. A field means what the header of its name means for PutObject.
https://docs.aws.amazon.com/AmazonS3/latest/API/RESTObjectPOST.html
"""

from __future__ import annotations

from dataclasses import dataclass
from hmac import compare_digest
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from meshwire import httpdates, percents
from meshwire.s3 import acls, digests, fields, tagging
from meshwire.s3.errors import S3Error
from meshwire.s3.operations import PutObject
from meshwire.s3.queries import invalid
from meshwire.sigv2 import matches_old
from meshwire.sigv4.claims import read_credential
from meshwire.sigv4.keys import hmac_sha256, signing_key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.sigv4 import Scope

_NOTHING: Mapping[str, str] = MappingProxyType({})
_STATUSES = {"200": 200, "201": 201, "204": 204}
# What is signed, or names who signed: a file's name plays no part in these.
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
    """Who a form claims to be. `scope` is None for version 2; `timestamp` in SigV4's form, or empty."""

    access_key: str
    signature: str
    policy: str
    scope: Scope | None = None
    timestamp: str = ""
    session_token: str | None = None


def read_form_claim(form: Mapping[str, str]) -> FormClaim | None:
    """None for a form without policy and signature. Raises S3Error InvalidArgument, AccessDenied."""
    new = "x-amz-signature" in form or "x-amz-algorithm" in form or "x-amz-credential" in form
    if new:
        return _read_new(form)
    if not any(name in form for name in ("policy", "signature", "awsaccesskeyid")):
        return None
    policy, signature, access_key = (
        _needed(form, name) for name in ("policy", "Signature", "AWSAccessKeyId")
    )
    return FormClaim(access_key, signature, policy, session_token=form.get("x-amz-security-token"))


def _read_new(form: Mapping[str, str]) -> FormClaim:
    policy, signature = _needed(form, "policy"), _needed(form, "X-Amz-Signature")
    if _needed(form, "X-Amz-Algorithm") != "AWS4-HMAC-SHA256":
        raise invalid("X-Amz-Algorithm", form["x-amz-algorithm"], "Only AWS4-HMAC-SHA256 is supported.")
    access_key, scope = read_credential(_needed(form, "X-Amz-Credential"), "InvalidArgument")
    timestamp = _needed(form, "X-Amz-Date")
    if httpdates.parse_amz(timestamp) is None or timestamp[:8] != scope.date:
        raise invalid("X-Amz-Date", timestamp, "X-Amz-Date must be of the day that the credential names.")
    token = form.get("x-amz-security-token")
    return FormClaim(access_key, signature, policy, scope, timestamp, token)


def _needed(form: Mapping[str, str], name: str) -> str:
    value = form.get(name.lower())
    if not value:
        raise invalid(name, "", f"Bucket POST must contain a field named '{name}'.")
    return value


def signs_policy(claim: FormClaim, secret_key: str) -> bool:
    """Whether the form's policy was signed with this secret, in constant time."""
    try:
        if claim.scope is None:
            return matches_old(claim.policy, secret_key, claim.signature)
        scope = claim.scope
        key = signing_key(secret_key, scope.date, scope.region, scope.service)
        computed = hmac_sha256(key, percents.to_bytes(claim.policy)).hex()
        return compare_digest(computed.encode(), percents.to_bytes(claim.signature))
    except percents.PercentError:
        return False


def expanded(form: Mapping[str, str], filename: str) -> dict[str, str]:
    """The fields with `${filename}` replaced by the name of the user's file, without its folders."""
    base = filename.replace("\\", "/").rpartition("/")[2]
    return {
        name: value if name in _AUTHENTICATION else value.replace("${filename}", base)
        for name, value in form.items()
    }


def read_upload(form: Mapping[str, str], bucket: str, sent: Mapping[str, str] = _NOTHING) -> PutObject:
    """What the form stores; conditions may stand in its fields or among the request's own headers (`sent`).
    Raises S3Error: UserKeyMustBeSpecified, NotImplemented (a field whose meaning would be lost) and what a
    PUT with these headers raises."""
    key = form.get("key", "")
    if not key:
        raise S3Error(
            "UserKeyMustBeSpecified", "The form must have a field named key, and have it before the file."
        )
    fields.check_key(key)
    headers = form_headers(form)
    fields.refuse_unbuilt(headers)
    tags = tagging.parse_tagging(form["tagging"].encode()) if form.get("tagging") else {}
    return PutObject(
        bucket,
        key,
        fields.object_headers(headers),
        digests.read_digests(headers),
        fields.conditions({**sent, **headers}),
        tags=tags,
        acl=acls.read_acl(headers),
    )


def form_headers(form: Mapping[str, str]) -> dict[str, str]:
    """The headers that a PUT would carry in place of the fields."""
    headers = {name: value for name, value in form.items() if name not in _AUTHENTICATION}
    if "acl" in headers:
        headers["x-amz-acl"] = headers.pop("acl")
    algorithm = headers.pop("x-amz-checksum-algorithm", None)
    if algorithm is not None:
        headers.setdefault("x-amz-sdk-checksum-algorithm", algorithm)
    return headers


def read_status(form: Mapping[str, str]) -> int:
    """The status of a success; S3 overlooks those it does not know."""
    return _STATUSES.get(form.get("success_action_status", ""), 204)


def read_redirect(form: Mapping[str, str]) -> str:
    """Where a success sends the browser; empty for nowhere, or for what is no URL of the web."""
    url = form.get("success_action_redirect") or form.get("redirect") or ""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    return url if parts.scheme in {"http", "https"} and parts.netloc and url.isprintable() else ""
