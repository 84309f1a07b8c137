"""Nothing counts in a request that its signature does not cover, or that policies do not see."""

from __future__ import annotations

import http.client
import json
import uuid
from contextlib import closing
from email.utils import formatdate
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from botocore.config import Config
from urllib3.filepost import encode_multipart_formdata

from meshwire.http_values import dates
from meshwire.sigv4.signer import hmac_sha256, signing_key, string_to_sign
from meshwire.sigv4.sigv2 import sign_sigv2
from tests.support.daemons import Daemon
from tests.support.s3_raw import Answer, Wire, now

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

OTHER = ("OTHERKEY", "the-secret-of-the-other")
FULL = "bucket-owner-full-control"
# Spellings of a name that mean the same when decoded, and one that S3 does not know.
PRESIGNED = [
    "X-Amz-Signature=0",
    "X%2DAmz%2DSignature=0",
    "X-Amz-%53ignature=0",
    "%58-amz-Signature=0",
    "X%2dAmz-Credential=0",
    "X-Amz%2DAlgorithm=AWS4-HMAC-SHA256",
    "x-amz-signature=0",
    "AWSAccessKeyId=a&Signature=b&Expires=1",
    "%41WSAccessKeyId=a&%53ignature=b&Expires=1",
    "%53ignature=b",
]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with another user than root, which takes every kind of signature."""
    users = tmp_path_factory.mktemp("users") / "users.yaml"
    users.write_text(f"- {{user_id: other, access_key: {OTHER[0]}, secret_key: {OTHER[1]}}}\n")
    with Daemon.start(args=("--users", str(users), "--sigv2", "all")) as daemon:
        yield daemon
        assert "Traceback" not in daemon.output()


@pytest.fixture
def root(node: Daemon) -> Iterator[Any]:
    with closing(node.client()) as client:
        yield client


@pytest.fixture
def wire(node: Daemon) -> Iterator[Wire]:
    with closing(Wire(node.endpoint, *OTHER)) as wire:
        yield wire


@pytest.fixture
def bucket(root: Any) -> str:
    """Of root; the other user may write to it, but not make anything public."""
    name = f"b{uuid.uuid4().hex}"
    root.create_bucket(Bucket=name)
    objects = f"arn:aws:s3:::{name}/*"
    writing = ["s3:PutObject", "s3:PutObjectAcl", "s3:GetObject"]
    statements = [
        {"Effect": "Allow", "Principal": {"AWS": "other"}, "Action": writing, "Resource": objects},
        {
            "Effect": "Deny",
            "Principal": "*",
            "Action": writing[:2],
            "Resource": objects,
            "Condition": {"StringLike": {"s3:x-amz-acl": "public-*"}},
        },
    ]
    set_policy(root, name, statements)
    return name


def set_policy(root: Any, bucket: str, statements: Sequence[Mapping[str, Any]]) -> None:
    policy = {"Version": "2012-10-17", "Statement": statements}
    root.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))


def keys_of(root: Any, bucket: str) -> list[str]:
    return [entry["Key"] for entry in root.list_objects_v2(Bucket=bucket).get("Contents", [])]


# --- x-amz-* parameters of requests that are not presigned ----------------------------------------------


@pytest.mark.parametrize("marker", PRESIGNED)
def test_a_signed_header_beside_what_presigns(root: Any, wire: Wire, bucket: str, marker: str) -> None:
    """A condition on a header holds however the query is spelt."""
    denied = wire.call("PUT", f"/{bucket}/k", b"x", headers={"x-amz-acl": "public-read"})
    assert (denied.status, denied.code) == (403, "AccessDenied")
    for added in ("", "&x-amz-acl=public-read", "&x%2Damz-acl=public-read"):
        answer = wire.call("PUT", f"/{bucket}/k?{marker}{added}", b"x")
        assert (answer.status, answer.code) == (400, "InvalidArgument"), answer.body
    assert keys_of(root, bucket) == []


@pytest.mark.parametrize("name", ["x-amz-acl", "X-Amz-Acl", "x%2Damz-acl", "%58-AMZ-ACL"])
def test_parameters_that_only_presigned_urls_have(wire: Wire, node: Daemon, bucket: str, name: str) -> None:
    answer = wire.call("PUT", f"/{bucket}/k?{name}=public-read", b"x")
    assert (answer.status, answer.code) == (400, "InvalidArgument")
    message = ElementTree.fromstring(answer.body).findtext("Message")
    assert message is not None
    assert "only allowed in a presigned URL" in message
    request = f"GET /{bucket}/k?{name}=public-read HTTP/1.1\r\nHost: {wire.host}\r\n\r\n"
    answer = wire.exchange(request.encode(), method="GET")
    assert (answer.status, answer.code) == (400, "InvalidArgument")


def signed_with_version_2(wire: Wire, target: str, signed: str) -> bytes:
    """A PUT of `target`, whose signature is that of `signed`."""
    date = formatdate(usegmt=True)
    signature = sign_sigv2(f"PUT\n\n\n{date}\n{signed}", wire.secret_key)
    lines = [
        f"PUT {target} HTTP/1.1",
        f"Host: {wire.host}",
        f"Date: {date}",
        f"Authorization: AWS {wire.access_key}:{signature}",
        "Content-Length: 1",
    ]
    return "\r\n".join([*lines, "", "x"]).encode()


@pytest.mark.parametrize(
    "added",
    [
        "x-amz-acl=public-read&x-amz-meta-evil=1&x-amz-website-redirect-location=http://evil/",
        "x-amz-copy-source={bucket}/source",
    ],
)
@pytest.mark.parametrize("marker", ["", *(f"{marker}&" for marker in PRESIGNED)])
def test_nothing_is_added_to_a_header_of_version_2(
    root: Any, wire: Wire, bucket: str, marker: str, added: str
) -> None:
    root.put_object(Bucket=bucket, Key="source", Body=b"secret")
    plain = f"/{bucket}/k"
    assert wire.exchange(signed_with_version_2(wire, plain, plain)).status == 200
    target = f"{plain}?{marker}{added.format(bucket=bucket)}"
    answer = wire.exchange(signed_with_version_2(wire, target, plain))
    assert (answer.status, answer.code) == (400, "InvalidArgument")
    stored = root.get_object(Bucket=bucket, Key="k")
    assert (stored["Body"].read(), stored["Metadata"]) == (b"x", {})


def test_presigned_urls_are_judged_by_what_they_carry(node: Daemon, root: Any, bucket: str) -> None:
    """The counterpart: there the parameters are signed, count as headers, and policies see them."""
    for version in (None, "s3v4"):
        with closing(
            node.client(
                aws_access_key_id=OTHER[0],
                aws_secret_access_key=OTHER[1],
                config=Config(signature_version=version),
            )
        ) as other:
            for acl, status in ((FULL, 200), ("public-read", 403)):
                params = {"Bucket": bucket, "Key": "k", "ACL": acl, "Metadata": {"a": "b"}}
                url = urlsplit(other.generate_presigned_url("put_object", Params=params))
                with closing(
                    http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
                ) as connection:
                    signed = {"x-amz-acl": acl, "x-amz-meta-a": "b"} if version else {}
                    connection.request("PUT", f"{url.path}?{url.query}", b"x", signed)
                    assert connection.getresponse().status == status
            assert root.head_object(Bucket=bucket, Key="k")["Metadata"] == {"a": "b"}


# --- how long, and for where, a signature is good -----------------------------------------------------------

EXPIRED = (403, "AccessDenied", "Request has expired")
NOT_YET = (403, "AccessDenied", "Request is not valid yet")
NUMBER = (400, "AuthorizationQueryParametersError", "X-Amz-Expires should be a number")
LEAST = (400, "AuthorizationQueryParametersError", "at least 1 second")
WEEK = 604_800
MOST = (400, "AuthorizationQueryParametersError", "less than a week")


@pytest.mark.parametrize(
    ("expires", "signed", "refusal"),
    [
        ("60", 0, None),
        ("1", 0, None),
        ("01", 0, None),
        (f"{WEEK}", 0, None),
        (f"{WEEK}", -WEEK + 60, None),
        ("60", 880, None),
        ("1", -5, EXPIRED),
        (f"{WEEK}", -WEEK - 5, EXPIRED),
        ("60", 960, NOT_YET),
        (f"{WEEK}", WEEK, NOT_YET),
        ("0", 0, LEAST),
        ("-1", 0, LEAST),
        (f"{WEEK + 1}", 0, MOST),
        ("9" * 18, 0, MOST),
        ("9" * 40, 0, NUMBER),
        ("1.5", 0, NUMBER),
        ("+60", 0, NUMBER),
        ("6%30", 0, None),
        ("%D9%A6", 0, NUMBER),
    ],
)
def test_how_long_a_presigned_url_is_good(
    node: Daemon, root: Any, bucket: str, expires: str, signed: int, refusal: tuple[int, str, str] | None
) -> None:
    root.put_object(Bucket=bucket, Key="k", Body=b"x")
    url = presigned_of(node, bucket, region="us-east-1", expires=expires, when=now() + signed)
    assert_refused(ask(url), refusal)


@pytest.mark.parametrize(
    ("scope", "signed_for", "refusal"),
    [
        (("eu-north-7", "s3"), ("eu-north-7", "s3"), None),
        (("us-east-1", "s3"), ("eu-north-7", "s3"), (403, "SignatureDoesNotMatch", "")),
        (("us-east-1", "ec2"), ("us-east-1", "ec2"), (400, "AuthorizationQueryParametersError", "ec2")),
        (("us-east-1", "s3"), ("us-east-1", "ec2"), (403, "SignatureDoesNotMatch", "")),
    ],
)
def test_where_a_presigned_url_is_good(
    node: Daemon,
    root: Any,
    bucket: str,
    scope: tuple[str, str],
    signed_for: tuple[str, str],
    refusal: tuple[int, str, str] | None,
) -> None:
    """Any region is taken, as long as it is the one that was signed."""
    root.put_object(Bucket=bucket, Key="k", Body=b"x")
    url = presigned_of(node, bucket, region=scope[0], service=scope[1], signed_for=signed_for)
    assert_refused(ask(url), refusal)


@pytest.mark.parametrize(
    ("when", "code"), [(-880, ""), (880, ""), (-960, "RequestTimeTooSkewed"), (960, "RequestTimeTooSkewed")]
)
def test_how_long_a_signed_header_is_good(wire: Wire, bucket: str, when: int, code: str) -> None:
    answer = wire.call("PUT", f"/{bucket}/k", b"x", when=now() + when)
    assert (answer.status, answer.code if code else "") == (403 if code else 200, code)


def test_a_request_is_carried_out_as_often_as_it_is_sent(root: Any, wire: Wire, bucket: str) -> None:
    """While its signature is good, as on AWS; with a condition it is carried out once."""
    again = wire.put(f"/{bucket}/k", b"signed once")
    once = wire.put(f"/{bucket}/once", b"signed once", headers={"if-none-match": "*"})
    assert [wire.exchange(request).status for request in (again, once)] == [200, 200]
    root.put_object(Bucket=bucket, Key="k", Body=b"newer")
    assert [wire.exchange(request).status for request in (again, once)] == [200, 412]
    assert root.get_object(Bucket=bucket, Key="k")["Body"].read() == b"signed once"


def presigned_of(
    node: Daemon,
    bucket: str,
    *,
    region: str,
    service: str = "s3",
    expires: str = "60",
    when: int | None = None,
    signed_for: tuple[str, str] | None = None,
) -> str:
    """The target of a GET that another signer than ours made: it checks nothing."""
    seconds = now() if when is None else when
    stamp = dates.format_amz(seconds)
    credential = f"{node.access_key}/{stamp[:8]}/{region}/{service}/aws4_request"
    query = "&".join(
        [
            "X-Amz-Algorithm=AWS4-HMAC-SHA256",
            f"X-Amz-Credential={credential.replace('/', '%2F')}",
            f"X-Amz-Date={stamp}",
            f"X-Amz-Expires={expires}",
            "X-Amz-SignedHeaders=host",
        ]
    )
    path, host = f"/{bucket}/k", urlsplit(node.endpoint).netloc
    region, service = signed_for or (region, service)
    key = signing_key(node.secret_key, stamp[:8], region, service)
    canonical = f"GET\n{path}\n{query}\nhost:{host}\n\nhost\nUNSIGNED-PAYLOAD"
    text = string_to_sign(canonical, stamp, f"{stamp[:8]}/{region}/{service}/aws4_request")
    return f"{node.endpoint}{path}?{query}&X-Amz-Signature={hmac_sha256(key, text.encode()).hex()}"


def ask(url: str) -> Answer:
    where = urlsplit(url)
    with closing(http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)) as connection:
        connection.request("GET", f"{where.path}?{where.query}")
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())


def assert_refused(answer: Answer, refusal: tuple[int, str, str] | None) -> None:
    if refusal is None:
        assert (answer.status, answer.body) == (200, b"x"), answer.body
        return
    assert (answer.status, answer.code) == refusal[:2], answer.body
    assert refusal[2] in answer.body.decode()


# --- forms ------------------------------------------------------------------------------------------------


def post(node: Daemon, bucket: str, fields: Mapping[str, str], headers: Mapping[str, str]) -> Answer:
    body, content_type = encode_multipart_formdata([*fields.items(), ("file", ("f", b"x"))])
    where = urlsplit(node.endpoint)
    with closing(http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)) as connection:
        connection.request("POST", f"/{bucket}", body, {"Content-Type": content_type, **headers})
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())


@pytest.mark.parametrize(
    ("header", "value"),
    [("x-amz-acl", FULL), ("x-amz-storage-class", "STANDARD"), ("x-amz-website-redirect-location", "/a")],
)
def test_headers_beside_a_form_fulfil_no_condition(
    node: Daemon, root: Any, bucket: str, header: str, value: str
) -> None:
    allowed = {
        "Effect": "Allow",
        "Principal": {"AWS": "other"},
        "Action": ["s3:PutObject", "s3:PutObjectAcl"],
        "Resource": f"arn:aws:s3:::{bucket}/*",
        "Condition": {"StringEquals": {f"s3:{header}": value}},
    }
    owner = root.get_bucket_acl(Bucket=bucket)["Owner"]["ID"]
    set_policy(root, bucket, [allowed])
    with closing(node.client(aws_access_key_id=OTHER[0], aws_secret_access_key=OTHER[1])) as other:
        plain = other.generate_presigned_post(bucket, "k")["fields"]
        field = header.replace("x-amz-acl", "acl")
        right = other.generate_presigned_post(bucket, "k", {field: value}, [{field: value}])["fields"]
    assert post(node, bucket, plain, {}).code == "AccessDenied"
    assert post(node, bucket, plain, {header: value}).code == "AccessDenied"
    assert keys_of(root, bucket) == []
    assert post(node, bucket, right, {}).status == 204
    wrong = {"x-amz-expected-bucket-owner": "somebody"}
    assert post(node, bucket, right, wrong).code == "AccessDenied"
    assert post(node, bucket, right, {"x-amz-expected-bucket-owner": owner}).status == 204


def test_what_a_form_cannot_say_comes_from_the_request(node: Daemon, root: Any, bucket: str) -> None:
    allowed = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{bucket}/*",
        "Condition": {"StringLike": {"aws:Referer": "https://page.example/*"}},
    }
    set_policy(root, bucket, [allowed])
    referer = {"Referer": "https://page.example/upload"}
    assert post(node, bucket, {"key": "k"}, referer).status == 204
    elsewhere = {"Referer": "https://other.example/"}
    assert post(node, bucket, {"key": "k", **referer}, elsewhere).code == "AccessDenied"
    assert post(node, bucket, {"key": "k", **referer}, {}).code == "AccessDenied"
