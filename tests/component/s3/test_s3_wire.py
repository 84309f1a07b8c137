"""Strictness on the wire: signatures, bodies, framing, garbage; spoken on raw sockets."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import urllib.request
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Verified, read_claim
from meshwire.sigv4.signer import chunk_signature, signing_key, trailer_signature
from tests.support.s3_raw import Wire, chunked_body, now, read_answer, read_answers

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

HOUR = 3600


def stored(s3: Any, bucket: str) -> list[str]:
    return [o["Key"] for o in s3.list_objects_v2(Bucket=bucket).get("Contents", [])]


# --- signatures -----------------------------------------------------------------------------------------


def test_a_hand_signed_request_works(wire: Wire, bucket: str) -> None:
    assert wire.call("PUT", f"/{bucket}/k", b"hello").status == 200
    got = wire.call("GET", f"/{bucket}/k")
    assert (got.status, got.body) == (200, b"hello")


def test_an_unknown_key(wire: Wire, bucket: str) -> None:
    stranger = Wire(wire.endpoint, "AKNOBODY", wire.secret_key)
    answer = stranger.call("GET", f"/{bucket}/k")
    assert (answer.status, answer.code) == (403, "InvalidAccessKeyId")
    stranger.close()


def test_a_wrong_secret(wire: Wire, bucket: str) -> None:
    guesser = Wire(wire.endpoint, wire.access_key, "guess")
    answer = guesser.call("PUT", f"/{bucket}/k", b"x")
    assert (answer.status, answer.code) == (403, "SignatureDoesNotMatch")
    assert wire.secret_key.encode() not in answer.body
    guesser.close()


@pytest.mark.parametrize(
    ("skew", "status", "code"),
    [
        (-800, 200, ""),
        (800, 200, ""),
        (-HOUR, 403, "RequestTimeTooSkewed"),
        (HOUR, 403, "RequestTimeTooSkewed"),
    ],
)
def test_the_clock(wire: Wire, bucket: str, skew: int, status: int, code: str) -> None:
    answer = wire.call("PUT", f"/{bucket}/k", b"x", when=now() + skew)
    assert answer.status == status
    assert not code or answer.code == code


def test_the_target_is_signed(wire: Wire, bucket: str) -> None:
    request = wire.head("GET", f"/{bucket}/a").replace(
        f"GET /{bucket}/a".encode(), f"GET /{bucket}/b".encode()
    )
    answer = wire.exchange(request, method="GET")
    assert (answer.status, answer.code) == (403, "SignatureDoesNotMatch")


def test_a_header_that_had_to_be_signed(wire: Wire, s3: Any, bucket: str) -> None:
    body = b"x"
    request = wire.put(f"/{bucket}/k", body, unsigned={"x-amz-meta-evil": "1"})
    answer = wire.exchange(request)
    assert (answer.status, answer.code) == (403, "AccessDenied")
    assert stored(s3, bucket) == []


def test_a_signed_header_that_is_missing(wire: Wire, bucket: str) -> None:
    request = wire.head("GET", f"/{bucket}/k", headers={"x-amz-meta-a": "1"}, drop=("x-amz-meta-a",))
    answer = wire.exchange(request, method="GET")
    assert (answer.status, answer.code) == (403, "SignatureDoesNotMatch")


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("nonsense", 400),
        ("AWS4-HMAC-SHA256", 400),
        ("AWS4-HMAC-SHA256 Credential=a/b/c", 400),
        ("AWS AKID:c2lnbmF0dXJl", 400),  # version 2, which is off in the header
        ("Basic dXNlcjpwYXNz", 400),
        ("Bearer token", 400),
    ],
)
def test_malformed_authorization(wire: Wire, bucket: str, authorization: str, status: int) -> None:
    lines = [
        f"GET /{bucket}/k HTTP/1.1",
        f"host: {wire.host}",
        "x-amz-content-sha256: UNSIGNED-PAYLOAD",
        f"authorization: {authorization}",
    ]
    answer = wire.exchange("\r\n".join([*lines, "", ""]).encode(), method="GET")
    assert answer.status == status
    assert answer.code
    assert answer.headers["x-amz-request-id"]


# --- bodies ---------------------------------------------------------------------------------------------


def test_a_tampered_body(wire: Wire, s3: Any, bucket: str) -> None:
    good = os.urandom(100_000)
    request = wire.put(f"/{bucket}/k", good)
    answer = wire.exchange(request[:-1] + bytes([request[-1] ^ 1]))
    assert (answer.status, answer.code) == (400, "XAmzContentSHA256Mismatch")
    assert stored(s3, bucket) == []


def test_a_short_body(wire: Wire, s3: Any, bucket: str) -> None:
    sock = wire.connect()
    sock.sendall(wire.put(f"/{bucket}/k", bytes(100_000))[:-10])
    sock.shutdown(socket.SHUT_WR)
    answer = read_answer(sock, "PUT")
    assert (answer.status, answer.code) == (400, "IncompleteBody")
    assert stored(s3, bucket) == []


def test_a_truncated_chunked_body(wire: Wire, s3: Any, bucket: str) -> None:
    sock = wire.connect()
    head = wire.head("PUT", f"/{bucket}/k", headers={"transfer-encoding": "chunked"})
    sock.sendall(head + chunked_body([b"abc"])[:-5])
    sock.shutdown(socket.SHUT_WR)
    answer = read_answer(sock, "PUT")
    assert (answer.status, answer.code) == (400, "IncompleteBody")
    assert stored(s3, bucket) == []


def test_a_client_that_has_nothing_more_to_say_is_answered(wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=bytes(2_000_000))
    sock = wire.connect()
    sock.sendall(wire.head("GET", f"/{bucket}/none") + wire.head("GET", f"/{bucket}/k"))
    sock.shutdown(socket.SHUT_WR)
    assert [answer.status for answer in read_answers(sock, 2)] == [404, 200]
    assert sock.recv(1) == b""


def test_a_client_that_vanishes(wire: Wire, s3: Any, bucket: str) -> None:
    sock = wire.connect()
    sock.sendall(wire.put(f"/{bucket}/k", bytes(5_000_000))[:2_000_000])
    sock.close()
    assert stored(s3, bucket) == []
    assert wire.call("PUT", f"/{bucket}/other", b"fine").status == 200


def test_a_long_body(wire: Wire, s3: Any, bucket: str) -> None:
    sock = wire.connect()
    sock.sendall(wire.put(f"/{bucket}/k", b"12345"))
    assert read_answer(sock, "PUT").status == 200
    sock.sendall(b"surplus that is no request\r\n\r\n")
    answer = read_answer(sock)
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"12345"


def test_a_long_body_in_one_go(wire: Wire, s3: Any, bucket: str) -> None:
    sock = wire.connect()
    sock.sendall(wire.put(f"/{bucket}/k", b"12345") + b"surplus that is no request\r\n\r\n")
    stream = b""
    while data := sock.recv(65_536):
        stream += data
    assert stream.rpartition(b"HTTP/1.1 ")[2].startswith(b"400")
    assert stored(s3, bucket) in ([], ["k"])


def test_no_length_at_all(wire: Wire, bucket: str) -> None:
    answer = wire.exchange(wire.head("PUT", f"/{bucket}/k"))
    assert (answer.status, answer.code) == (411, "MissingContentLength")


def test_http_chunks_without_length(wire: Wire, s3: Any, bucket: str) -> None:
    head = wire.head("PUT", f"/{bucket}/k", headers={"transfer-encoding": "chunked"})
    answer = wire.exchange(head + chunked_body([b"abc", b"d" * 70_000]))
    assert answer.status == 200
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"abc" + b"d" * 70_000


def test_too_large(wire: Wire, bucket: str) -> None:
    head = wire.head("PUT", f"/{bucket}/k", headers={"content-length": str((5 << 30) + 1)})
    answer = wire.exchange(head)
    assert (answer.status, answer.code) == (400, "EntityTooLarge")
    assert answer.headers["connection"] == "close"


def test_100_continue_comes_after_admission(wire: Wire, bucket: str) -> None:
    body = b"x" * 1000
    fields = {"content-length": "1000", "expect": "100-continue"}
    sock = wire.connect()
    sock.sendall(wire.head("PUT", f"/{bucket}/k", headers=fields))
    assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    sock.sendall(body)
    assert read_answer(sock, "PUT").status == 200


def test_100_continue_for_an_empty_body(wire: Wire, bucket: str) -> None:
    """botocore asks for it even then, and misreads the connection's next answer when it does not come."""
    sock = wire.connect()
    sock.sendall(wire.head("PUT", f"/{bucket}/k", headers={"content-length": "0", "expect": "100-continue"}))
    assert sock.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert read_answer(sock, "PUT").status == 200


