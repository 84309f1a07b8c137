"""Bytes that are no UTF-8, wherever a client can put some: signed for as they came, or refused."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, read_claim, sign
from meshwire.sigv4.signer import chunk_signature, signing_key
from tests.fuzz import wire
from tests.support.daemons import Daemon
from tests.support.s3_raw import now

if TYPE_CHECKING:
    from collections.abc import Iterator

BYTES = (b"\xff\xfe", b"\xed\xa0\x80", "é☃".encode(), b"<\xff>", b"a/\xff=1&b")
HEADERS = [
    "range",
    "if-match",
    "if-modified-since",
    "content-md5",
    "content-type",
    "content-encoding",
    "content-disposition",
    "cache-control",
    "expires",
    "x-amz-meta-a",
    "x-amz-copy-source",
    "x-amz-copy-source-range",
    "x-amz-copy-source-if-match",
    "x-amz-acl",
    "x-amz-grant-read",
    "x-amz-metadata-directive",
    "x-amz-checksum-crc32",
    "x-amz-checksum-zz",
    "x-amz-checksum-type",
    "x-amz-checksum-mode",
    "x-amz-trailer",
    "x-amz-sdk-checksum-algorithm",
    "x-amz-storage-class",
    "x-amz-tagging",
    "x-amz-tagging-directive",
    "x-amz-server-side-encryption",
    "origin",
    "access-control-request-method",
    "x-amz-object-attributes",
    "x-amz-max-parts",
    "x-amz-security-token",
    "x-amz-date",
    "date",
    "user-agent",
    "x-mesh-hop",
    "x-amz-decoded-content-length",
    "x-amz-content-sha256",
    "x-amz-expected-bucket-owner",
    "x-amz-website-redirect-location",
    "x-amz-object-ownership",
    "x-forwarded-for",
    "authorization",
    "host",
]
TARGETS = (
    ("GET", "/bytes/k"),
    ("PUT", "/bytes/l"),
    ("PUT", "/bytes/k?acl"),
    ("OPTIONS", "/bytes/k"),
    ("POST", "/-/snapshots"),
    ("GET", "/-/admin/users"),
)


@pytest.fixture(scope="module")
def own() -> Iterator[Daemon]:
    """A daemon whose subdomains are buckets."""
    with Daemon.start(args=("--domain", "s3.example.com")) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="bytes")
        client.put_object(Bucket="bytes", Key="k", Body=b"here")
        yield daemon
        wire.alive(daemon)


def text(raw: bytes) -> str:
    """As a server reads a header."""
    return raw.decode("utf-8", "surrogateescape")


def signed(
    daemon: Daemon,
    method: str,
    target: str,
    headers: dict[str, str] | None = None,
    *,
    region: str = "us-east-1",
    payload: str = "UNSIGNED-PAYLOAD",
    late: dict[str, str] | None = None,
) -> tuple[bytes, RequestHead]:
    """A head, on the wire and as it is read; `late` headers take the place of signed ones."""
    path, _, query = target.partition("?")
    given = {"host": "h", "content-length": "0", **(headers or {})}
    credential = Credential(daemon.access_key, daemon.secret_key)
    head = RequestHead(method, path, query, given)
    added = sign(head, credential, region=region, timestamp=now(), payload_hash=payload)
    fields = {**given, **added, **(late or {})}
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    raw = "\r\n".join([*lines, "connection: close", "", ""]).encode("utf-8", "surrogateescape")
    return raw, RequestHead(method, path, query, fields)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(("method", "target"), TARGETS)
def test_in_any_header(own: Daemon, method: str, target: str) -> None:
    for name in HEADERS:
        for raw in (BYTES[0], BYTES[4]):
            for changes in ({"headers": {name: text(raw)}}, {"late": {name: text(raw)}}):
                answer = wire.send(own, signed(own, method, target, **changes)[0])  # type: ignore[arg-type]
                assert status(answer) != 500, (name, raw, answer)


@pytest.mark.parametrize("region", BYTES[:4])
@pytest.mark.parametrize("well", [True, False])
def test_in_the_region_that_chunks_are_signed_for(own: Daemon, region: bytes, well: bool) -> None:
    """Any region is accepted, as everywhere; a signature is of its bytes."""
    secret, data, empty = own.secret_key, b"signed", hashlib.sha256(b"").hexdigest()
    payload = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    framing = len(b"0;chunk-signature=\r\n") + 64
    length = 2 * framing + len(data) + 4
    headers = {"content-length": str(length), "x-amz-decoded-content-length": str(len(data))}
    raw, head = signed(own, "PUT", "/bytes/region", headers, region=text(region), payload=payload)
    claim = read_claim(head)
    assert claim is not None
    key = signing_key(secret if well else "another", claim.scope.date, claim.scope.region, "s3")
    rest, previous = b"", claim.signature
    for chunk, digest in ((data, hashlib.sha256(data).hexdigest()), (b"", empty)):
        previous = chunk_signature(key, claim.timestamp, str(claim.scope), previous, digest)
        rest += b"%x;chunk-signature=%s\r\n%s\r\n" % (len(chunk), previous.encode(), chunk)
    assert len(rest) == length
    answer = wire.send(own, raw + rest)
    assert status(answer) == (200 if well else 403), answer
    if well:
        assert own.client().get_object(Bucket="bytes", Key="region")["Body"].read() == data


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS"])
def test_in_the_host_that_names_a_bucket(own: Daemon, method: str) -> None:
    for raw in BYTES[:3]:
        line = b"%s /k HTTP/1.1\r\nhost: %s.s3.example.com\r\n" % (method.encode(), raw)
        answer = wire.send(own, line + b"content-length: 0\r\nconnection: close\r\n\r\n")
        assert 400 <= status(answer) < 500, answer


def test_in_the_target(own: Daemon) -> None:
    for _, target in TARGETS:
        path, mark, query = target.partition("?")
        for raw in (b"\xff", b"%ff", b"%ed%a0%80"):
            for place in (path + text(raw) + mark + query, f"{target}{'&' if mark else '?'}a={text(raw)}"):
                for method in ("GET", "PUT", "DELETE", "POST"):
                    answer = wire.send(own, signed(own, method, place)[0])
                    assert status(answer) != 500, (method, place, answer)
