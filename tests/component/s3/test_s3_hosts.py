"""Buckets in the host name, as clients with virtual-host addressing send them."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from botocore.config import Config
from urllib3.filepost import encode_multipart_formdata

from tests.support.one_node import one_node
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

BUCKETS = ["photos", "dotted.name.of-a-bucket"]


@pytest.fixture(scope="module")
def named() -> Iterator[Daemon]:
    with one_node(["--domain", "s3.localhost", "--domain", "example.com"]) as daemon:
        yield daemon


@pytest.fixture
def _resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name is this machine's."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: look_up("127.0.0.1", *rest, **more)
    )


def virtual(daemon: Daemon, domain: str, **config: Any) -> Any:
    port = urlsplit(daemon.endpoint).port
    return daemon.client(
        endpoint_url=f"http://{domain}:{port}", config=Config(s3={"addressing_style": "virtual"}, **config)
    )


@pytest.mark.usefixtures("_resolved")
@pytest.mark.parametrize("domain", ["s3.localhost", "example.com"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_boto3(named: Daemon, domain: str, bucket: str) -> None:
    client = virtual(named, domain)
    hosts: list[str] = []
    client.meta.events.register(
        "before-send.s3", lambda request, **_: hosts.append(urlsplit(request.url).netloc)
    )
    client.create_bucket(Bucket=bucket)
    for key in ("k", "a b+c/ü%41", "-/healthy", "metrics"):
        client.put_object(Bucket=bucket, Key=key, Body=key.encode())
        assert client.get_object(Bucket=bucket, Key=key)["Body"].read() == key.encode()
    client.copy_object(Bucket=bucket, Key="copy", CopySource={"Bucket": bucket, "Key": "k"})
    upload = {"Bucket": bucket, "Key": "parts"}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    etag = client.upload_part(**upload, PartNumber=1, Body=b"part")["ETag"]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]})
    found = {entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]}
    assert found == {"k", "a b+c/ü%41", "-/healthy", "metrics", "copy", "parts"}
    client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": key} for key in found]})
    assert bucket in {entry["Name"] for entry in client.list_buckets()["Buckets"]}
    client.delete_bucket(Bucket=bucket)
    assert any(host.startswith(f"{bucket}.{domain}:") for host in hosts)
    client.close()


@pytest.mark.usefixtures("_resolved")
@pytest.mark.parametrize("version", [None, "s3v4"], ids=["sigv2", "sigv4"])
def test_presigned(named: Daemon, version: str | None) -> None:
    client = virtual(named, "s3.localhost", signature_version=version)
    client.create_bucket(Bucket="presigned")
    client.put_object(Bucket="presigned", Key="a b", Body=b"signed")
    url = client.generate_presigned_url("get_object", Params={"Bucket": "presigned", "Key": "a b"})
    assert url.startswith("http://presigned.s3.localhost:")
    assert urlopen(url, timeout=60).read() == b"signed"
    client.close()


@pytest.mark.usefixtures("_resolved")
def test_forms(named: Daemon) -> None:
    client = virtual(named, "s3.localhost")
    client.create_bucket(Bucket="forms")
    post = client.generate_presigned_post("forms", "a b")
    assert post["url"].startswith("http://forms.s3.localhost:")
    body, content_type = encode_multipart_formdata([*post["fields"].items(), ("file", ("f", b"posted"))])
    with urlopen(Request(post["url"], body, {"Content-Type": content_type}), timeout=60) as answer:
        assert answer.status == 204
        assert answer.headers["location"] == f"{post['url']}a%20b"
    assert client.get_object(Bucket="forms", Key="a b")["Body"].read() == b"posted"
    client.close()


def test_both_styles_name_one_object(named: Daemon) -> None:
    client = named.client()
    client.create_bucket(Bucket="both-styles")
    client.put_object(Bucket="both-styles", Key="k", Body=b"one")
    wire = Wire(named.endpoint, named.access_key, named.secret_key)
    answer = wire.call("GET", "/k", headers={"host": "both-styles.example.com"})
    assert (answer.status, answer.body) == (200, b"one")
    assert wire.call("GET", "/both-styles/k", headers={"host": "example.com"}).body == b"one"
    assert wire.call("GET", "/both-styles/k", headers={"host": "elsewhere.org"}).body == b"one"
    refused = wire.call("GET", "/k", headers={"host": "no-such.example.com"})
    assert (refused.status, refused.code) == (404, "NoSuchBucket")
    wire.close()
    client.close()


def test_health_is_not_hidden(named: Daemon) -> None:
    """A domain itself names no bucket."""
    wire = Wire(named.endpoint, named.access_key, named.secret_key)
    assert wire.call("GET", "/-/healthy", headers={"host": "example.com"}).body == b"healthy\n"
    wire.close()
