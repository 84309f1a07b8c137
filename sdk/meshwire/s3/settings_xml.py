"""Bucket settings and tags as XML, both ways: versioning, public access block, ownership, CORS, tagging.

Law: bytes and values only; whatever a document omits stays omitted. Tags are measured in characters, as in
S3, and keep their order.
Invariant: any bytes give a value or an S3Error; written documents parse back to the same value; accepted
tags are valid and no key occurs twice.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-tagging.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from meshwire.errors import S3Error
from meshwire.http_values import percent_encoding
from meshwire.s3 import cors, listings
from meshwire.s3.bucket_settings import OWNERSHIPS, CorsRule, PublicAccessBlock
from meshwire.s3.request_head import invalid_argument
from meshwire.s3.xml_io import optional_element, parse_xml, xml_element

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshwire.s3.bucket_settings import BucketSetting, Versioning
    from meshwire.s3.xml_io import Element


MAX_SETTING_BYTES = 1 << 20
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")


def parse_setting(body: bytes, root: str, max_bytes: int = MAX_SETTING_BYTES) -> Element:
    """Parse a setting's document and return its root. Raises S3Error: MissingRequestBodyError,
    MalformedXML."""
    if not body.strip():
        raise S3Error("MissingRequestBodyError")
    return parse_xml(body, root=root, max_bytes=max_bytes)


# --- versioning -----------------------------------------------------------------------------------------


def parse_versioning(body: bytes) -> Versioning:
    """Parse a VersioningConfiguration. Raises S3Error: MalformedXML,
    IllegalVersioningConfigurationException, NotImplemented (MFA delete)."""
    root = parse_setting(body, "VersioningConfiguration")
    root.require_known(("Status", "MfaDelete"))  # rejects, for example, MinIO's excluded folders and prefixes
    if root.child_text("MfaDelete", "Disabled").strip() != "Disabled":
        raise S3Error("NotImplemented", "MFA delete is not implemented.")
    status = root.child_text("Status").strip()
    if not status:
        raise S3Error("IllegalVersioningConfigurationException")
    if status not in {"Enabled", "Suspended"}:
        raise S3Error("MalformedXML", "The Status of a VersioningConfiguration must be Enabled or Suspended.")
    return cast("Versioning", status)


def versioning_document(status: Versioning) -> bytes:
    """Write a VersioningConfiguration, without a status if versioning was never enabled."""
    return listings.root_element("VersioningConfiguration", optional_element("Status", status)).encode()


# --- access -------------------------------------------------------------------------------------------------

_BLOCKS = {
    "BlockPublicAcls": "block_public_acls",
    "IgnorePublicAcls": "ignore_public_acls",
    "BlockPublicPolicy": "block_public_policy",
    "RestrictPublicBuckets": "restrict_public_buckets",
}


def parse_public_access(body: bytes) -> PublicAccessBlock:
    """Parse a PublicAccessBlockConfiguration. Raises S3Error: MalformedXML."""
    root = parse_setting(body, "PublicAccessBlockConfiguration")
    root.require_known(_BLOCKS)  # a misspelt block would have no effect
    return PublicAccessBlock(
        **{field: _boolean(root.child_text(name, "false")) for name, field in _BLOCKS.items()}
    )


def public_access_document(block: PublicAccessBlock) -> bytes:
    pieces = [xml_element(name, str(getattr(block, field)).lower()) for name, field in _BLOCKS.items()]
    return listings.root_element("PublicAccessBlockConfiguration", *pieces).encode()


def _boolean(text: str) -> bool:
    value = text.strip().lower()
    if value not in {"true", "false"}:
        raise S3Error("MalformedXML")
    return value == "true"


def parse_ownership(body: bytes) -> str:
    """Parse OwnershipControls. Raises S3Error: MalformedXML."""
    root = parse_setting(body, "OwnershipControls")
    root.require_known(("Rule",))
    rule = root.find_first("Rule")
    value = "" if rule is None else rule.child_text("ObjectOwnership").strip()
    if rule is None or value not in OWNERSHIPS:
        raise S3Error("MalformedXML", "OwnershipControls need one Rule with a known ObjectOwnership.")
    rule.require_known(("ObjectOwnership",))
    return value


def ownership_document(value: str) -> bytes:
    return listings.root_element(
        "OwnershipControls", f"<Rule>{xml_element('ObjectOwnership', value)}</Rule>"
    ).encode()


def policy_status_document(*, public: bool) -> bytes:
    return listings.root_element("PolicyStatus", xml_element("IsPublic", str(public).lower())).encode()


# --- CORS ---------------------------------------------------------------------------------------------------

MAX_CORS_RULES = 100
MAX_CORS_BYTES = 64 << 10
_CORS_LISTS = ("AllowedOrigin", "AllowedMethod", "AllowedHeader", "ExposeHeader")


def parse_cors(body: bytes) -> tuple[CorsRule, ...]:
    """Parse a CORSConfiguration. Raises S3Error: MalformedXML, InvalidRequest."""
    root = parse_setting(body, "CORSConfiguration", MAX_CORS_BYTES)
    root.require_known((), several=("CORSRule",))
    rules = tuple(map(_cors_rule, root.find_all("CORSRule")))
    if not 1 <= len(rules) <= MAX_CORS_RULES:
        raise S3Error("MalformedXML", f"A CORSConfiguration must have 1 to {MAX_CORS_RULES} rules.")
    return rules


def _cors_rule(element: Element) -> CorsRule:
    element.require_known(("ID", "MaxAgeSeconds"), several=_CORS_LISTS)
    texts = {name: tuple(child.text.strip() for child in element.find_all(name)) for name in _CORS_LISTS}
    if not (texts["AllowedOrigin"] and texts["AllowedMethod"]):
        raise S3Error("MalformedXML", "A CORSRule needs an AllowedOrigin and an AllowedMethod.")
    for method in texts["AllowedMethod"]:
        if method not in cors.METHODS:
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
    name = element.child_text("ID")
    if len(name) > 255:
        raise S3Error("InvalidRequest", "The ID of a CORSRule can have at most 255 characters.")
    return CorsRule(
        texts["AllowedOrigin"],
        texts["AllowedMethod"],
        tuple(text.lower() for text in texts["AllowedHeader"]),
        texts["ExposeHeader"],
        _seconds(element.find_first("MaxAgeSeconds")),
        name,
        texts["AllowedHeader"],
    )


def _seconds(element: Element | None) -> int | None:
    if element is None:
        return None
    text = element.text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise S3Error("MalformedXML", "MaxAgeSeconds must be a number of seconds.")
    return int(text)


def cors_document(rules: tuple[CorsRule, ...]) -> bytes:
    return listings.root_element("CORSConfiguration", *map(_cors_pieces, rules)).encode()


def _cors_pieces(rule: CorsRule) -> str:
    pieces = [
        optional_element("ID", rule.id),
        *(xml_element("AllowedMethod", method) for method in rule.methods),
        *(xml_element("AllowedOrigin", origin) for origin in rule.origins),
        *(xml_element("AllowedHeader", header) for header in rule.spelled or rule.headers),
        *(xml_element("ExposeHeader", header) for header in rule.exposed),
        "" if rule.max_age is None else xml_element("MaxAgeSeconds", str(rule.max_age)),
    ]
    return f"<CORSRule>{''.join(pieces)}</CORSRule>"


# --- settings that this server never has ------------------------------------------------------------------

_EMPTY: dict[str, bytes] = {
    "accelerate": listings.root_element("AccelerateConfiguration").encode(),
    "logging": listings.root_element("BucketLoggingStatus").encode(),
    "notification": listings.root_element("NotificationConfiguration").encode(),
    "requestPayment": listings.root_element(
        "RequestPaymentConfiguration", xml_element("Payer", "BucketOwner")
    ).encode(),
}
_ABSENT = {
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "replication": "ReplicationConfigurationNotFoundError",
    "website": "NoSuchWebsiteConfiguration",
}


def unset_setting_document(setting: BucketSetting) -> bytes:
    """Return S3's response for a bucket on which the setting was never set: an empty document, or raise the
    error."""
    if setting in _ABSENT:
        raise S3Error(_ABSENT[setting])
    return _EMPTY[setting]


OBJECT_TAGS = 10
BUCKET_TAGS = 50
MAX_TAG_KEY = 128
MAX_TAG_VALUE = 256
MAX_TAGGING_BYTES = 64 << 10

# Letters, digits and white space of any script, and these symbols.
_TEXT = re.compile(r"[\w\s+\-=.:/@]*\Z")
_HEADER = (
    "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters without tag "
    "name duplicates."
)


def read_tagging_header(headers: Mapping[str, str]) -> dict[str, str]:
    """Parse the tags of x-amz-tagging (`a=1&b=2`), in order of their keys; empty if it is absent.

    Raises S3Error: InvalidArgument, InvalidTag, BadRequest.
    """
    text = headers.get("x-amz-tagging")
    if not text:
        return {}
    try:
        pairs = percent_encoding.split_query(text)
    except percent_encoding.PercentError:
        raise invalid_argument("x-amz-tagging", text, _HEADER) from None
    if len({key for key, _ in pairs}) < len(pairs):
        raise invalid_argument("x-amz-tagging", text, _HEADER)
    return checked_tags(sorted(pairs), OBJECT_TAGS)


def replaces_tags(headers: Mapping[str, str]) -> bool:
    """Parse x-amz-tagging-directive of a copy. Raises S3Error InvalidArgument."""
    directive = headers.get("x-amz-tagging-directive", "COPY")
    if directive not in {"COPY", "REPLACE"}:
        raise invalid_argument("x-amz-tagging-directive", directive, "Unknown tagging directive.")
    return directive == "REPLACE"


def parse_tagging(body: bytes, limit: int = OBJECT_TAGS) -> dict[str, str]:
    """Parse the tags of a Tagging document. Raises S3Error: MalformedXML, InvalidTag, BadRequest (too
    many)."""
    root = parse_xml(body, root="Tagging", max_bytes=MAX_TAGGING_BYTES)
    root.require_known(("TagSet",))
    listed = root.find_first("TagSet")
    if listed is None:
        raise S3Error("MalformedXML", "A Tagging document needs one TagSet.")
    return checked_tags(read_tags(listed), limit)


def read_tags(listed: Element) -> list[tuple[str, str]]:
    """Return the (key, value) pairs of an element that holds Tag elements. Raises S3Error MalformedXML."""
    listed.require_known((), several=("Tag",))
    return [read_tag(element) for element in listed.find_all("Tag")]


def read_tag(element: Element) -> tuple[str, str]:
    """Return the (key, value) of a Tag element. Raises S3Error MalformedXML."""
    element.require_known(("Key", "Value"))
    key, value = element.find_first("Key"), element.find_first("Value")
    if key is None or value is None:
        raise S3Error("MalformedXML", "Every Tag needs a Key and a Value.")
    return key.text, value.text


def checked_tags(pairs: Iterable[tuple[str, str]], limit: int) -> dict[str, str]:
    """Check the pairs and return them as tags. Raises S3Error: InvalidTag, BadRequest."""
    tags: dict[str, str] = {}
    for key, value in pairs:
        if key in tags:
            raise S3Error(
                "InvalidTag", "Cannot provide multiple Tags with the same key", extra=_tag_detail(key)
            )
        _check(key, value)
        tags[key] = value
    if len(tags) > limit:
        kind = "Object" if limit == OBJECT_TAGS else "Bucket"
        raise S3Error("BadRequest", f"{kind} tags cannot be greater than {limit}")
    return tags


def _check(key: str, value: str) -> None:
    if not 1 <= len(key) <= MAX_TAG_KEY or _TEXT.match(key) is None:
        raise S3Error("InvalidTag", "The TagKey you have provided is invalid", extra=_tag_detail(key))
    if key.startswith("aws:"):
        raise S3Error(
            "InvalidTag", "System tags cannot be added/updated by requester", extra=_tag_detail(key)
        )
    if len(value) > MAX_TAG_VALUE or _TEXT.match(value) is None:
        raise S3Error(
            "InvalidTag",
            "The TagValue you have provided is invalid",
            extra={**_tag_detail(key), "TagValue": value[:MAX_TAG_VALUE]},
        )


def _tag_detail(key: str) -> dict[str, str]:
    return {"TagKey": key[:MAX_TAG_KEY]}


def tag_elements(tags: Mapping[str, str]) -> str:
    """Write the content of a Tagging document."""
    pairs = "".join(
        f"<Tag>{xml_element('Key', key)}{xml_element('Value', value)}</Tag>" for key, value in tags.items()
    )
    return f"<TagSet>{pairs}</TagSet>"
