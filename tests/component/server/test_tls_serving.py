"""The endpoint over TLS: the same S3, whatever the size of a body and the pace of its client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil
import pytest
from botocore import UNSIGNED
from botocore.config import Config

from tests.support.bounded_wait import await_true
from tests.support.certificates import Authority
from tests.support.daemons import Daemon
from tests.support.fork_server import outcome_of
from tests.support.s3_raw import Wire, chunked_body

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 1 << 20
BUCKET = "over-tls"


@pytest.fixture(scope="module")
def secured() -> Iterator[Daemon]:
    with Daemon.start(tls=True) as daemon:
        yield daemon
        assert "Traceback" not in daemon.output()


@pytest.fixture(scope="module")
def client(secured: Daemon) -> Iterator[Any]:
    client = secured.client()
    client.create_bucket(Bucket=BUCKET)
    yield client
    client.close()


@pytest.fixture
def secured_wire(secured: Daemon) -> Iterator[Wire]:
    wire = Wire(secured.endpoint, secured.access_key, secured.secret_key, secured.ca_cert)
    yield wire
    wire.close()


@pytest.mark.parametrize("size", [0, 1, 8192, 200_000, 3 * MIB + 7, 24 * MIB])
@pytest.mark.parametrize("algorithm", ["CRC32", "CRC64NVME", "SHA256"])
def test_put_and_get(client: Any, size: int, algorithm: str) -> None:
    """Over TLS boto3 sends aws-chunked bodies with the checksum behind them."""
    sent: list[Any] = []
    client.meta.events.register("before-send.s3", lambda request, **_: sent.append(request), unique_id="look")
    body = os.urandom(size)
    client.put_object(Bucket=BUCKET, Key="k", Body=body, ChecksumAlgorithm=algorithm)
    client.meta.events.unregister("before-send.s3", unique_id="look")
    if size:
        assert sent[0].headers["x-amz-content-sha256"] == b"STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    got = client.get_object(Bucket=BUCKET, Key="k", ChecksumMode="ENABLED")
    assert got["Body"].read() == body
    assert got[f"Checksum{algorithm}"]
    assert "aws-chunked" not in got.get("ContentEncoding", "")


def test_ranges(client: Any) -> None:
    body = os.urandom(2 * MIB)
    client.put_object(Bucket=BUCKET, Key="ranges", Body=body)
    for first, last in ((0, 0), (5, MIB + 5), (MIB, 2 * MIB - 1)):
        got = client.get_object(Bucket=BUCKET, Key="ranges", Range=f"bytes={first}-{last}")
        assert got["Body"].read() == body[first : last + 1]


def test_multipart(client: Any) -> None:
    upload = {"Bucket": BUCKET, "Key": "parts"}
    upload["UploadId"] = client.create_multipart_upload(**upload, ChecksumAlgorithm="CRC32C")["UploadId"]
    bodies = [os.urandom(5 * MIB), os.urandom(77)]
    parts = []
    for number, body in enumerate(bodies, 1):
        answer = client.upload_part(**upload, PartNumber=number, Body=body, ChecksumAlgorithm="CRC32C")
        parts.append(
            {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": answer["ChecksumCRC32C"]}
        )
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    assert client.get_object(Bucket=BUCKET, Key="parts")["Body"].read() == b"".join(bodies)


def test_a_trailer_that_is_wrong_stores_nothing(client: Any, secured_wire: Wire) -> None:
    body = chunked_body([b"a" * 100, b"b"], {"x-amz-checksum-crc32": "AAAAAA=="})
    head = secured_wire.head(
        "PUT",
        f"/{BUCKET}/bad-trailer",
        headers={
            "content-length": str(len(body)),
            "content-encoding": "aws-chunked",
            "x-amz-decoded-content-length": "101",
            "x-amz-trailer": "x-amz-checksum-crc32",
        },
        payload_hash="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    )
    answer = secured_wire.exchange(head + body)
    assert (answer.status, answer.code) == (400, "BadDigest")
    assert "bad-trailer" not in str(client.list_objects_v2(Bucket=BUCKET))


def test_pipelined_answers_on_one_connection(client: Any, secured: Daemon) -> None:
    client.put_object(Bucket=BUCKET, Key="again", Body=b"x" * 300_000)
    with contextlib.closing(secured.connect()) as connection:
        for _ in range(3):
            connection.request("GET", "/-/healthy")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"healthy\n")
        connection.request("GET", "/metrics")
        assert b'operation="PutObject"' in connection.getresponse().read()


def test_slow_readers_cost_little_memory(client: Any, secured: Daemon, secured_wire: Wire) -> None:
    client.put_object(Bucket=BUCKET, Key="big", Body=os.urandom(32 * MIB))
    worker = psutil.Process(secured.children()["worker-0"])
    before = worker.memory_info().rss
    readers = [secured_wire.connect(receive_buffer=8192) for _ in range(24)]
    for sock in readers:
        sock.sendall(secured_wire.head("GET", f"/{BUCKET}/big"))
        assert sock.recv(9) == b"HTTP/1.1 "
    assert client.get_object(Bucket=BUCKET, Key="big", Range="bytes=0-9")["ContentLength"] == 10
    assert worker.memory_info().rss - before < 64 * MIB  # 24 whole answers would be 768 MiB


def test_a_client_that_reads_nothing_is_given_up() -> None:
    with Daemon.start(tls=True, env={"MESHD_BODY_TIMEOUT": "4"}) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="big", Body=os.urandom(48 * MIB))
        wire = Wire(daemon.endpoint, daemon.access_key, daemon.secret_key, daemon.ca_cert)
        over = threading.Event()
        try:
            silent, slow, slower = (wire.connect(receive_buffer=size) for size in (4096, 65536, 65536))
            for sock in (silent, slow, slower):
                sock.sendall(wire.head("GET", f"/{BUCKET}/big"))
            with ThreadPoolExecutor(2) as pool:
                # In four seconds the one that is slower takes less than the kernel keeps for it.
                sipping = [pool.submit(sip, slow, over), pool.submit(sip, slower, over, 0.1)]
                await_true(lambda: b'why="stalled"} 1.0' in scraped(daemon))
                over.wait(8)
                over.set()
                assert all(each.result(60) for each in sipping)  # whoever reads, however slowly, is served
                assert b'why="stalled"} 1.0' in scraped(daemon)
        finally:
            over.set()
            wire.close()
            client.close()


def sip(sock: socket.socket, over: threading.Event, pause: float = 0.005) -> bool:
    """Read a record now and then, however long a scrape takes meanwhile; whether there was always more."""
    while sock.recv(1 << 14):
        if over.wait(pause):
            return True
    return False


def scraped(daemon: Daemon) -> bytes:
    with contextlib.closing(daemon.connect()) as connection:
        connection.request("GET", "/metrics")
        return connection.getresponse().read()


def test_a_client_that_goes_away_in_the_middle(client: Any, secured_wire: Wire) -> None:
    head = secured_wire.head("PUT", f"/{BUCKET}/half", headers={"content-length": "1000"})
    sock = secured_wire.connect()
    sock.sendall(head + b"x" * 500)
    sock.close()
    answer = secured_wire.call("GET", f"/{BUCKET}/half")
    assert (answer.status, answer.code) == (404, "NoSuchKey")


def test_a_handshake_that_does_not_end_is_given_up() -> None:
    """After `head-timeout` seconds; others are served meanwhile. No other test uses this daemon: on a busy
    machine an honest client may take longer, too."""
    with Daemon.start(tls=True, args=["--head-timeout", "3"]) as hasty:
        where = urlsplit(hasty.endpoint)
        with socket.create_connection((where.hostname, where.port), timeout=60) as silent:
            silent.sendall(b"\x16\x03\x01")
            assert hasty.request("GET", "/").status == 200
            assert silent.recv(10) == b""
        assert "Traceback" not in hasty.output()


def test_plain_http_is_hung_up_on(secured: Daemon) -> None:
    where = urlsplit(secured.endpoint)
    with socket.create_connection((where.hostname, where.port), timeout=60) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/" not in plain.recv(100)
    assert secured.request("GET", "/").status == 200


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_versions(secured: Daemon) -> None:
    assert negotiated(secured, ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
    assert negotiated(secured, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        negotiated(secured, ssl.TLSVersion.TLSv1_1)


def negotiated(daemon: Daemon, version: ssl.TLSVersion) -> str | None:
    where = urlsplit(daemon.endpoint)
    context = ssl.create_default_context(cafile=daemon.ca_cert)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    with (
        socket.create_connection((where.hostname, where.port), timeout=60) as sock,
        context.wrap_socket(sock, server_hostname=where.hostname) as secured,
    ):
        return secured.version()


def test_policies_may_ask_for_tls(client: Any, secured: Daemon) -> None:
    """`aws:SecureTransport` is what the connection says."""
    policy = (
        '{"Version":"2012-10-17","Statement":[{"Effect":"Deny","Principal":"*","Action":"s3:GetObject",'
        '"Resource":"arn:aws:s3:::over-tls/*","Condition":{"Bool":{"aws:SecureTransport":"%s"}}},'
        '{"Effect":"Allow","Principal":"*","Action":"s3:GetObject","Resource":"arn:aws:s3:::over-tls/*"}]}'
    )
    client.put_object(Bucket=BUCKET, Key="open", Body=b"open")
    for refused, status in (("false", 200), ("true", 403)):
        client.put_bucket_policy(Bucket=BUCKET, Policy=policy % refused)
        with contextlib.closing(secured.connect()) as connection:
            connection.request("GET", f"/{BUCKET}/open")
            assert connection.getresponse().status == status
    client.delete_bucket_policy(Bucket=BUCKET)


def test_policies_may_ask_for_a_version_of_tls(client: Any, secured: Daemon) -> None:
    client.put_object(Bucket=BUCKET, Key="open", Body=b"open")
    for least, status in (("1.2", 200), ("1.3", 200), ("1.4", 403)):
        version = {"NumericGreaterThanEquals": {"s3:TlsVersion": least}}
        statement = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Condition": version}
        statement["Resource"] = f"arn:aws:s3:::{BUCKET}/*"
        client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Statement": statement}))
        with contextlib.closing(secured.connect()) as connection:
            connection.request("GET", f"/{BUCKET}/open")
            assert connection.getresponse().status == status
    client.delete_bucket_policy(Bucket=BUCKET)


def test_a_client_without_keys(client: Any, secured: Daemon) -> None:
    """boto3 sends its bodies aws-chunked all the same."""
    statement = {"Effect": "Allow", "Principal": "*", "Action": ["s3:GetObject", "s3:PutObject"]}
    statement["Resource"] = f"arn:aws:s3:::{BUCKET}/open/*"
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))
    anybody = secured.client(config=Config(signature_version=UNSIGNED))
    anybody.put_object(Bucket=BUCKET, Key="open/k", Body=b"from anybody" * 9999)
    assert anybody.get_object(Bucket=BUCKET, Key="open/k")["Body"].read() == b"from anybody" * 9999
    anybody.close()
    client.delete_bucket_policy(Bucket=BUCKET)


def test_workers_share_the_port(tmp_path: Path) -> None:
    with Daemon.start(tmp_path / "data", tls=True, workers=2) as daemon:
        assert daemon.endpoint.startswith("https://127.0.0.1:")
        client = daemon.client()
        client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="k", Body=b"x" * MIB)
        for _ in range(8):
            assert daemon.request("GET", f"/{BUCKET}/k").body == b"x" * MIB
        daemon.restart()
        assert daemon.request("GET", f"/{BUCKET}/k").status == 200
        client.close()


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("one alone", "tls-cert needs tls-key"),
        ("missing", "cannot read"),
        ("no certificate", "no PEM certificate"),
        ("no key", "no PEM private key"),
        ("another's key", "does not belong to the certificate"),
        ("garbage", "cannot be used"),
    ],
)
def test_pairs_that_cannot_be_used(tmp_path: Path, case: str, complaint: str) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("one"), authority.issue("two")
    cert, key = {
        "one alone": (pair.cert, None),
        "missing": (tmp_path / "nothing.pem", pair.key),
        "no certificate": (pair.key, pair.key),
        "no key": (pair.cert, pair.cert),
        "another's key": (pair.cert, other.key),
        "garbage": (tmp_path / "garbage.pem", pair.key),
    }[case]
    text = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    (tmp_path / "garbage.pem").write_text(text)
    words = ["serve", "--data-dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    ended = outcome_of(*words, "--tls-cert", str(cert), *(["--tls-key", str(key)] if key else []))
    assert (ended.returncode, complaint in ended.stderr) == (2, True), ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_expired_certificate_is_a_warning(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "other").issue(days=-3)
    args = ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key)]
    with Daemon.start(args=args) as daemon:
        assert "certificate has expired" in daemon.output()
        where = urlsplit(daemon.endpoint)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(str(where.hostname), where.port, timeout=60, context=context)
        with contextlib.closing(connection):
            connection.request("GET", "/-/ready")
            assert connection.getresponse().status == 200
