"""A daemon behind a real nginx, configured as ingress-nginx does with helm/examples/values-ingress.yaml."""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

import meshsdk as mesh
from meshsdk import ops
from tests.support.bounded_wait import await_true
from tests.support.certificates import Authority
from tests.support.multipart_clients import by_awscli, by_boto3
from tests.support.native_fixtures import png
from tests.support.nginx_proxy import nginx
from tests.support.relay import Relay
from tests.support.required import required_program
from tests.support.s3_raw import Wire, read_answer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemons import Daemon

pytestmark = required_program("nginx", "`apt-get install nginx-light`")

MIB = 1 << 20
BUFFERING = ("proxy-request-buffering", "proxy-buffering")
LARGE = 64 * MIB
GROWTH = 8 * MIB
"""Memory that nginx may need for ten connections with large bodies: an eighth of one body."""


def front(daemon: Daemon) -> list[str]:
    return [urlsplit(daemon.endpoint).netloc]


def client(daemon: Daemon, endpoint: str, *, verify: Path | None = None, sign_bodies: bool = False) -> Any:
    style = {"addressing_style": "path", "payload_signing_enabled": sign_bodies}
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=daemon.access_key,
        aws_secret_access_key=daemon.secret_key,
        region_name="us-east-1",
        verify=None if verify is None else str(verify),
        config=Config(retries={"max_attempts": 1}, s3=style),
    )


def test_large_bodies_stream_and_signatures_hold(daemon: Daemon, bucket: str, tmp_path: Path) -> None:
    with nginx(front(daemon), tmp_path / "nginx") as proxy:
        s3 = client(daemon, proxy.endpoint)
        body = os.urandom(MIB) * 24
        s3.put_object(Bucket=bucket, Key="large", Body=body, ChecksumAlgorithm="SHA256")
        whole = s3.get_object(Bucket=bucket, Key="large")["Body"].read()
        assert hashlib.sha256(whole).digest() == hashlib.sha256(body).digest()
        part = s3.get_object(Bucket=bucket, Key="large", Range="bytes=1000000-1000999")
        assert (part["ContentLength"], part["Body"].read()) == (1000, body[1_000_000:1_001_000])
        for key in ("a//b/../c", "%2F", "ü ä+&=?#", "trailing/", "."):
            s3.put_object(Bucket=bucket, Key=f"keys/{key}", Body=key.encode())
            assert s3.get_object(Bucket=bucket, Key=f"keys/{key}")["Body"].read() == key.encode()
        listed = s3.list_objects_v2(Bucket=bucket, Prefix="keys/", Delimiter="/")
        assert len(listed["Contents"]) + len(listed["CommonPrefixes"]) == 5
        upload = s3.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
        parts = [
            {
                "PartNumber": number,
                "ETag": s3.upload_part(
                    Bucket=bucket, Key="parts", UploadId=upload, PartNumber=number, Body=body[: 6 * MIB]
                )["ETag"],
            }
            for number in (1, 2)
        ]
        s3.complete_multipart_upload(
            Bucket=bucket, Key="parts", UploadId=upload, MultipartUpload={"Parts": parts}
        )
        assert s3.head_object(Bucket=bucket, Key="parts")["ContentLength"] == 12 * MIB
        assert proxy.buffered() == set()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_boto3_and_awscli_send_and_fetch_64_mib_in_parts(
    daemon: Daemon, bucket: str, tmp_path: Path, scheme: str
) -> None:
    """With https it ends at nginx, as with `ingress.tlsSecretName`. boto3 and awscli sign bodies on http; on
    https they sign a checksum that follows the body, or, if they are told so, the body."""
    authority = Authority(tmp_path / "tls")
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(LARGE))
    tls = authority.issue() if scheme == "https" else None
    with nginx(front(daemon), tmp_path / "nginx", tls=tls) as proxy:
        client(daemon, proxy.endpoint, verify=authority.cert).list_buckets()
        before = proxy.peak_memory()
        for sign_bodies in (False, True):
            s3 = client(daemon, proxy.endpoint, verify=authority.cert, sign_bodies=sign_bodies)
            by_boto3(s3, bucket, f"boto3-{sign_bodies}", source, target)
        env = {
            "AWS_ACCESS_KEY_ID": daemon.access_key,
            "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CA_BUNDLE": str(authority.cert),
        }
        by_awscli(env, bucket, "awscli", source, target)
        assert proxy.buffered() == set()
        assert proxy.requests() > 3 * 2 * LARGE // (8 * MIB)
        assert proxy.peak_memory() - before < GROWTH