@pytest.mark.parametrize(("target", "status"), [("/no-such-bucket-here/k", 404), ("/{bucket}/k", 403)])
def test_no_100_continue_for_the_refused(wire: Wire, bucket: str, target: str, status: int) -> None:
    fields = {"content-length": "1000", "expect": "100-continue"}
    guesser = Wire(wire.endpoint, wire.access_key, "guess") if status == 403 else wire
    sock = wire.connect()
    sock.sendall(guesser.head("PUT", target.format(bucket=bucket), headers=fields))
    assert sock.recv(12, socket.MSG_PEEK) == f"HTTP/1.1 {status}".encode()
    assert read_answer(sock, "PUT").headers["connection"] == "close"


def streaming_head(wire: Wire, target: str, payload: str, body: bytes, decoded: int, **headers: str) -> bytes:
    fields = {
        "content-length": str(len(body)),
        "content-encoding": "aws-chunked",
        "x-amz-decoded-content-length": str(decoded),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return wire.head("PUT", target, headers=fields, payload_hash=payload)


def crc32_of(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


UNSIGNED = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


def test_unsigned_chunks_with_a_trailer(wire: Wire, s3: Any, bucket: str) -> None:
    data = os.urandom(200_000)
    body = chunked_body([data[:65_536], data[65_536:]], trailers={"x-amz-checksum-crc32": crc32_of(data)})
    head = streaming_head(
        wire,
        f"/{bucket}/k",
        UNSIGNED,
        body,
        len(data),
        x_amz_trailer="x-amz-checksum-crc32",
        content_encoding="gzip,aws-chunked",
    )
    assert wire.exchange(head + body).status == 200
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert got["Body"].read() == data
    assert (got["ContentEncoding"], got["ChecksumCRC32"]) == ("gzip", crc32_of(data))


@pytest.mark.parametrize(
    ("trailers", "decoded", "code"),
    [
        ({"x-amz-checksum-crc32": "AAAAAA=="}, 5, "BadDigest"),
        ({}, 5, "MalformedTrailerError"),
        ({"x-amz-checksum-crc32": crc32_of(b"hello"), "x-other": "1"}, 5, "MalformedTrailerError"),
        ({"x-amz-checksum-crc32": crc32_of(b"hello")}, 4, "IncompleteBody"),
        ({"x-amz-checksum-crc32": crc32_of(b"hello")}, 6, "IncompleteBody"),
    ],
)
def test_refused_trailers(
    wire: Wire, s3: Any, bucket: str, trailers: dict[str, str], decoded: int, code: str
) -> None:
    body = chunked_body([b"hello"], trailers=trailers)
    head = streaming_head(wire, f"/{bucket}/k", UNSIGNED, body, decoded, x_amz_trailer="x-amz-checksum-crc32")
    answer = wire.exchange(head + body)
    assert (answer.status, answer.code) == (400, code)
    assert stored(s3, bucket) == []


@pytest.mark.parametrize("cut", [1, 2, 5, 40])
def test_a_chunked_body_that_ends_early(wire: Wire, s3: Any, bucket: str, cut: int) -> None:
    body = chunked_body([b"hello"], trailers={"x-amz-checksum-crc32": crc32_of(b"hello")})[:-cut]
    head = streaming_head(wire, f"/{bucket}/k", UNSIGNED, body, 5, x_amz_trailer="x-amz-checksum-crc32")
    answer = wire.exchange(head + body)
    assert answer.status == 400
    assert stored(s3, bucket) == []


def signed_chunks(
    wire: Wire, head: bytes, pieces: list[bytes], trailers: dict[str, str] | None = None
) -> bytes:
    """The signed body that belongs to a head."""
    lines = head.decode().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:] if line)
    method, target, _ = lines[0].split(" ")
    claim = read_claim(RequestHead(method, target, "", fields))
    assert claim is not None
    key = signing_key(wire.secret_key, claim.scope.date, claim.scope.region, "s3")
    chain = Verified(key, claim.signature, str(claim.scope), claim.timestamp)
    previous, out = chain.seed_signature, b""
    for piece in [*pieces, b""]:
        digest = hashlib.sha256(piece).hexdigest()
        previous = chunk_signature(key, chain.timestamp, chain.scope, previous, digest)
        out += b"%x;chunk-signature=%s\r\n%s" % (len(piece), previous.encode(), piece)
        out += b"\r\n" if piece else b""
    if trailers is None:
        return out + b"\r\n"
    text = "".join(f"{name}:{value}\n" for name, value in trailers.items())
    signature = trailer_signature(
        key, chain.timestamp, chain.scope, previous, hashlib.sha256(text.encode()).hexdigest()
    )
    tail = "".join(f"{name}:{value}\r\n" for name, value in trailers.items())
    return out + f"{tail}x-amz-trailer-signature:{signature}\r\n\r\n".encode()


