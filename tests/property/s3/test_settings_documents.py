"""Documents of settings: any bytes are values or an S3Error, and what is written reads back the same."""

from __future__ import annotations

import string
from collections import Counter
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwire.errors import S3Error
from meshwire.s3 import acl_xml, lifecycle_xml, settings_xml
from meshwire.s3.bucket_settings import (
    ALL_USERS,
    AUTHENTICATED_USERS,
    OWNERSHIPS,
    CorsRule,
    Grant,
    LifecycleRule,
    PublicAccessBlock,
)
from meshwire.s3.result_types import Owner
from tests.support.xml_text import is_plain

if TYPE_CHECKING:
    from collections.abc import Callable

PARSERS: list[Callable[[bytes], object]] = [
    acl_xml.parse_acl,
    lifecycle_xml.parse_lifecycle,
    settings_xml.parse_cors,
    settings_xml.parse_ownership,
    settings_xml.parse_public_access,
    settings_xml.parse_versioning,
]
ROOTS = [
    "AccessControlPolicy",
    "LifecycleConfiguration",
    "CORSConfiguration",
    "OwnershipControls",
    "PublicAccessBlockConfiguration",
    "VersioningConfiguration",
]
NAMES = [
    *("Owner", "ID", "AccessControlList", "Grant", "Grantee", "URI", "EmailAddress", "Permission"),
    *("Rule", "Status", "Prefix", "Filter", "And", "Tag", "Key", "Value", "Expiration", "Days", "Date"),
    *(
        "ExpiredObjectDeleteMarker",
        "NoncurrentVersionExpiration",
        "NoncurrentDays",
        "NewerNoncurrentVersions",
    ),
    *("AbortIncompleteMultipartUpload", "DaysAfterInitiation", "ObjectSizeGreaterThan", "ObjectSizeLessThan"),
    *("CORSRule", "AllowedOrigin", "AllowedMethod", "AllowedHeader", "ExposeHeader", "MaxAgeSeconds"),
    *("ObjectOwnership", "BlockPublicAcls", "MfaDelete"),
]
VALUES = [
    *("", "1", "0", "-1", "true", "false", "Enabled", "Disabled", "READ", "GET", "*", "²", "k"),
    *(ALL_USERS, "2024-01-01T00:00:00Z", "9999-12-31", "99999999999999999999"),
]
leaves = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)).map(lambda p: f"<{p[0]}>{p[1]}</{p[0]}>")
trees = st.recursive(
    leaves,
    lambda inner: st.tuples(st.sampled_from(NAMES), st.lists(inner, max_size=4)).map(
        lambda p: f"<{p[0]}>{''.join(p[1])}</{p[0]}>"
    ),
)
documents = st.tuples(st.sampled_from(ROOTS), st.lists(trees, max_size=3)).map(
    lambda p: f"<{p[0]}>{''.join(p[1])}</{p[0]}>".encode()
)


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@given(body=st.binary(max_size=100) | documents)
def test_any_document_is_a_value_or_an_s3_error(parse: Callable[[bytes], object], body: bytes) -> None:
    try:
        parse(body)
    except S3Error as error:
        assert error.status in {400, 501}  # noqa: PT017  a value is as welcome


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda text: is_plain(text) and text == text.strip() and "," not in text
)
permissions = st.sampled_from(["FULL_CONTROL", "READ", "WRITE", "READ_ACP", "WRITE_ACP"])
ids = texts.filter(lambda text: not text.startswith(acl_xml.MAILTO))
grants = st.builds(Grant, ids | st.sampled_from([ALL_USERS, AUTHENTICATED_USERS]), permissions)


@given(ids, st.lists(grants, max_size=5).map(tuple))
def test_acls_are_read_back(owner: str, given_: tuple[Grant, ...]) -> None:
    body = acl_xml.acl_document(Owner(owner, "name"), given_, {}).encode()
    read = acl_xml.parse_acl(body)
    assert read.owner == owner
    assert Counter(read.acl.grants) == Counter(given_)


