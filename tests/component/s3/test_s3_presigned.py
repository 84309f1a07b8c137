"""URLs that carry their signature, as boto3 and the command line make them: version 2 by default, or 4."""

from __future__ import annotations

import base64
import os
import subprocess
import urllib.error
import urllib.request
import zlib
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

import pytest
from botocore.config import Config

from meshwire.sigv4 import Credential, presign
from meshwire.sigv4.sigv2 import sign_sigv2
from tests.support.daemons import Daemon, DaemonFailedError
from tests.support.interpreters import program
from tests.support.s3_raw import REGION, now

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSIONS = [None, "s3v4"]


@pytest.fixture(params=VERSIONS, ids=["boto3's default", "s3v4"])
def signer(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    client = daemon.client(config=Config(signature_version=request.param))
    yield client
    client.close()


def ask(
    method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes, Mapping[str, str]]:
    """(status, body, headers); no header is added that decides anything."""
    request = urllib.request.Request(url, data=body, method=method, headers=dict(headers or {}))
    if body is not None and not headers:
        request.add_unredirected_header("Content-Type", "")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read(), {k.lower(): v for k, v in response.headers.items()}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), {k.lower(): v for k, v in error.headers.items()}


def presigned(daemon: Daemon, method: str, target: str, headers: Mapping[str, str] | None = None) -> str:
    """A URL of version 4 for what boto3 would put into headers and other clients put into the query."""
    credential = Credential(daemon.access_key, daemon.secret_key)
    return presign(
        method,
        f"{daemon.endpoint}/{target}",
        credential,
        region=REGION,
        expires=60,
        timestamp=now(),
        headers=headers or {},
    )


def crc32_of(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def test_get_put_head_delete(signer: Any, bucket: str) -> None:
    params = {"Bucket": bucket, "Key": "a b+ü"}

    def url(call: str, **more: str) -> str:
        made: str = signer.generate_presigned_url(call, Params={**params, **more}, ExpiresIn=60)
        return made

    assert ask("PUT", url("put_object"), b"presigned")[0] == 200
    status, body, headers = ask("GET", url("get_object", ResponseContentType="text/x-p"))
    assert (status, body, headers["content-type"]) == (200, b"presigned", "text/x-p")
    status, _, headers = ask("HEAD", url("head_object"))
    assert (status, headers["content-length"]) == (200, "9")
    assert ask("DELETE", url("get_object"))[0] == 403
    assert ask("DELETE", url("delete_object"))[0] == 204
    assert ask("GET", url("get_object"))[0] == 404


def test_what_was_signed_cannot_be_changed(signer: Any, bucket: str) -> None:
    params = {"Bucket": bucket, "Key": "k", "ResponseContentType": "text/x-p"}
    url = signer.generate_presigned_url("get_object", Params=params, ExpiresIn=60)
    for changed in (
        url.replace("text%2Fx-p", "text%2Fhtml"),
        url.replace("/k?", "/other?"),
        url + "&versionId=null",
        url.replace("Expires=", "Expires=1"),
    ):
        assert changed != url
        status, body, _ = ask("GET", changed)
        assert status in (400, 403), body
        assert b"<Code>" in body
    assert ask("GET", url, headers={"x-amz-meta-a": "b"})[0] == 403


def test_a_type_and_metadata_in_the_url(daemon: Daemon, s3: Any, bucket: str) -> None:
    """botocore writes them into the query of a version 2 URL; the type must then be sent, too."""
    client = daemon.client(config=Config())
    params = {"Bucket": bucket, "Key": "k", "ContentType": "text/x-y", "Metadata": {"a": "b c"}}
    url = client.generate_presigned_url("put_object", Params=params)
    assert ask("PUT", url, b"x", {"Content-Type": "text/html"})[0] == 403
    assert ask("PUT", url, b"x", {"Content-Type": "text/x-y"})[0] == 200
    head = s3.head_object(Bucket=bucket, Key="k")
    assert (head["ContentType"], head["Metadata"]) == ("text/x-y", {"a": "b c"})
    client.close()


EMPTY_CRC32 = "AAAAAA=="


def test_a_checksum_in_the_url_judges_no_body(daemon: Daemon, s3: Any, bucket: str) -> None:
    """The JavaScript SDK puts that of an empty body into every URL for an upload; so does S3 overlook it."""
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    query = f"x-amz-checksum-crc32={EMPTY_CRC32.replace('=', '%3D')}&x-amz-sdk-checksum-algorithm=CRC32"
    for place in ("k?", f"k?partNumber=1&uploadId={upload}&"):
        status, body, _ = ask("PUT", presigned(daemon, "PUT", f"{bucket}/{place}{query}"), b"hello")
        assert status == 200, body
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert (got["Body"].read(), got["ChecksumCRC32"]) == (b"hello", crc32_of(b"hello"))
    assert s3.list_parts(Bucket=bucket, Key="k", UploadId=upload)["Parts"][0]["Size"] == 5


@pytest.mark.parametrize("value", [EMPTY_CRC32, crc32_of(b"hello"), "nonsense"])
def test_a_checksum_in_a_header_of_a_url_counts(daemon: Daemon, bucket: str, value: str) -> None:
    headers = {"x-amz-checksum-crc32": value}
    url = presigned(daemon, "PUT", f"{bucket}/k?x-amz-checksum-crc32={EMPTY_CRC32[:-2]}%3D%3D", headers)
    status, body, _ = ask("PUT", url, b"hello", {"content-type": "", **headers})
    assert status == (200 if value == crc32_of(b"hello") else 400), body


def test_multipart_by_url(signer: Any, s3: Any, bucket: str) -> None:
    upload = {"Bucket": bucket, "Key": "k"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    url = signer.generate_presigned_url("upload_part", Params={**upload, "PartNumber": 1})
    status, _, headers = ask("PUT", url, b"part")
    assert status == 200
    s3.complete_multipart_upload(
        **upload, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": headers["etag"]}]}
    )
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"part"


def test_listings_by_url(signer: Any, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="p/1", Body=b"")
    url = signer.generate_presigned_url("list_objects_v2", Params={"Bucket": bucket, "Prefix": "p/"})
    status, body, _ = ask("GET", url)
    assert status == 200
    assert b"<Key>p/1</Key>" in body


def test_expired(daemon: Daemon, bucket: str) -> None:
    client = daemon.client(config=Config())
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "k"}, ExpiresIn=-1)
    status, body, _ = ask("GET", url)
    assert (status, b"Request has expired" in body) == (403, True)
    client.close()