@pytest.mark.parametrize("with_trailer", [False, True])
@pytest.mark.parametrize("tampered", [False, True])
def test_signed_chunks(wire: Wire, s3: Any, bucket: str, with_trailer: bool, tampered: bool) -> None:
    data = os.urandom(150_000)
    pieces = [data[:65_536], data[65_536:131_072], data[131_072:]]
    trailers = {"x-amz-checksum-crc32": crc32_of(data)} if with_trailer else None
    payload = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD" + ("-TRAILER" if with_trailer else "")
    extra = {"x_amz_trailer": "x-amz-checksum-crc32"} if with_trailer else {}
    length = len(signed_chunks(wire, streaming_head(wire, "/b/k", payload, b"", 0), pieces, trailers))
    head = streaming_head(wire, f"/{bucket}/k", payload, bytes(length), len(data), **extra)
    body = signed_chunks(wire, head, pieces, trailers)
    assert len(body) == length
    if tampered:
        body = body.replace(pieces[1][:100], bytes(100))
    answer = wire.exchange(head + body)
    if tampered:
        assert (answer.status, answer.code) == (403, "SignatureDoesNotMatch")
        assert stored(s3, bucket) == []
    else:
        assert answer.status == 200
        assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == data


@pytest.mark.parametrize("framed", [False, True], ids=["content-length", "chunked twice"])
def test_streaming_without_decoded_length(wire: Wire, s3: Any, bucket: str, framed: bool) -> None:
    """The last chunk says where the body ends; Amazon wants the length, and some clients do not send it."""
    data = os.urandom(300_000)
    trailer = {"x-amz-checksum-crc32": crc32_of(data)}
    body = chunked_body([data[:99_999], data[99_999:]], trailer)
    fields = {"content-encoding": "aws-chunked", "x-amz-trailer": "x-amz-checksum-crc32"}
    if framed:
        fields["transfer-encoding"] = "chunked"
        sent = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (body[:100], body[100:])) + b"0\r\n\r\n"
    else:
        fields["content-length"], sent = str(len(body)), body
    head = wire.head("PUT", f"/{bucket}/k", headers=fields, payload_hash=UNSIGNED)
    assert wire.exchange(head + sent).status == 200
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (got["Body"].read(), got["ChecksumCRC32"]) == (data, crc32_of(data))
    assert "ContentEncoding" not in got


