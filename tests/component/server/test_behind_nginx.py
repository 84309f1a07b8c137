"""A daemon behind a real nginx, configured as ingress-nginx does with helm/examples/values-ingress.yaml."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import pytest
import yaml
from botocore.config import Config
from botocore.exceptions import ClientError

import meshsdk as mesh
from meshd.process.local_etcd import reserve_port
from meshsdk import ops
from tests.support.bounded_wait import await_true
from tests.support.native_fixtures import png
from tests.support.required import required_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

pytestmark = required_program("nginx", "`apt-get install nginx-light`")

MIB = 1 << 20
EXAMPLE = Path(__file__).resolve().parents[3] / "helm" / "examples" / "values-ingress.yaml"
PREFIX = "nginx.ingress.kubernetes.io/"
DIRECTIVES = {
    "proxy-body-size": "client_max_body_size",
    "proxy-request-buffering": "proxy_request_buffering",
    "proxy-buffering": "proxy_buffering",
    "proxy-read-timeout": "proxy_read_timeout",
    "proxy-send-timeout": "proxy_send_timeout",
    "proxy-next-upstream": "proxy_next_upstream",
}
"""Annotation of ingress-nginx → the directive that it becomes."""
CONFIG = """daemon off; worker_processes 1; pid {root}/pid; error_log {root}/errors warn; user {user};
events {{ worker_connections 256; }}
http {{
  access_log off; client_body_temp_path {root}/bodies; proxy_temp_path {root}/answers;
  fastcgi_temp_path {root}/f; uwsgi_temp_path {root}/u; scgi_temp_path {root}/s;
  underscores_in_headers {underscores};
  upstream service {{ server {upstream}; keepalive 32; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://service; proxy_http_version 1.1;
      proxy_set_header Host $http_host; proxy_set_header Connection "";
      {directives}
    }}
  }}
}}
"""
"""What ingress-nginx writes for a host and the path `/`; `Host` goes on as the client sent it."""


@contextlib.contextmanager
def nginx(daemon: Daemon, root: Path, *, underscores: str = "off") -> Iterator[str]:
    """nginx in front of a daemon; the URL of nginx."""
    annotations = yaml.safe_load(EXAMPLE.read_text())["ingress"]["annotations"]
    given = {name.removeprefix(PREFIX): value for name, value in annotations.items()}
    assert given.keys() == DIRECTIVES.keys()
    lines = [f"{DIRECTIVES[name]} {value};" for name, value in given.items()]
    root.mkdir()
    port = reserve_port()
    (root / "conf").write_text(
        CONFIG.format(
            root=root,
            port=port,
            user="root" if os.geteuid() == 0 else "nobody",
            underscores=underscores,
            upstream=daemon.endpoint.removeprefix("http://"),
            directives=" ".join(lines),
        )
    )
    argv = [shutil.which("nginx") or "nginx", "-p", str(root), "-c", str(root / "conf")]
    process = subprocess.Popen([*argv, "-e", str(root / "errors")])
    try:
        await_true(lambda: (root / "pid").exists() and bool((root / "pid").read_text().strip()))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def client(daemon: Daemon, endpoint: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=daemon.access_key,
        aws_secret_access_key=daemon.secret_key,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
    )


def test_large_bodies_stream_and_signatures_hold(daemon: Daemon, bucket: str, tmp_path: Path) -> None:
    with nginx(daemon, tmp_path / "nginx") as endpoint:
        s3 = client(daemon, endpoint)
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
        written = [each for name in ("bodies", "answers") for each in (tmp_path / "nginx" / name).rglob("*")]
        assert [each for each in written if each.is_file()] == []
        assert "buffered to a temporary file" not in (tmp_path / "nginx" / "errors").read_text()


def test_names_with_underscores_need_a_setting_of_the_controller(
    daemon: Daemon, bucket: str, tmp_path: Path
) -> None:
    wanted = {"taken_by": "ann"}
    with nginx(daemon, tmp_path / "plain") as endpoint:
        s3 = client(daemon, endpoint)
        with pytest.raises(ClientError) as refused:
            s3.put_object(Bucket=bucket, Key="k", Body=b"1", Metadata=wanted)
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] in (400, 403)
    with nginx(daemon, tmp_path / "set", underscores="on") as endpoint:
        s3 = client(daemon, endpoint)
        s3.put_object(Bucket=bucket, Key="k", Body=b"1", Metadata=wanted)
        assert s3.head_object(Bucket=bucket, Key="k")["Metadata"] == wanted


def test_batches_come_through_it(daemon: Daemon, bucket: str, tmp_path: Path) -> None:
    with nginx(daemon, tmp_path / "nginx") as endpoint:
        s3 = client(daemon, endpoint)
        for sample in range(16):
            s3.put_object(Bucket=bucket, Key=f"train/{sample:02d}.png", Body=png(sample))
        found = []
        for address in (endpoint, daemon.endpoint):
            with mesh.connect(address, access_key=daemon.access_key, secret_key=daemon.secret_key) as inside:
                dataset = mesh.open(f"s3://{bucket}/train", fields={"image": "png"}, client=inside)
                dataset = dataset.map(ops.decode("image"), ops.random_resized_crop("image", size=8))
                with mesh.Loader(dataset, 4, seed=3, shuffle=True, output="numpy") as loader:
                    found.append([batch["image"].tobytes() for batch in loader])
        assert len(found[0]) == 4
        assert found[0] == found[1]
