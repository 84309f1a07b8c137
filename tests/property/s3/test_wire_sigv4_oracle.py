"""botocore signs, we verify, and the other way round; and one spelling signed, another one sent."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from meshwire.errors import S3Error
from meshwire.http_values import dates
from meshwire.s3.operations import PutObject
from meshwire.s3.parse_request import RequestHead, parse_request
from meshwire.sigv4 import Credential, presign, read_claim, sign, verify

if TYPE_CHECKING:
    from meshwire.sigv4 import Claim

SECRET = "s3cr3t/+="
CREDENTIAL = Credential("AKID", SECRET)
HOST = "127.0.0.1:9000"
NOW = 1_700_000_000

keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)
names = st.text("abcxyz-", min_size=1, max_size=10)
values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30).map(str.strip)
parameters = st.dictionaries(
    names, st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=4
)
# What the many URL builders in use leave unescaped.
laxities = st.sampled_from(["/~", "/", "/~+", "/~!*'()", "/~;:@&=+$,", "/~!$&'()*+,;=:@"])
payloads = st.sampled_from(
    [
        "UNSIGNED-PAYLOAD",
        "a" * 64,
        "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
    ]
)


def check(head: RequestHead, secret: str = SECRET) -> Claim:
    claim = read_claim(head)
    assert claim is not None
    now = dates.parse_amz(claim.timestamp)
    assert now is not None
    verify(claim, head, secret, now)
    return claim


def encoded(query: dict[str, str]) -> str:
    return "&".join(
        f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in query.items()
    )


def head_of(request: AWSRequest) -> RequestHead:
    prepared = request.prepare()
    parts = urlsplit(prepared.url)
    headers = {
        name.lower(): value if isinstance(value, str) else value.decode()
        for name, value in prepared.headers.items()
    }
    return RequestHead(prepared.method, parts.path, parts.query, {"host": parts.netloc, **headers})


@given(keys, parameters, st.dictionaries(names, values, max_size=3), laxities, payloads)
def test_botocore_header_signatures_verify(
    key: str, query: dict[str, str], metadata: dict[str, str], safe: str, payload: str
) -> None:
    url = f"http://{HOST}/bucket/{quote(key, safe=safe)}" + (f"?{encoded(query)}" if query else "")
    headers = {f"x-amz-meta-{name}": value for name, value in metadata.items()}
    request = AWSRequest("PUT", url, headers={**headers, "X-Amz-Content-SHA256": payload})
    request.context["payload_signing_enabled"] = payload != "UNSIGNED-PAYLOAD"
    auth = S3SigV4Auth(Credentials("AKID", SECRET), "s3", "eu-west-1")
    auth.payload = lambda _: payload
    auth.add_auth(request)
    assert check(head_of(request)).payload_hash == payload


@given(keys, parameters, laxities, st.integers(1, 604_800))
def test_botocore_presigned_urls_verify(key: str, query: dict[str, str], safe: str, expires: int) -> None:
    url = f"http://{HOST}/bucket/{quote(key, safe=safe)}"
    request = AWSRequest("GET", url, params=query)
    S3SigV4QueryAuth(Credentials("AKID", SECRET), "s3", "eu-west-1", expires=expires).add_auth(request)
    assert check(head_of(request)).expires == expires


@given(keys, parameters, laxities, st.sampled_from(["+", "%20"]))
def test_one_spelling_signed_another_sent(key: str, query: dict[str, str], safe: str, space: str) -> None:
    """SigV4's own encoding is signed; the wire has what some HTTP library made of it."""
    signed = RequestHead("GET", "/bucket/" + quote(key, safe="/-_.~"), encoded(query), {"host": HOST})
    added = sign(signed, CREDENTIAL, region="r", timestamp=NOW, payload_hash="UNSIGNED-PAYLOAD")
    wire_query = signed.raw_query.replace("%20", space)
    sent = RequestHead("GET", "/bucket/" + quote(key, safe=safe), wire_query, {**signed.headers, **added})
    check(sent)


@given(keys, keys)
def test_a_signature_is_of_one_key_only(key: str, other: str) -> None:
    head = RequestHead("GET", "/bucket/" + quote(key), "", {"host": HOST})
    added = sign(head, CREDENTIAL, region="r", timestamp=NOW, payload_hash="UNSIGNED-PAYLOAD")
    moved = RequestHead("GET", "/bucket/" + quote(other), "", {"host": HOST, **added})
    if key == other:
        check(moved)
        return
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        check(moved)


@given(keys, st.dictionaries(st.sampled_from(["response-content-type", "x-id"]), keys, max_size=2))
def test_our_presigned_urls_verify_and_parse(key: str, query: dict[str, str]) -> None:
    url = f"http://{HOST}/bucket/{quote(key)}" + (f"?{encoded(query)}" if query else "")
    signed = presign("GET", url, CREDENTIAL, region="us-east-1", expires=60, timestamp=NOW)
    parts = urlsplit(signed)
    check(RequestHead("GET", parts.path, parts.query, {"host": HOST}))
    assert dict(parse_qsl(parts.query, keep_blank_values=True)).items() >= query.items()


@given(
    st.text(max_size=40),
    st.text(max_size=200)
    | st.from_regex(r"(X-Amz-(Algorithm|Credential|Date|Expires|Signature)=[^&]{0,9}&){1,7}"),
    st.text(max_size=200)
    | st.from_regex(r"AWS4-HMAC-SHA256 (Credential|SignedHeaders|Signature)=[a-z0-9/,= ]{0,99}"),
    st.text(max_size=30),
)
def test_any_text_is_a_claim_or_an_s3_error(path: str, query: str, authorization: str, other: str) -> None:
    for headers in ({"authorization": authorization, "x-amz-date": other, "x-amz-content-sha256": other}, {}):
        head = RequestHead("GET", "/" + path, query, {"host": other, **headers})
        try:
            claim = read_claim(head)
            if claim is not None:
                verify(claim, head, SECRET, NOW)
        except S3Error:
            continue
        assert claim is None, "nobody knows a signature by chance"


@given(st.text(max_size=60), st.text(max_size=60))
def test_verifying_odd_targets_raises_nothing_else(path: str, query: str) -> None:
    head = RequestHead("GET", "/" + path, query, {"host": HOST})
    try:
        added = sign(
            RequestHead("GET", "/", "", head.headers),
            CREDENTIAL,
            region="r",
            timestamp=NOW,
            payload_hash="a" * 64,
        )
        check(RequestHead("GET", head.raw_path, head.raw_query, {**head.headers, **added}))
    except S3Error:
        return


def test_parsing_sees_hoisted_headers() -> None:
    url = presign(
        "PUT",
        f"http://{HOST}/bucket/k?x-amz-meta-note=a%20b&x-amz-checksum-crc32=AAAAAA%3D%3D",
        CREDENTIAL,
        region="us-east-1",
        expires=60,
        timestamp=NOW,
    )
    parts = urlsplit(url)
    operation = parse_request(RequestHead("PUT", parts.path, parts.query, {"host": HOST}))
    assert isinstance(operation, PutObject)
    assert operation.headers.metadata == {"note": "a b"}
    # A checksum there is that of no body; AWS signs it and judges nothing by it.
    assert operation.digests.checksums == {}
