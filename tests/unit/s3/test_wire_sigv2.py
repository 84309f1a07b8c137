"""Presigned URLs of signature version 2: Amazon's example, botocore's own, and what must not pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import boto3
import pytest
from botocore.auth import HmacV1Auth, HmacV1QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from meshwire.errors import S3Error
from meshwire.http_values import dates, percent_encoding
from meshwire.s3 import operations as ops
from meshwire.s3.parse_request import RequestHead, parse_request
from meshwire.sigv4.sigv2 import read_sigv2_claim, sign_sigv2, sigv2_signature_matches, verify_sigv2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwire.sigv4.sigv2 import SigV2Claim

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
NOW = 1_700_000_000
WEEK = 604_800
HOST = {"host": "h"}

keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=60)
laxities = st.sampled_from(["/~", "/", "/~+", "/~!*'()", "/~;:@&=+$,"])


def expiry_of(head: RequestHead) -> int:
    expires = claim_of(head).expires
    assert expires is not None
    return expires


def claim_of(head: RequestHead) -> SigV2Claim:
    claim = read_sigv2_claim(head)
    assert claim is not None
    return claim


def code_of(head: RequestHead, now: int = NOW, secret: str = SECRET) -> str:
    """`verified`, or the code of the refusal."""
    try:
        verify_sigv2(claim_of(head), head, secret, now)
    except S3Error as error:
        return error.code
    return "verified"


def head_of(method: str, url: str, headers: Mapping[str, str] | None = None) -> RequestHead:
    parts = urlsplit(url)
    return RequestHead(method, parts.path, parts.query, {"host": parts.netloc, **(headers or {})})


def presigned(query: str = "", expires: int = NOW + 60, path: str = "/bucket/k", method: str = "GET") -> str:
    """A query, signed over what it names as it stands there."""
    text = f"{method}\n\n\n{expires}\n{path}{'?' if query else ''}{query}"
    signature = quote(sign_sigv2(text, SECRET), safe="")
    return f"{query}{'&' if query else ''}AWSAccessKeyId=AK&Signature={signature}&Expires={expires}"


def test_amazons_example() -> None:
    """RESTAuthentication, "Query string request authentication alternative": its bucket is in the host."""
    query = (
        "AWSAccessKeyId=AKIAIOSFODNN7EXAMPLE&Signature=NpgCjnDzrM%2BWFzoENXmpNDUsSn8%3D&Expires=1175139620"
    )
    headers = {"host": "johnsmith.s3.amazonaws.com"}
    head = RequestHead("GET", "/photos/puppy.jpg", query, headers, host_bucket="johnsmith")
    assert code_of(head, 1_175_139_620) == "verified"
    assert code_of(head, 1_175_139_621) == "AccessDenied"
    plus = RequestHead("GET", head.raw_path, query.replace("%2B", "+"), headers, host_bucket="johnsmith")
    assert code_of(plus, 1_175_139_600) == "verified"
    assert (
        code_of(RequestHead("HEAD", head.raw_path, query, headers, "johnsmith"), 1_175_139_600) != "verified"
    )
    assert code_of(RequestHead("GET", head.raw_path, query, headers), 1_175_139_600) != "verified"


def client(**config: Any) -> Any:
    return boto3.client(
        "s3",
        endpoint_url="http://127.0.0.1:9000",
        region_name="us-east-1",
        aws_access_key_id="AK",
        aws_secret_access_key=SECRET,
        **config,
    )


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "get_object", {"Key": "a b+c/ü"}),
    ("GET", "get_object", {"Key": "k", "VersionId": "null", "ResponseContentDisposition": 'a; b="c+d é"'}),
    ("HEAD", "head_object", {"Key": "k"}),
    ("DELETE", "delete_object", {"Key": "k"}),
    ("PUT", "put_object", {"Key": "k"}),
    ("PUT", "upload_part", {"Key": "k", "UploadId": "a+b", "PartNumber": 3}),
    ("POST", "create_multipart_upload", {"Key": "k"}),
    ("GET", "list_objects_v2", {"Prefix": "p q"}),
    ("GET", "list_parts", {"Key": "k", "UploadId": "u"}),
]


@pytest.mark.parametrize(("method", "call", "params"), CALLS, ids=[f"{m}-{c}" for m, c, _ in CALLS])
def test_boto3s_default_presigned_urls(method: str, call: str, params: dict[str, Any]) -> None:
    url = client().generate_presigned_url(call, Params={"Bucket": "photos", **params}, ExpiresIn=60)
    head = head_of(method, url)
    expires = expiry_of(head)
    assert code_of(head, expires - 60) == "verified"
    assert code_of(head, expires - 60, secret="another") == "SignatureDoesNotMatch"
    assert code_of(head, expires + 1) == "AccessDenied"
    assert getattr(parse_request(head), "key", params.get("Key")) == params.get("Key")


def test_headers_in_the_url_count_as_sent() -> None:
    """botocore moves x-amz-* and the content type into the query; the content type is then sent, or not."""
    params = {"Bucket": "photos", "Key": "k", "ContentType": "text/x-y", "Metadata": {"a": "b c"}}
    url = client().generate_presigned_url("put_object", Params=params)
    for headers in ({}, {"content-type": "text/x-y"}, {"x-amz-meta-a": "b c"}):
        head = head_of("PUT", url, headers)
        assert code_of(head, expiry_of(head)) == "verified"
        operation = parse_request(head)
        assert isinstance(operation, ops.PutObject)
        assert operation.headers.metadata == {"a": "b c"}
        assert operation.headers.system == {"content-type": "text/x-y"}
    for headers in ({"content-type": "text/html"}, {"x-amz-meta-a": "other"}, {"x-amz-meta-b": "more"}):
        head = head_of("PUT", url, headers)
        assert code_of(head, expiry_of(head)) == "SignatureDoesNotMatch"


def test_a_virtual_host_is_part_of_the_resource() -> None:
    virtual = client(config=Config(s3={"addressing_style": "virtual"}))
    url = virtual.generate_presigned_url("get_object", Params={"Bucket": "photos", "Key": "a/b"})
    head = head_of("GET", url.replace("127.0.0.1", "photos.s3.example.com"))
    if head.raw_path == "/photos/a/b":  # botocore knows better than to put a name before an address
        auth = HmacV1QueryAuth(Credentials("AK", SECRET))
        request = AWSRequest("GET", "http://photos.s3.example.com/a/b", auth_path="/photos/a/b")
        auth.add_auth(request)
        head = head_of("GET", request.url)
    head = RequestHead("GET", head.raw_path, head.raw_query, head.headers, host_bucket="photos")
    assert code_of(head, expiry_of(head)) == "verified"


def test_session_tokens_are_signed_and_stay_out_of_errors() -> None:
    auth = HmacV1QueryAuth(Credentials("AK", SECRET, "t0ken"))
    request = AWSRequest("GET", "http://h/bucket/k")
    auth.add_auth(request)
    head = head_of("GET", request.url)
    claim = claim_of(head)
    assert claim.session_token == "t0ken"
    verify_sigv2(claim, head, SECRET, expiry_of(head))
    other = RequestHead("GET", head.raw_path, head.raw_query.replace("t0ken", "t1ken"), head.headers)
    with pytest.raises(S3Error) as caught:
        verify_sigv2(claim_of(other), other, SECRET, expiry_of(head))
    assert "t1ken" not in f"{caught.value} {caught.value.extra}"


queries = st.sampled_from(["uploads", "uploadId=a%2Bb", "versionId=n&acl", "response-expires=a%20b"])


@given(keys, laxities, queries)
def test_botocores_urls_verify_and_name_one_key(key: str, safe: str, query: str) -> None:
    request = AWSRequest("GET", f"http://h/bucket/{quote(key, safe=safe)}?{query}")
    HmacV1QueryAuth(Credentials("AK", SECRET)).add_auth(request)
    head = head_of("GET", request.url)
    now = expiry_of(head)
    assert code_of(head, now) == "verified"
    moved = RequestHead("GET", head.raw_path + "x", head.raw_query, head.headers)
    assert code_of(moved, now) == "SignatureDoesNotMatch"
    longer = RequestHead("GET", head.raw_path, head.raw_query + "&torrent", head.headers)
    assert code_of(longer, now) == "SignatureDoesNotMatch"


@pytest.mark.parametrize("added", ["attributes", "publicAccessBlock", "ownershipControls", "retention"])
def test_what_version_2_does_not_sign_is_refused(added: str) -> None:
    """Else whoever holds a link could make another operation of it."""
    with pytest.raises(S3Error, match="version 4") as caught:
        read_sigv2_claim(RequestHead("GET", "/bucket/k", f"{presigned()}&{added}", HOST))
    assert caught.value.code == "InvalidRequest"


@pytest.mark.parametrize(
    ("expires", "code"),
    [
        (NOW, "verified"),
        (NOW - 1, "AccessDenied"),
        (NOW + WEEK, "verified"),
        (NOW + WEEK + 900, "verified"),
        (NOW + WEEK + 901, "AccessDenied"),
        (10**17, "AccessDenied"),
    ],
)
def test_expiry(expires: int, code: str) -> None:
    assert code_of(RequestHead("GET", "/bucket/k", presigned(expires=expires), HOST)) == code


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("AWSAccessKeyId=a&Signature=b", "AccessDenied"),
        ("AWSAccessKeyId=a&Expires=1", "AccessDenied"),
        ("Signature=b&Expires=1", "AccessDenied"),
        ("AWSAccessKeyId=&Signature=b&Expires=1", "AccessDenied"),
        ("AWSAccessKeyId=a&Signature=b&Expires=soon", "AccessDenied"),
        ("AWSAccessKeyId=a&Signature=b&Expires=-1", "AccessDenied"),
        ("AWSAccessKeyId=a&Signature=b&Expires=%C2%B2", "AccessDenied"),
        ("AWSAccessKeyId=a&Signature=b&Signature=c&Expires=1", "InvalidArgument"),
        ("AWSAccessKeyId=a&Signature=b&Expires=1&x-amz-content-sha256=z", "InvalidArgument"),
        ("AWSAccessKeyId=a&Signature=%ff&Expires=1", "InvalidURI"),
    ],
)
def test_malformed_queries(query: str, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        read_sigv2_claim(RequestHead("GET", "/bucket/k", query, HOST))
    assert caught.value.code == code


def test_anonymous() -> None:
    for query in ("", "prefix=a", "Expires=5", "X-Amz-Signature=5", "prefix=Signature%3D"):
        assert read_sigv2_claim(RequestHead("GET", "/bucket/k", query, HOST)) is None


@given(st.text(max_size=40), st.text(max_size=80), st.text(max_size=30))
def test_any_text_is_a_claim_or_an_s3_error(path: str, query: str, value: str) -> None:
    full = f"AWSAccessKeyId=a&Signature={query}&Expires={NOW}"
    for raw_query in (query, full):
        head = RequestHead("GET", "/" + path, raw_query, {"host": value, "x-amz-a": value})
        try:
            claim = read_sigv2_claim(head)
            if claim is not None:
                verify_sigv2(claim, head, SECRET, NOW)
        except S3Error:
            continue
        assert claim is None, "nobody knows a signature by chance"


def test_signatures_of_any_text_are_compared() -> None:
    assert not sigv2_signature_matches("text", SECRET, "é")
    with pytest.raises(percent_encoding.PercentError):
        sigv2_signature_matches("text", SECRET, "\ud800")


# --- in the header ----------------------------------------------------------------------------------------


def with_header(method: str, url: str, headers: Mapping[str, str], **options: Any) -> RequestHead:
    """As botocore signs it, with its own Date."""
    request = AWSRequest(method, url, headers=dict(headers), **options)
    HmacV1Auth(Credentials("AK", SECRET, options.pop("token", None))).add_auth(request)
    sent = {name.lower(): value for name, value in request.headers.items()}
    return head_of(method, request.url, sent)


def dated(head: RequestHead) -> int:
    seconds = dates.parse_http(head.headers["date"])
    assert seconds is not None
    return seconds


@pytest.mark.parametrize(
    "query", ["", "?acl", "?uploads", "?partNumber=1&uploadId=a%2Bb", "?prefix=p&max-keys=1"]
)
def test_botocores_headers(query: str) -> None:
    headers = {"Content-Type": "a/b", "Content-MD5": "x==", "x-amz-meta-a": " b  c "}
    head = with_header("PUT", f"http://h/bucket/a%20b{query}", headers)
    now = dated(head)
    assert not claim_of(head).presigned
    assert code_of(head, now) == "verified"
    assert code_of(head, now, secret="another") == "SignatureDoesNotMatch"
    assert (code_of(head, now + 900), code_of(head, now - 900)) == ("verified", "verified")
    assert code_of(head, now + 901) == "RequestTimeTooSkewed"
    for name, value in (("content-type", "a/c"), ("x-amz-meta-b", "1"), ("x-amz-meta-a", "b"), ("date", "")):
        changed = RequestHead("PUT", head.raw_path, head.raw_query, {**head.headers, name: value})
        assert code_of(changed, now) != "verified"


@pytest.mark.parametrize(
    ("method", "target", "date", "signature"),
    [
        ("GET", "/photos/puppy.jpg", "Tue, 27 Mar 2007 19:36:42 +0000", "bWq2s1WEIj+Ydj0vQ697zp+IXMU="),
        ("PUT", "/photos/puppy.jpg", "Tue, 27 Mar 2007 21:15:45 +0000", "MyyxeRY7whkBe+bq8fHCL/2kKUg="),
        ("GET", "/?acl", "Tue, 27 Mar 2007 19:44:46 +0000", "c2WLPFtWHVgbEmeEG93a4cG37dM="),
    ],
)
def test_amazons_headers(method: str, target: str, date: str, signature: str) -> None:
    """RESTAuthentication, "Examples of signing and authenticating REST requests"."""
    headers = {"host": "johnsmith.s3.amazonaws.com", "date": date}
    if method == "PUT":
        headers |= {"content-type": "image/jpeg", "content-length": "94328"}
    headers["authorization"] = f"AWS AKIAIOSFODNN7EXAMPLE:{signature}"
    path, _, query = target.partition("?")
    head = RequestHead(method, path, query, headers, host_bucket="johnsmith")
    signed_at = dates.parse_http(date.replace("+0000", "GMT"))
    assert signed_at is not None
    assert code_of(head, signed_at) == "verified"


def test_x_amz_date_takes_the_place_of_date() -> None:
    """The line of the Date is empty then."""
    date = "Tue, 27 Mar 2007 21:20:26 GMT"
    signature = sign_sigv2(f"DELETE\n\n\n\nx-amz-date:{date}\n/bucket/k", SECRET)
    headers = {"date": "some other", "x-amz-date": date, "authorization": f"AWS AK:{signature}"}
    assert code_of(RequestHead("DELETE", "/bucket/k", "", headers), 1_175_030_426) == "verified"


@pytest.mark.parametrize(
    ("authorization", "code"),
    [("AWS ", "InvalidArgument"), ("AWS AK", "InvalidArgument"), ("AWS :sig", "InvalidArgument")],
)
def test_malformed_headers(authorization: str, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        read_sigv2_claim(RequestHead("GET", "/bucket/k", "", {"authorization": authorization}))
    assert caught.value.code == code


def test_a_header_needs_a_date_and_hoists_nothing() -> None:
    head = RequestHead("GET", "/bucket/k", "", {"host": "h", "authorization": "AWS AK:sig"})
    assert code_of(head) == "AccessDenied"
    signed = with_header("GET", "http://h/bucket/k?prefix=1", {})
    assert code_of(signed, dated(signed)) == "verified"
    with pytest.raises(S3Error, match="only allowed in a presigned URL"):
        read_sigv2_claim(with_header("GET", "http://h/bucket/k?x-amz-meta-a=1", {}))
    with pytest.raises(S3Error, match="version 4"):
        read_sigv2_claim(RequestHead("GET", "/bucket/k", "attributes", head.headers))