def test_a_part_without_decoded_length(wire: Wire, s3: Any, bucket: str) -> None:
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    body = chunked_body([b"part"])
    target = f"/{bucket}/k?partNumber=1&uploadId={upload}"
    head = wire.head("PUT", target, headers={"content-length": str(len(body))}, payload_hash=UNSIGNED)
    assert wire.exchange(head + body).status == 200
    assert [part["Size"] for part in s3.list_parts(Bucket=bucket, Key="k", UploadId=upload)["Parts"]] == [4]


def test_anybodys_chunks_are_decoded(wire: Wire, s3: Any, bucket: str) -> None:
    """Over TLS boto3 sends them without credentials, too."""
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{bucket}/*",
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    for payload, body, outcome in (
        (UNSIGNED, chunked_body([b"anybody's"]), 200),
        (hashlib.sha256(b"anybody's").hexdigest(), b"anybody's", 200),
        ("0" * 64, b"anybody's", 400),
        ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", chunked_body([b"x"]), 403),
        ("nonsense", b"x", 400),
    ):
        lines = [f"PUT /{bucket}/k HTTP/1.1", "host: h", f"content-length: {len(body)}"]
        head = "\r\n".join([*lines, f"x-amz-content-sha256: {payload}", "", ""])
        assert wire.exchange(head.encode() + body).status == outcome
        assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"anybody's"


# --- XML ------------------------------------------------------------------------------------------------

BOMB = b"""<?xml version="1.0"?>
<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>
<Delete><Object><Key>&b;</Key></Object></Delete>"""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no xml",
        b"<Delete>",
        b"<Delete></Delete>",
        b"<Other><Object><Key>k</Key></Object></Other>",
        BOMB,
        b'<!DOCTYPE x SYSTEM "file:///etc/passwd"><Delete><Object><Key>k</Key></Object></Delete>',
        b"<Delete>" + b"<a>" * 10_000,
        b"\xff\xfe<Delete/>",
    ],
)
def test_bad_xml(wire: Wire, s3: Any, bucket: str, body: bytes) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"kept")
    md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
    answer = wire.call("POST", f"/{bucket}?delete=", body, headers={"content-md5": md5})
    assert (answer.status, answer.code) == (400, "MalformedXML")
    assert stored(s3, bucket) == ["k"]


def test_xml_beyond_the_limit(wire: Wire, bucket: str) -> None:
    fields = {"content-length": str(50 << 20)}
    answer = wire.exchange(wire.head("POST", f"/{bucket}?delete=", headers=fields), method="POST")
    assert (answer.status, answer.code) == (400, "MaxMessageLengthExceeded")


# --- framing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\x00T / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon here\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"PUT /b/k HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PUT /b/k HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        os.urandom(4096).replace(b"\n", b"x") + b"\r\n\r\n",
    ],
)
def test_garbage(wire: Wire, garbage: bytes) -> None:
    answer = wire.exchange(garbage, method="GET")
    assert 400 <= answer.status < 500
    assert b"Traceback" not in answer.body
    assert b"aiohttp" not in str(answer).encode()
    assert answer.code
    assert wire.call("GET", "/").status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"".join(b"x-%d: a\r\n" % i for i in range(5000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n"
        + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 8000) for i in range(20))
        + b"\r\n",
    ],
)
def test_oversized_heads(wire: Wire, head: bytes) -> None:
    answer = wire.exchange(head, method="GET")
    assert answer.status in (400, 431)
    assert answer.code in ("RequestHeaderSectionTooLarge", "BadRequest")


def test_pipelined_requests_are_answered_in_order(wire: Wire, s3: Any, bucket: str) -> None:
    sizes = [10, 300_000, 0, 70_000, 2_000_000, 5]
    for i, size in enumerate(sizes):
        s3.put_object(Bucket=bucket, Key=f"k{i}", Body=bytes([i]) * size)
    sock = wire.connect()
    sock.sendall(b"".join(wire.head("GET", f"/{bucket}/k{i}") for i in range(len(sizes))))
    for i, answer in enumerate(read_answers(sock, len(sizes))):
        assert (answer.status, answer.body) == (200, bytes([i]) * sizes[i])


def test_a_small_unread_body_keeps_the_connection(wire: Wire, bucket: str) -> None:
    sock = wire.connect()
    refused = wire.put("/no-such-bucket-here/k", b"x" * 1000)
    sock.sendall(refused + wire.put(f"/{bucket}/k", b"y"))
    first, second = read_answers(sock, 2)
    assert (first.status, second.status) == (404, 200)


@pytest.mark.skipif(
    "MESH_TEST_NODES" in os.environ, reason="it may be here in whole when another node has answered"
)
def test_a_large_unread_body_costs_the_connection(wire: Wire, bucket: str) -> None:
    sock = wire.connect()
    sock.sendall(wire.put("/no-such-bucket-here/k", bytes(300_000)))
    answer = read_answer(sock, "PUT")
    assert (answer.status, answer.headers["connection"]) == (404, "close")


def test_http_1_0(wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"old")
    request = wire.head("GET", f"/{bucket}/k").replace(b"HTTP/1.1", b"HTTP/1.0")
    sock = wire.connect()
    sock.sendall(request)
    answer = read_answer(sock)
    assert (answer.status, answer.body) == (200, b"old")
    assert sock.recv(1) == b""


def test_head_has_no_body(wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"12345")
    sock = wire.connect()
    sock.sendall(wire.head("HEAD", f"/{bucket}/k") + wire.head("HEAD", f"/{bucket}/none"))
    sock.sendall(wire.head("GET", f"/{bucket}/k"))
    stream = b""
    while not stream.endswith(b"12345"):
        stream += sock.recv(65_536)
    found, missing, body = stream.split(b"\r\n\r\n", 2)
    assert b"content-length: 5" in found.lower()
    assert missing.startswith(b"HTTP/1.1 404")
    assert body.endswith(b"\r\n\r\n12345")


def test_absolute_form(wire: Wire, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"x")
    request = wire.head("GET", f"/{bucket}/k").replace(b"GET /", f"GET http://{wire.host}/".encode(), 1)
    assert wire.exchange(request, method="GET").body == b"x"


@pytest.mark.parametrize(
    ("request_line", "header", "why"),
    [
        ("PUT http://other.example/{bucket}/k", "content-length: 0", "name different hosts"),
        ("PUT /{bucket}/k", "transfer-encoding: gzip, chunked", "transfer coding is not chunked"),
        ("PUT /{bucket}/k", "content-length: 1\r\ntransfer-encoding: chunked", "can't be present with"),
        ("PUT /{bucket}/k", "a header: 1", "Invalid header token"),
    ],
)
def test_what_cannot_be_parsed_is_refused_with_the_reason(
    wire: Wire, bucket: str, request_line: str, header: str, why: str
) -> None:
    head = f"{request_line.format(bucket=bucket)} HTTP/1.1\r\nhost: {wire.host}\r\n{header}\r\n\r\n"
    answer = wire.exchange(head.encode(), method="PUT")
    assert answer.status == 400
    assert b"<Code>BadRequest</Code>" in answer.body
    assert why in answer.body.decode().replace("&#39;", "'")


def test_paths_are_taken_as_sent(wire: Wire, s3: Any, bucket: str) -> None:
    for path, key in (("a/../b", "a/../b"), ("a//b", "a//b"), ("%2e%2e/x", "../x"), ("a%2Fb", "a/b")):
        assert wire.call("PUT", f"/{bucket}/{path}", path.encode()).status == 200
        assert s3.get_object(Bucket=bucket, Key=key)["Body"].read() == path.encode()


# --- the native door ------------------------------------------------------------------------------------


def test_native_paths_need_a_signature(wire: Wire) -> None:
    answer = wire.exchange(f"GET /-/nothing HTTP/1.1\r\nhost: {wire.host}\r\n\r\n".encode(), method="GET")
    assert answer.status == 404
    error = json.loads(answer.body)["error"]
    assert error["request_id"] == answer.headers["x-amz-request-id"]


def test_open_routes(daemon: Daemon) -> None:
    for path in ("/-/healthy", "/-/ready", "/metrics"):
        with urllib.request.urlopen(daemon.endpoint + path) as response:
            assert response.status == 200
    with urllib.request.urlopen(daemon.endpoint + "/metrics") as response:
        assert b"meshd_http_requests_total" in response.read()
