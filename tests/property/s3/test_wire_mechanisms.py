"""What a request does and what policies see of it are the same, however its query is spelt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshd.auth.identity import ANONYMOUS_IDENTITY
from meshd.server.s3.request_auth import ANONYMOUS, VerifiedSigner, request_context
from meshwire.errors import S3Error
from meshwire.s3.parse_request import RequestHead, parse_request
from meshwire.s3.request_head import read_auth_mechanism, read_query
from meshwire.sigv4 import Claim, read_claim
from meshwire.sigv4.sigv2 import SigV2Claim, read_sigv2_claim

if TYPE_CHECKING:
    from collections.abc import Mapping

CONNECTION = cast("Any", SimpleNamespace(remote="", secure=False))
SCOPE = "AK/20231114/r/s3/aws4_request"
SIGNED = "0" * 64
V4 = {
    "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
    "X-Amz-Credential": SCOPE,
    "X-Amz-Date": "20231114T221320Z",
    "X-Amz-Expires": "60",
    "X-Amz-SignedHeaders": "host",
    "X-Amz-Signature": SIGNED,
}
V2 = {"AWSAccessKeyId": "AK", "Signature": "sig", "Expires": "1700000000"}
HEADER_V4 = {
    "authorization": f"AWS4-HMAC-SHA256 Credential={SCOPE}, SignedHeaders=host, Signature={SIGNED}",
    "x-amz-date": "20231114T221320Z",
    "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
}
HEADER_V2 = {"authorization": "AWS AK:sig", "date": "Tue, 14 Nov 2023 22:13:20 GMT"}
MEANING = {
    "x-amz-acl": "public-read",
    "X-Amz-Acl": "private",
    "x-amz-copy-source": "bucket/other",
    "x-amz-meta-a": "b",
    "x-amz-storage-class": "STANDARD",
    "x-amz-security-token": "token",
    "content-type": "text/x",
    "content-md5": "AAAAAAAAAAAAAAAAAAAAAA==",
    "x-id": "PutObject",
}

signatures = st.sampled_from([{}, V4, V4, V4, V2, V2, {**V4, **V2}])
meanings = st.sets(st.sampled_from(sorted(MEANING)), max_size=2)
in_headers = st.sampled_from([{}, {}, {}, HEADER_V4, HEADER_V2])
sent = st.sets(st.sampled_from(["x-amz-acl", "x-amz-meta-b", "content-type"]))


@st.composite
def spelt(draw: st.DrawFn, text: str) -> str:
    """`text` as it is, with characters escaped in either case, or with letters in the other case, too."""
    ways = draw(st.sampled_from([[""], [""], [""], ["", "%X", "%x"], ["", "%X"], ["", "", "%x", "case"]]))
    return "".join(_spell(character, draw(st.sampled_from(ways))) for character in text)


def _spell(character: str, way: str) -> str:
    if way == "case":
        return character.swapcase()
    return f"%{ord(character):02{way[1:]}}" if way else character


@st.composite
def heads(draw: st.DrawFn) -> RequestHead:
    """Requests that may be signed in any way, in several, or in part."""
    whole, names = draw(st.tuples(signatures, meanings))
    dropped = draw(st.sampled_from(["", "", "", *sorted(whole)]))
    query = {name: value for name, value in whole.items() if name != dropped}
    query |= {name: MEANING[name] for name in names}
    pieces = [f"{draw(spelt(name))}={draw(spelt_value(value))}" for name, value in query.items()]
    headers = {"host": "h", **draw(in_headers), **{name: "private" for name in draw(sent)}}
    method, path = (
        draw(st.sampled_from(["GET", "HEAD", "PUT", "DELETE"])),
        draw(st.sampled_from(["/b", "/b/k"])),
    )
    return RequestHead(
        method, path.replace("b", "bucket", 1), "&".join(draw(st.permutations(pieces))), headers
    )


def spelt_value(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from([text.replace("/", "%2F"), "".join(f"%{byte:02x}" for byte in text.encode())])


def claim_of(head: RequestHead) -> Claim | SigV2Claim | None:
    return read_claim(head) or read_sigv2_claim(head)


def headers_acted_on(head: RequestHead) -> Mapping[str, str]:
    """The headers that `parse_request` hands to the operation."""
    seen: list[Mapping[str, str]] = []
    with mock.patch("meshwire.s3.request_headers.reject_unsupported_headers", seen.append):
        parse_request(head)
    return seen[0]


@example(
    RequestHead("PUT", "/bucket/k", "X%2DAmz%2DSignature=0&x-amz-acl=public-read", {"host": "h", **HEADER_V4})
)
@example(
    RequestHead("PUT", "/bucket/k", "X%2DAmz%2DSignature=0&x-amz-acl=public-read", {"host": "h", **HEADER_V2})
)
@example(
    RequestHead(
        "PUT", "/bucket/k", "%53ignature=a&%41WSAccessKeyId=b&content-type=c", {"host": "h", **HEADER_V2}
    )
)
@example(RequestHead("PUT", "/bucket/k", "x-amz-signature=0&x-amz-acl=public-read", {"host": "h"}))
@given(heads())
def test_policies_see_the_headers_that_are_acted_on(head: RequestHead) -> None:
    try:
        claim = claim_of(head)
        acted_on = headers_acted_on(head)
    except S3Error:
        return
    signer = ANONYMOUS if claim is None else VerifiedSigner(ANONYMOUS_IDENTITY, claim, None)
    context = request_context(CONNECTION, head, signer)
    assert dict(context.headers) == dict(acted_on)
    query = read_query(head.raw_query)
    assert context.presigned == read_auth_mechanism(head.headers, query).presigned
    if not context.presigned:
        assert acted_on == head.headers
        assert not any(name.lower().startswith("x-amz-") for name in query.values)


@given(heads())
def test_one_claim_at_most_and_of_the_version_that_is_read(head: RequestHead) -> None:
    try:
        mechanism = read_auth_mechanism(head.headers, read_query(head.raw_query))
        new, old = read_claim(head), read_sigv2_claim(head)
    except S3Error:
        return
    assert (new is None) or (old is None)
    assert isinstance(new, Claim) == mechanism.name.endswith("V4")
    assert isinstance(old, SigV2Claim) == mechanism.name.endswith("V2")
    claim = new or old
    assert mechanism.presigned == (claim is not None and claim.presigned)


@pytest.mark.parametrize("signature", [V4, V2], ids=["version 4", "version 2"])
def test_what_a_presigned_url_carries_counts(signature: Mapping[str, str]) -> None:
    """So that the properties do not hold for want of any such request."""
    query = "&".join(f"{name}={value.replace('/', '%2F')}" for name, value in signature.items())
    head = RequestHead("PUT", "/bucket/k", f"{query}&x-amz-acl=public-read", {"host": "h"})
    assert headers_acted_on(head)["x-amz-acl"] == "public-read"
    context = request_context(CONNECTION, head, VerifiedSigner(ANONYMOUS_IDENTITY, claim_of(head), None))
    assert (context.presigned, context.headers["x-amz-acl"]) == (True, "public-read")


def test_blanks_around_a_value_are_not_part_of_it() -> None:
    """As in a header; a condition would see others than the operation does."""
    query = "&".join(f"{name}={value.replace('/', '%2F')}" for name, value in V4.items())
    to = "x-amz-website-redirect-location=%20http:%2F%2Felsewhere%09"
    head = RequestHead("PUT", "/bucket/k", f"{query}&{to}", {"host": "h"})
    operation = cast("Any", parse_request(head))
    context = request_context(CONNECTION, head, VerifiedSigner(ANONYMOUS_IDENTITY, claim_of(head), None))
    seen = context.headers["x-amz-website-redirect-location"]
    assert seen == operation.headers.system["x-amz-website-redirect-location"] == "http://elsewhere"