def test_the_command_line(daemon: Daemon, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"by awscli")
    environment = os.environ | {
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": daemon.endpoint,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    command = [program("aws"), "s3", "presign", f"s3://{bucket}/k", "--expires-in", "60"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert ask("GET", said.stdout.strip())[:2] == (200, b"by awscli")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that takes version 2 in the Authorization header, too."""
    with Daemon.start(args=["--sigv2", "all"]) as daemon:
        yield daemon


def test_old_clients_sign_their_headers_so(old: Daemon) -> None:
    client = old.client(config=Config(signature_version="s3"))
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="a b+ü", Body=b"old", Metadata={"m": "1"})
    got = client.get_object(Bucket="bucket", Key="a b+ü", Range="bytes=1-")
    assert (got["Body"].read(), got["Metadata"]) == (b"ld", {"m": "1"})
    assert [entry["Key"] for entry in client.list_objects_v2(Bucket="bucket")["Contents"]] == ["a b+ü"]
    client.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": "a b+ü"}]})
    assert client.list_objects_v2(Bucket="bucket")["KeyCount"] == 0
    client.close()


def signed_by_date(daemon: Daemon, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    """The answer to a request with a version 2 header."""
    date = formatdate(usegmt=True)
    signature = sign_sigv2(f"{method}\n\n\n{date}\n{path}", daemon.secret_key)
    headers = {"Date": date, "Authorization": f"AWS {daemon.access_key}:{signature}", "Content-Type": ""}
    return ask(method, daemon.endpoint + path, body, headers)[:2]


NATIVE = [("GET", "/-/whoami", None), ("POST", "/-/sts", b"{}")]


@pytest.mark.parametrize(("method", "path", "body"), NATIVE)
def test_the_native_interface_takes_version_4_only(
    old: Daemon, method: str, path: str, body: bytes | None
) -> None:
    """Version 2 signs no query there, and no body."""
    status, answer = signed_by_date(old, method, path, body)
    assert (status, b"Version 4" in answer) == (403, True), answer


@pytest.mark.parametrize(("method", "path", "body"), [*NATIVE, ("GET", "/", None), ("PUT", "/bucket", b"")])
def test_version_2_in_the_header_is_refused_by_default(
    daemon: Daemon, method: str, path: str, body: bytes | None
) -> None:
    status, answer = signed_by_date(daemon, method, path, body)
    assert (status, b"AWS4-HMAC-SHA256" in answer, b"--sigv2 all" in answer) == (400, True, True), answer


@pytest.mark.parametrize(
    ("flag", "header", "url"), [("off", 400, 400), ("presigned", 400, 404), ("on", 200, 404)]
)
def test_which_requests_version_2_may_sign(flag: str, header: int, url: int) -> None:
    """`on` is what the setting said before it told headers and URLs apart."""
    with Daemon.start(args=["--sigv2", flag]) as daemon:
        old, new = (daemon.client(config=Config(signature_version=version)) for version in VERSIONS)
        new.create_bucket(Bucket="bucket")
        assert signed_by_date(daemon, "GET", "/", None)[0] == header
        params = {"Bucket": "bucket", "Key": "k"}
        status, body, _ = ask("GET", old.generate_presigned_url("get_object", Params=params))
        assert status == url
        assert (b"AWS4-HMAC-SHA256" in body) == (url == 400)
        status, body, _ = ask("GET", new.generate_presigned_url("get_object", Params=params))
        assert (status, b"NoSuchKey" in body) == (404, True)
        old.close()
        new.close()


def test_a_sigv2_that_is_not_known() -> None:
    with pytest.raises(DaemonFailedError, match="expected one of off, presigned, all"):
        Daemon.start(args=["--sigv2", "header"])
