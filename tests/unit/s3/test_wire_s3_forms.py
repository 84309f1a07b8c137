"""Upload forms: their policy, their signature, and what the fields mean."""

from __future__ import annotations

import base64
import json
from typing import Any

import boto3
import pytest
from botocore.config import Config
from hypothesis import given
from hypothesis import strategies as st

from meshwire.errors import S3Error
from meshwire.s3.bucket_settings import Acl
from meshwire.s3.responses import redirect_location
from meshwire.s3.result_types import PostStored
from meshwire.sigv4 import post_object
from meshwire.sigv4.post_object import parse_post_policy

SECRET = "s3cr3t/+="
EXPIRES = "2030-01-01T00:00:00.000Z"
NOW_MS = 1_800_000_000_000


def encoded(conditions: Any, expiration: Any = EXPIRES, **more: Any) -> str:
    document = {"expiration": expiration, "conditions": conditions, **more}
    return base64.b64encode(json.dumps(document).encode()).decode()


def code_of(fields: dict[str, str], *conditions: Any, now_ms: int = NOW_MS) -> str:
    """`fine`, or the code of the refusal."""
    try:
        parse_post_policy(encoded([{"bucket": "b"}, *conditions])).check(fields, "b", now_ms)
    except S3Error as error:
        return error.code
    return "fine"


@pytest.mark.parametrize(
    ("fields", "conditions", "code"),
    [
        ({"key": "k"}, [{"key": "k"}], "fine"),
        ({"key": "k"}, [{"key": "K"}], "AccessDenied"),
        ({"key": "k"}, [{"KeY": "k"}], "fine"),
        ({"key": "a/b"}, [["starts-with", "$key", "a/"]], "fine"),
        ({"key": "a/b"}, [["StArTs-WiTh", "$KEY", "a/"]], "fine"),
        ({"key": "a/b"}, [["starts-with", "$key", "b"]], "AccessDenied"),
        ({"key": "a/b"}, [["starts-with", "$key", ""]], "fine"),
        ({"key": "a/b"}, [["eq", "$key", "a"]], "AccessDenied"),
        ({"key": "k"}, [], "AccessDenied"),
        ({"key": "k", "x-amz-meta-a": "b"}, [{"key": "k"}], "AccessDenied"),
        ({"key": "k", "x-ignore-a": "b", "policy": "p", "signature": "s"}, [{"key": "k"}], "fine"),
        ({"key": "k", "awsaccesskeyid": "a", "x-amz-signature": "s"}, [{"key": "k"}], "fine"),
        ({"key": "k", "x-amz-credential": "c"}, [{"key": "k"}], "AccessDenied"),
        ({"key": "k"}, [{"key": "k"}, {"acl": "private"}], "AccessDenied"),
        ({"key": "k"}, [{"key": "k"}, ["starts-with", "$x-amz-meta-a", ""]], "AccessDenied"),
        ({"key": "k"}, [{"key": "k"}, {"bucket": "other"}], "AccessDenied"),
        (
            {"key": "k", "content-type": "a/b,a/c"},
            [{"key": "k"}, ["starts-with", "$Content-Type", "a/"]],
            "fine",
        ),
        (
            {"key": "k", "content-type": "a/b,x/c"},
            [{"key": "k"}, ["starts-with", "$Content-Type", "a/"]],
            "AccessDenied",
        ),
    ],
)
def test_conditions(fields: dict[str, str], conditions: list[Any], code: str) -> None:
    assert code_of(fields, *conditions) == code


def test_the_bucket_must_be_a_condition() -> None:
    with pytest.raises(S3Error, match="Extra input fields: bucket"):
        parse_post_policy(encoded([{"key": "k"}])).check({"key": "k"}, "b", NOW_MS)


def test_expiration() -> None:
    end = 1_893_456_000_000
    assert code_of({}, now_ms=end) == "fine"
    assert code_of({}, now_ms=end + 1) == "AccessDenied"


def test_sizes() -> None:
    policy = parse_post_policy(encoded([["content-length-range", 3, "10"], ["Content-Length-Range", 0, 8]]))
    assert (policy.least, policy.most) == (3, 8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not base64!",
        base64.b64encode(b"[]").decode(),
        base64.b64encode(b"{").decode(),
        base64.b64encode(b'{"CONDITIONS": [], "expiration": "2030-01-01T00:00:00Z"}').decode(),
        base64.b64encode(b'{"conditions": [], "EXPIRATION": "2030-01-01T00:00:00Z"}').decode(),
        encoded([], "tomorrow"),
        encoded([], 5),
        encoded({}),
        encoded([{}]),
        encoded([{"a": "b", "c": "d"}]),
        encoded([{"a": 5}]),
        encoded([[]]),
        encoded([["eq", "$a"]]),
        encoded([["eq", "a", "b"]]),
        encoded([["ne", "$a", "b"]]),
        encoded([["content-length-range", 0]]),
        encoded([["content-length-range", -1, 5]]),
        encoded([["content-length-range", 6, 5]]),
        encoded([["content-length-range", True, 5]]),
        encoded(["eq"]),
        encoded([5]),
    ],
)
def test_what_is_no_policy(text: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse_post_policy(text)
    assert (caught.value.code, caught.value.status) == ("InvalidPolicyDocument", 400)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, json_values, st.binary(max_size=30))
def test_any_document_is_a_policy_or_an_error(conditions: Any, expiration: Any, raw: bytes) -> None:
    for text in (encoded(conditions, expiration), encoded([conditions]), base64.b64encode(raw).decode()):
        try:
            outcome = type(parse_post_policy(text)).__name__
        except S3Error as error:
            outcome = error.code
        assert outcome in ("PostPolicy", "InvalidPolicyDocument")


