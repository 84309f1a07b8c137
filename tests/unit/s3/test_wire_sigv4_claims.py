"""Claims that are malformed, too old, or not wholly signed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from meshwire.errors import S3Error
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, presign, read_claim, sign, verify

if TYPE_CHECKING:
    from meshwire.sigv4 import Claim

CREDENTIAL = Credential("AKID", "secret", None)
NOW = 1_700_000_000
HOST = {"host": "h"}


def signed(headers: dict[str, str] | None = None, payload_hash: str = "UNSIGNED-PAYLOAD") -> RequestHead:
    head = RequestHead("GET", "/bucket/k", "", {**HOST, **(headers or {})})
    added = sign(head, CREDENTIAL, region="anywhere", timestamp=NOW, payload_hash=payload_hash)
    return RequestHead("GET", "/bucket/k", "", {**head.headers, **added})


def changed(head: RequestHead, **headers: str | None) -> RequestHead:
    merged = {**head.headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
    kept = {name: value for name, value in merged.items() if value is not None}
    return RequestHead(head.method, head.raw_path, head.raw_query, kept)


def claim_of(head: RequestHead) -> Claim:
    claim = read_claim(head)
    assert claim is not None
    return claim


def code_of(head: RequestHead, now: int = NOW, secret: str = "secret") -> str:
    """`verified`, or the code of the refusal."""
    try:
        verify(claim_of(head), head, secret, now)
    except S3Error as error:
        return error.code
    return "verified"


def test_anonymous() -> None:
    assert read_claim(RequestHead("GET", "/bucket/k", "prefix=a", HOST)) is None


def test_any_region_will_do() -> None:
    assert claim_of(signed()).scope.region == "anywhere"
    assert code_of(signed()) == "verified"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"authorization": "Bearer x"}, "InvalidArgument"),
        ({"authorization": ""}, "InvalidArgument"),
        ({"authorization": "AWS4-ECDSA-P256-SHA256 Credential=a"}, "InvalidRequest"),
        ({"authorization": "AWS4-HMAC-SHA256"}, "AuthorizationHeaderMalformed"),
        (
            {"authorization": "AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=host"},
            "AuthorizationHeaderMalformed",
        ),
        ({"x_amz_date": None}, "AccessDenied"),
        ({"x_amz_date": "yesterday"}, "AccessDenied"),
        ({"x_amz_date": "20200101T000000Z"}, "AuthorizationHeaderMalformed"),
        ({"x_amz_content_sha256": None}, "InvalidRequest"),
        ({"x_amz_content_sha256": "abc"}, "InvalidArgument"),
        ({"x_amz_content_sha256": "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD"}, "NotImplemented"),
        ({"x_amz_content_sha256": "0" * 64}, "SignatureDoesNotMatch"),
        ({"host": "other"}, "SignatureDoesNotMatch"),
        ({"x_amz_meta_added": "v"}, "AccessDenied"),
        ({"x_amz_acl": "private"}, "AccessDenied"),
        ({"content_md5": "unsigned is fine"}, "verified"),
        ({"accept_encoding": "unsigned is fine"}, "verified"),
    ],
)
def test_changed_requests(headers: dict[str, str | None], code: str) -> None:
    head = changed(signed(), **headers)
    assert code_of(head) == code


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("/s3/", "/ec2/", "AuthorizationHeaderMalformed"),
        ("aws4_request", "aws5_request", "AuthorizationHeaderMalformed"),
        ("20231114", "2023111", "AuthorizationHeaderMalformed"),
        ("20231114", "20231115", "AuthorizationHeaderMalformed"),
        ("SignedHeaders=", "SignedHeaders=;", "AuthorizationHeaderMalformed"),
        ("Signature=", "Signature=zz", "AuthorizationHeaderMalformed"),
        ("Credential=AKID", "Credential=", "AuthorizationHeaderMalformed"),
        ("host;", "", "AccessDenied"),
        (";x-amz-date", "", "AccessDenied"),
        ("anywhere", "elsewhere", "SignatureDoesNotMatch"),
        (", ", ",", "verified"),
        (", ", " , ", "verified"),
    ],
)
def test_changed_authorization(old: str, new: str, code: str) -> None:
    head = signed()
    assert old in head.headers["authorization"]
    head = changed(head, authorization=head.headers["authorization"].replace(old, new))
    assert code_of(head) == code


@pytest.mark.parametrize(
    ("now", "code"),
    [
        (NOW + 900, "verified"),
        (NOW - 900, "verified"),
        (NOW + 901, "RequestTimeTooSkewed"),
        (0, "RequestTimeTooSkewed"),
    ],
)
def test_skew(now: int, code: str) -> None:
    assert code_of(signed(), now) == code


def test_wrong_secret_shows_what_was_signed() -> None:
    head = signed({"x-amz-meta-a": "b  c"})
    with pytest.raises(S3Error) as caught:
        verify(claim_of(head), head, "another", NOW)
    assert caught.value.code == "SignatureDoesNotMatch"
    assert "another" not in f"{caught.value} {caught.value.extra}"
    assert caught.value.extra["CanonicalRequest"].startswith("GET\n/bucket/k\n\nhost:h\n")
    assert caught.value.extra["StringToSign"].startswith("AWS4-HMAC-SHA256\n20231114T221320Z\n")


def test_session_tokens_stay_out_of_errors() -> None:
    head = RequestHead("GET", "/bucket/k", "", HOST)
    added = sign(
        head,
        Credential("AKID", "secret", "t0ken"),
        region="r",
        timestamp=NOW,
        payload_hash="UNSIGNED-PAYLOAD",
    )
    head = RequestHead("GET", "/bucket/k", "", {**HOST, **added})
    assert claim_of(head).session_token == "t0ken"
    with pytest.raises(S3Error) as caught:
        verify(claim_of(head), head, "another", NOW)
    assert "t0ken" not in str(caught.value.extra)


def test_secrets_have_no_repr() -> None:
    head = signed()
    verified = verify(claim_of(head), head, "secret", NOW)
    assert "secret" not in repr(Credential("AKID", "secret", "secret-token"))
    assert repr(verified.signing_key) not in repr(verified)


def test_http_date_instead_of_amz_date() -> None:
    """SigV4 takes the Date header when there is no x-amz-date."""
    head = signed()
    date = "Tue, 14 Nov 2023 22:13:20 GMT"
    assert claim_of(changed(head, x_amz_date=None, date=date)).timestamp == "20231114T221320Z"


def presigned(**changed: str) -> RequestHead:
    url = presign("GET", "http://h/bucket/k", CREDENTIAL, region="r", expires=60, timestamp=NOW)
    query = url.partition("?")[2]
    for name, value in changed.items():
        old = next(piece for piece in query.split("&") if piece.startswith(f"X-Amz-{name}="))
        query = query.replace(old, value)
    return RequestHead("GET", "/bucket/k", query, HOST)


@pytest.mark.parametrize(
    "expires", ["0", "-1", "604801", "1.5", "", "x", "%C2%B2", "1" * 30], ids=lambda text: text or "empty"
)
def test_expiry_limits(expires: str) -> None:
    with pytest.raises(S3Error) as caught:
        read_claim(presigned(Expires=f"X-Amz-Expires={expires}"))
    assert caught.value.code == "AuthorizationQueryParametersError"


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("Date", "X-Amz-Date=today"),
        ("Date", "X-Amz-Date=20200101T000000Z"),
        ("Algorithm", "X-Amz-Algorithm=AWS4-HMAC-SHA1"),
        ("Credential", "X-Amz-Credential=AKID"),
        ("SignedHeaders", "X-Amz-SignedHeaders=Host"),
        ("SignedHeaders", "a=b"),
        ("Signature", "X-Amz-Signature=abc"),
    ],
)
def test_bad_presigned_fields(field: str, text: str) -> None:
    with pytest.raises(S3Error) as caught:
        read_claim(presigned(**{field: text}))
    assert caught.value.code == "AuthorizationQueryParametersError"


@pytest.mark.parametrize("name", ["X-Amz-Expires", "X%2DAmz-Expires"])
def test_nothing_is_given_twice(name: str) -> None:
    with pytest.raises(S3Error, match="'X-Amz-Expires' appears twice"):
        read_claim(presigned(Expires=f"X-Amz-Expires=60&{name}=61"))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("Signature", "X%2DAmz%2DSignature="),
        ("Credential", "%58-Amz-Credential="),
        ("Algorithm", "X-Amz-Algorith%6d="),
        ("Expires", "X-Amz-%45xpires="),
    ],
)
def test_an_escaped_name_is_the_same_name(field: str, text: str) -> None:
    """The canonical request has the names encoded anew, so a good signature stays good."""
    plain = presigned()
    query = plain.raw_query.replace(f"X-Amz-{field}=", text)
    assert query != plain.raw_query
    head = RequestHead("GET", "/bucket/k", query, HOST)
    assert claim_of(head) == claim_of(plain)
    assert code_of(head) == "verified"
    with pytest.raises(S3Error, match="Only one auth mechanism"):
        read_claim(changed(head, authorization="AWS AK:sig"))


@pytest.mark.parametrize("field", ["Signature", "Credential", "Algorithm", "Expires", "SignedHeaders"])
def test_a_name_in_another_case_is_another_name(field: str) -> None:
    query = presigned().raw_query.replace(f"X-Amz-{field}=", f"x-amz-{field.lower()}=")
    with pytest.raises(S3Error) as caught:
        read_claim(RequestHead("GET", "/bucket/k", query, HOST))
    assert caught.value.code == "AuthorizationQueryParametersError"


def test_both_versions_in_the_query() -> None:
    query = f"{presigned().raw_query}&AWSAccessKeyId=a&Signature=b"
    with pytest.raises(S3Error, match="Only one auth mechanism"):
        read_claim(RequestHead("GET", "/bucket/k", query, HOST))


def test_presigned_takes_no_unsigned_headers() -> None:
    assert code_of(presigned()) == "verified"
    assert code_of(changed(presigned(), x_amz_meta_a="b")) == "AccessDenied"


def test_two_mechanisms() -> None:
    with pytest.raises(S3Error, match="Only one auth mechanism"):
        read_claim(changed(presigned(), authorization="AWS4-HMAC-SHA256 x"))


def test_signature_version_2() -> None:
    """In the query it is `meshwire.sigv4.sigv2`'s; beside a header it is a second mechanism."""
    head = RequestHead("GET", "/b/k", "AWSAccessKeyId=a&Signature=b&Expires=1", HOST)
    assert read_claim(head) is None
    with pytest.raises(S3Error, match="Only one auth mechanism"):
        read_claim(changed(head, authorization="AWS4-HMAC-SHA256 x"))


@pytest.mark.parametrize("expires", [0, 604_801])
def test_presign_limits(expires: int) -> None:
    with pytest.raises(ValueError, match="604800"):
        presign("GET", "http://h/b/k", CREDENTIAL, region="r", expires=expires, timestamp=NOW)