@given(st.lists(grants, min_size=1, max_size=5))
def test_grants_in_headers_are_the_grants_of_a_document(listed: list[Grant]) -> None:
    quoted = [grant for grant in listed if '"' not in grant.grantee]
    headers: dict[str, str] = {}
    for grant in quoted:
        name = f"x-amz-grant-{grant.permission.lower().replace('_', '-')}"
        kind = "uri" if grant.grantee in acl_xml.GROUPS else "id"
        entry = f'{kind}="{grant.grantee}"'
        headers[name] = f"{headers[name]}, {entry}" if name in headers else entry
    acl = acl_xml.read_acl_headers(headers)
    assert (set() if acl is None else set(acl.grants)) == set(quoted)


origins = texts.filter(lambda text: text.count("*") <= 1)
tokens = st.text(string.ascii_letters + "-", min_size=1, max_size=10)


def cors_rule(
    origin: list[str], method: list[str], header: list[str], exposed: list[str], age: int | None, name: str
) -> CorsRule:
    lowered = tuple(text.lower() for text in header)
    return CorsRule(tuple(origin), tuple(method), lowered, tuple(exposed), age, name, tuple(header))


cors_rules = st.builds(
    cors_rule,
    st.lists(origins, min_size=1, max_size=3),
    st.lists(st.sampled_from(["GET", "PUT", "HEAD", "POST", "DELETE"]), min_size=1, max_size=3),
    st.lists(tokens, max_size=3),
    st.lists(tokens, max_size=3),
    st.none() | st.integers(0, 999_999_999),
    st.just("") | texts,
)


@given(st.lists(cors_rules, min_size=1, max_size=4).map(tuple))
def test_cors_rules_are_read_back(rules: tuple[CorsRule, ...]) -> None:
    assert settings_xml.parse_cors(settings_xml.cors_document(rules)) == rules


@given(st.builds(PublicAccessBlock, st.booleans(), st.booleans(), st.booleans(), st.booleans()))
def test_public_access_blocks_are_read_back(block: PublicAccessBlock) -> None:
    assert settings_xml.parse_public_access(settings_xml.public_access_document(block)) == block


@given(st.sampled_from(sorted(OWNERSHIPS)))
def test_ownership_is_read_back(value: str) -> None:
    assert settings_xml.parse_ownership(settings_xml.ownership_document(value)) == value


days = st.integers(1, 4000)
sizes = st.integers(1, 1 << 45)
tags = st.dictionaries(
    st.text(string.ascii_letters, min_size=1, max_size=8), st.text(string.digits, max_size=8), max_size=3
)


@st.composite
def lifecycle_rules(draw: st.DrawFn) -> LifecycleRule:
    """A rule that S3 would take."""
    forms: list[Literal["prefix", "filter", "empty"]] = ["prefix", "filter", "empty"]
    form = draw(st.sampled_from(forms))
    filtered = form == "filter"
    expiry = draw(st.sampled_from(["", "days", "date", "markers", "kept"]))
    noncurrent, uploads = draw(st.booleans()), draw(st.booleans())
    plain = filtered and not uploads and expiry not in {"markers", "kept"}
    larger = draw(st.none() | st.integers(0, 1 << 45)) if plain else None
    return LifecycleRule(
        draw(texts),
        draw(st.booleans()),
        draw(st.just("") | texts) if form != "empty" else "",
        draw(tags) if plain else {},
        larger,
        draw(st.none() | sizes.map((larger or 0).__add__)) if plain else None,
        draw(days) if expiry == "days" else None,
        draw(st.integers(0, 40_000)) * 86_400 if expiry == "date" else None,
        expiry == "markers",
        draw(days) if noncurrent or not (expiry or uploads) else None,
        draw(st.none() | st.integers(1, 100)) if noncurrent else None,
        draw(days) if uploads else None,
        form,
        expiry == "kept",
    )


@given(st.lists(lifecycle_rules(), min_size=1, max_size=4, unique_by=lambda rule: rule.id).map(tuple))
def test_lifecycle_rules_are_read_back(rules: tuple[LifecycleRule, ...]) -> None:
    assert lifecycle_xml.parse_lifecycle(lifecycle_xml.lifecycle_document(rules)) == rules