@pytest.mark.parametrize("version", [None, "s3v4"], ids=["sigv2", "sigv4"])
@pytest.mark.parametrize("token", [None, "t0ken"])
def test_boto3s_forms(version: str | None, token: str | None) -> None:
    client = boto3.client(
        "s3",
        endpoint_url="http://127.0.0.1:9000",
        region_name="eu-west-1",
        aws_access_key_id="AK",
        aws_secret_access_key=SECRET,
        aws_session_token=token,
        config=Config(signature_version=version),
    )
    post = client.generate_presigned_post(
        "b",
        "up/${filename}",
        Fields={"acl": "public-read", "x-amz-meta-a": "1"},
        Conditions=[{"acl": "public-read"}, {"x-amz-meta-a": "1"}, ["content-length-range", 1, 9]],
    )
    form = {name.lower(): value for name, value in post["fields"].items()}
    claim = post_object.read_form_claim(form)
    assert claim is not None
    assert (claim.access_key, claim.session_token, claim.scope is None) == ("AK", token, version is None)
    assert post_object.verify_policy_signature(claim, SECRET)
    assert not post_object.verify_policy_signature(claim, "another")
    fields = post_object.expand_filename(form, "C:\\photos\\cat.jpg")
    policy = parse_post_policy(claim.policy)
    policy.check(fields, "b", policy.expires_ms - 1)
    upload = post_object.read_post_object(fields, "b")
    assert (upload.key, upload.acl, upload.headers.metadata) == ("up/cat.jpg", Acl("public-read"), {"a": "1"})


def test_an_anonymous_form_claims_nothing() -> None:
    assert post_object.read_form_claim({"key": "k", "acl": "private"}) is None


@pytest.mark.parametrize(
    "form",
    [
        {"policy": "p"},
        {"policy": "p", "signature": "s"},
        {"policy": "p", "awsaccesskeyid": "a"},
        {"signature": "s", "awsaccesskeyid": "a"},
        {"x-amz-signature": "s"},
        {"policy": "p", "x-amz-signature": "s", "x-amz-algorithm": "AWS4-HMAC-SHA256"},
        {
            "policy": "p",
            "x-amz-signature": "s",
            "x-amz-algorithm": "AWS4-ECDSA",
            "x-amz-credential": "AK/20260101/r/s3/aws4_request",
            "x-amz-date": "20260101T000000Z",
        },
        {
            "policy": "p",
            "x-amz-signature": "s",
            "x-amz-algorithm": "AWS4-HMAC-SHA256",
            "x-amz-credential": "AK/20260101/r/s3/aws4_request",
            "x-amz-date": "20260102T000000Z",
        },
        {
            "policy": "p",
            "x-amz-signature": "s",
            "x-amz-algorithm": "AWS4-HMAC-SHA256",
            "x-amz-credential": "AK",
            "x-amz-date": "20260101T000000Z",
        },
    ],
)
def test_half_a_signature(form: dict[str, str]) -> None:
    with pytest.raises(S3Error) as caught:
        post_object.read_form_claim(form)
    assert caught.value.code == "InvalidArgument"


@given(
    st.dictionaries(st.sampled_from(["policy", "signature", "awsaccesskeyid", "x-amz-signature"]), st.text())
)
def test_any_claim_is_compared(form: dict[str, str]) -> None:
    try:
        claim = post_object.read_form_claim(form)
    except S3Error:
        return
    assert claim is None or not post_object.verify_policy_signature(claim, SECRET)


def test_fields_are_headers() -> None:
    form = {
        "key": "k",
        "content-type": "a/b",
        "cache-control": "no-store",
        "expires": "0",
        "content-md5": "1B2M2Y8AsgTpgAmY7PhCfg==",
        "x-amz-checksum-algorithm": "SHA256",
        "tagging": "<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>",
        "success_action_status": "201",
    }
    upload = post_object.read_post_object(form, "b")
    assert upload.headers.system == {"content-type": "a/b", "cache-control": "no-store", "expires": "0"}
    assert (upload.digests.content_md5, upload.digests.wanted) == ("1B2M2Y8AsgTpgAmY7PhCfg==", ("sha256",))
    assert upload.tags == {"a": "b"}


@pytest.mark.parametrize(
    ("form", "code"),
    [
        ({}, "UserKeyMustBeSpecified"),
        ({"key": "x" * 1025}, "KeyTooLongError"),
        ({"key": "k", "x-amz-server-side-encryption": "aws:kms"}, "NotImplemented"),
        ({"key": "k", "tagging": "<a"}, "MalformedXML"),
        ({"key": "k", "acl": "nobody"}, "InvalidArgument"),
        ({"key": "k", "content-md5": "x"}, "InvalidDigest"),
    ],
)
def test_forms_that_store_nothing(form: dict[str, str], code: str) -> None:
    with pytest.raises(S3Error) as caught:
        post_object.read_post_object(form, "b")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("http://h/done", "http://h/done?bucket=b&key=a%20b%2Fc&etag=%22e%22"),
        ("https://h/done?x=1#top", "https://h/done?x=1&bucket=b&key=a%20b%2Fc&etag=%22e%22#top"),
        ("javascript:alert(1)", ""),
        ("/relative", ""),
        ("http://h/\r\nSet-Cookie: a", ""),
        ("http://[", ""),
    ],
)
def test_redirections(url: str, sent: str) -> None:
    redirect = post_object.read_redirect({"success_action_redirect": url})
    result = PostStored("b", "a b/c", "e", "", redirect=redirect)
    assert (redirect_location(result) if redirect else "") == sent


def test_statuses() -> None:
    given_ = ("200", "201", "204", "404", "")
    assert [post_object.read_status({"success_action_status": s}) for s in given_] == [
        200,
        201,
        204,
        204,
        204,
    ]