@pytest.mark.parametrize("without", [(), BUFFERING], ids=["example", "nginx-defaults"])
def test_the_first_byte_arrives_before_the_last_is_sent(
    daemon: Daemon, bucket: str, tmp_path: Path, without: tuple[str, ...]
) -> None:
    """Without the two annotations nginx has all of a body before it forwards any, and this test sees it."""
    body = os.urandom(MIB) * (LARGE // MIB)
    digest = hashlib.sha256(body).hexdigest()
    with (
        Relay(int(urlsplit(daemon.endpoint).port or 0)) as relay,
        nginx([str(relay)], tmp_path / "nginx", without=without) as proxy,
        closing(Wire(proxy.endpoint, daemon.access_key, daemon.secret_key)) as wire,
    ):
        sock, size = wire.connect(), {"content-length": str(LARGE)}
        sock.sendall(wire.head("PUT", f"/{bucket}/slow", headers=size, payload_hash=digest))
        sock.sendall(body[: LARGE // 2])
        if without:
            await_true(lambda: "request body" in proxy.buffered())
            assert relay.forwarded == 0
        else:
            await_true(lambda: relay.forwarded > LARGE // 4, told=lambda: relay.forwarded)
        sock.sendall(body[LARGE // 2 :])
        assert read_answer(sock, "PUT").status == 200
        assert proxy.buffered() == ({"request body"} if without else set())

        begun, sock = relay.returned, wire.connect(receive_buffer=64 << 10)
        sock.sendall(wire.head("GET", f"/{bucket}/slow"))
        first = sock.recv(1000)
        assert first.startswith(b"HTTP/1.1 200")
        if without:
            await_true(lambda: relay.returned - begun >= LARGE, told=lambda: relay.returned - begun)
        else:
            seen = [0]

            def waits() -> bool:
                """Whether the daemon has sent something, and no more for a while, as nobody takes it."""
                seen.append(relay.returned - begun)
                return min(seen[-5:]) == max(seen[-5:]) > 0

            await_true(waits, told=lambda: seen)
            assert seen[-1] < LARGE // 2
        found = bytearray(first)
        while len(found) < found.find(b"\r\n\r\n") + 4 + LARGE and (piece := sock.recv(MIB)):
            found += piece
        assert found.partition(b"\r\n\r\n")[2] == body
        assert proxy.buffered() == ({"request body", "response"} if without else set())


def test_names_with_underscores_need_a_setting_of_the_controller(
    daemon: Daemon, bucket: str, tmp_path: Path
) -> None:
    wanted = {"taken_by": "ann"}
    with nginx(front(daemon), tmp_path / "plain") as proxy:
        s3 = client(daemon, proxy.endpoint)
        with pytest.raises(ClientError) as refused:
            s3.put_object(Bucket=bucket, Key="k", Body=b"1", Metadata=wanted)
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403)
    with nginx(front(daemon), tmp_path / "set", underscores="on") as proxy:
        s3 = client(daemon, proxy.endpoint)
        s3.put_object(Bucket=bucket, Key="k", Body=b"1", Metadata=wanted)
        assert s3.head_object(Bucket=bucket, Key="k")["Metadata"] == wanted


def test_batches_come_through_it(daemon: Daemon, bucket: str, tmp_path: Path) -> None:
    with nginx(front(daemon), tmp_path / "nginx") as proxy:
        s3 = client(daemon, proxy.endpoint)
        for sample in range(16):
            s3.put_object(Bucket=bucket, Key=f"train/{sample:02d}.png", Body=png(sample))
        found = []
        for address in (proxy.endpoint, daemon.endpoint):
            with mesh.connect(address, access_key=daemon.access_key, secret_key=daemon.secret_key) as inside:
                dataset = mesh.open(f"s3://{bucket}/train", fields={"image": "png"}, client=inside)
                dataset = dataset.map(ops.decode("image"), ops.random_resized_crop("image", size=8))
                with mesh.Loader(dataset, 4, seed=3, shuffle=True, output="numpy") as loader:
                    found.append([batch["image"].tobytes() for batch in loader])
        assert len(found[0]) == 4
        assert found[0] == found[1]
