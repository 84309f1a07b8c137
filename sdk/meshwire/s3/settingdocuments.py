"""The documents of a bucket's settings, both ways: versioning, access blocks, ownership, CORS, what is never
set. (ACLs: `acls`; tags: `tagging`; lifecycle: `lifecycledocuments`.)

Law: bytes and values only; what a document may leave out stays left out. Invariant: any bytes give a value or
an S3Error, and what is written reads back the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from meshwire.s3 import listings
from meshwire.s3.elements import optional, read, tag
from meshwire.s3.errors import S3Error
from meshwire.s3.settings import OWNERSHIPS, CorsRule, PublicAccessBlock

if TYPE_CHECKING:
    from meshwire.s3.elements import Element
    from meshwire.s3.settings import BucketSetting, Versioning

MAX_SETTING_BYTES = 1 << 20
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


def read_setting(body: bytes, root: str, max_bytes: int = MAX_SETTING_BYTES) -> Element:
    """The root of a setting's document. Raises S3Error: MissingRequestBodyError, MalformedXML."""
    if not body.strip():
        raise S3Error("MissingRequestBodyError")
    return read(body, root=root, max_bytes=max_bytes)


# --- versioning -----------------------------------------------------------------------------------------


def parse_versioning(body: bytes) -> Versioning:
    """Raises S3Error: MalformedXML, IllegalVersioningConfigurationException, NotImplemented (MFA delete)."""
    root = read_setting(body, "VersioningConfiguration")
    root.require_known(("Status", "MfaDelete"))  # MinIO's folders and prefixes without versions, say
    if root.get("MfaDelete", "Disabled").strip() != "Disabled":
        raise S3Error("NotImplemented", "MFA delete is not implemented.")
    status = root.get("Status").strip()
    if not status:
        raise S3Error("IllegalVersioningConfigurationException")
    if status not in {"Enabled", "Suspended"}:
        raise S3Error("MalformedXML", "The Status of a VersioningConfiguration is Enabled or Suspended.")
    return cast("Versioning", status)


def versioning(status: Versioning) -> bytes:
    """Without a status while versioning was never enabled."""
    return listings.root("VersioningConfiguration", optional("Status", status)).encode()


# --- access -------------------------------------------------------------------------------------------------

_BLOCKS = {
    "BlockPublicAcls": "block_public_acls",
    "IgnorePublicAcls": "ignore_public_acls",
    "BlockPublicPolicy": "block_public_policy",
    "RestrictPublicBuckets": "restrict_public_buckets",
}


def parse_public_access(body: bytes) -> PublicAccessBlock:
    """Raises S3Error: MalformedXML."""
    root = read_setting(body, "PublicAccessBlockConfiguration")
    root.require_known(_BLOCKS)  # a misspelt block would not block
    return PublicAccessBlock(**{field: _boolean(root.get(name, "false")) for name, field in _BLOCKS.items()})


def public_access(block: PublicAccessBlock) -> bytes:
    pieces = [tag(name, str(getattr(block, field)).lower()) for name, field in _BLOCKS.items()]
    return listings.root("PublicAccessBlockConfiguration", *pieces).encode()


def _boolean(text: str) -> bool:
    value = text.strip().lower()
    if value not in {"true", "false"}:
        raise S3Error("MalformedXML")
    return value == "true"


def parse_ownership(body: bytes) -> str:
    """Raises S3Error: MalformedXML."""
    root = read_setting(body, "OwnershipControls")
    root.require_known(("Rule",))
    rule = root.first("Rule")
    value = "" if rule is None else rule.get("ObjectOwnership").strip()
    if rule is None or value not in OWNERSHIPS:
        raise S3Error("MalformedXML", "OwnershipControls have one Rule with a known ObjectOwnership.")
    rule.require_known(("ObjectOwnership",))
    return value


def ownership(value: str) -> bytes:
    return listings.root("OwnershipControls", f"<Rule>{tag('ObjectOwnership', value)}</Rule>").encode()


def policy_status(*, public: bool) -> bytes:
    return listings.root("PolicyStatus", tag("IsPublic", str(public).lower())).encode()


# --- CORS ---------------------------------------------------------------------------------------------------

MAX_CORS_RULES = 100
MAX_CORS_BYTES = 64 << 10
_CORS_LISTS = ("AllowedOrigin", "AllowedMethod", "AllowedHeader", "ExposeHeader")
_CORS_METHODS = frozenset({"GET", "PUT", "HEAD", "POST", "DELETE"})


def parse_cors(body: bytes) -> tuple[CorsRule, ...]:
    """Raises S3Error: MalformedXML, InvalidRequest."""
    root = read_setting(body, "CORSConfiguration", MAX_CORS_BYTES)
    root.require_known((), several=("CORSRule",))
    rules = tuple(map(_cors_rule, root.all("CORSRule")))
    if not 1 <= len(rules) <= MAX_CORS_RULES:
        raise S3Error("MalformedXML", f"A CORSConfiguration has 1 to {MAX_CORS_RULES} rules.")
    return rules


def _cors_rule(element: Element) -> CorsRule:
    element.require_known(("ID", "MaxAgeSeconds"), several=_CORS_LISTS)
    texts = {name: tuple(child.text.strip() for child in element.all(name)) for name in _CORS_LISTS}
    if not (texts["AllowedOrigin"] and texts["AllowedMethod"]):
        raise S3Error("MalformedXML", "A CORSRule has an AllowedOrigin and an AllowedMethod.")
    for method in texts["AllowedMethod"]:
        if method not in _CORS_METHODS:
            message = f"Found unsupported HTTP method in CORS config. Unsupported method is {method[:32]}"
            raise S3Error("InvalidRequest", message)
    for name in ("AllowedOrigin", "AllowedHeader"):
        for text in texts[name]:
            if text.count("*") > 1:
                raise S3Error("InvalidRequest", f'{name} "{text[:256]}" can not have more than one wildcard.')
    for name in ("AllowedHeader", "ExposeHeader"):
        for text in texts[name]:
            if _TOKEN.match(text) is None or (name == "ExposeHeader" and "*" in text):
                raise S3Error("InvalidRequest", f'{name} "{text[:256]}" contains invalid character.')
    name = element.get("ID")
    if len(name) > 255:
        raise S3Error("InvalidRequest", "The ID of a CORSRule has at most 255 characters.")
    return CorsRule(
        texts["AllowedOrigin"],
        texts["AllowedMethod"],
        tuple(text.lower() for text in texts["AllowedHeader"]),
        texts["ExposeHeader"],
        _seconds(element.first("MaxAgeSeconds")),
        name,
        texts["AllowedHeader"],
    )


def _seconds(element: Element | None) -> int | None:
    if element is None:
        return None
    text = element.text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise S3Error("MalformedXML", "MaxAgeSeconds is a number of seconds.")
    return int(text)


def cors(rules: tuple[CorsRule, ...]) -> bytes:
    return listings.root("CORSConfiguration", *map(_cors_pieces, rules)).encode()


def _cors_pieces(rule: CorsRule) -> str:
    pieces = [
        optional("ID", rule.id),
        *(tag("AllowedMethod", method) for method in rule.methods),
        *(tag("AllowedOrigin", origin) for origin in rule.origins),
        *(tag("AllowedHeader", header) for header in rule.spelled or rule.headers),
        *(tag("ExposeHeader", header) for header in rule.exposed),
        "" if rule.max_age is None else tag("MaxAgeSeconds", str(rule.max_age)),
    ]
    return f"<CORSRule>{''.join(pieces)}</CORSRule>"


# --- what this server never sets ----------------------------------------------------------------------------

_EMPTY: dict[str, bytes] = {
    "accelerate": listings.root("AccelerateConfiguration").encode(),
    "logging": listings.root("BucketLoggingStatus").encode(),
    "notification": listings.root("NotificationConfiguration").encode(),
    "requestPayment": listings.root("RequestPaymentConfiguration", tag("Payer", "BucketOwner")).encode(),
}
_ABSENT = {
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "replication": "ReplicationConfigurationNotFoundError",
    "website": "NoSuchWebsiteConfiguration",
}


def never_set(setting: BucketSetting) -> bytes:
    """What S3 says of a bucket on which this was never set: an empty document, or the error raised here."""
    if setting in _ABSENT:
        raise S3Error(_ABSENT[setting])
    return _EMPTY[setting]
