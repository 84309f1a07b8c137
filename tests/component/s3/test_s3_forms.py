"""Uploads by HTML form, as `requests` and browsers send them; boto3 makes the forms."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import psutil
import pytest
from botocore.config import Config
from urllib3.filepost import encode_multipart_formdata

from meshwire.checksums.body_checksums import new_hasher as new_checksum
from tests.support.daemons import Daemon
from tests.support.s3_raw import Answer, Wire

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

MIB = 1 << 20
LATER = "2099-01-01T00:00:00Z"


def send(
    endpoint: str,
    bucket: str,
    fields: Mapping[str, str],
    file: bytes | None,
    *,
    filename: str = "f.bin",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    files = [] if file is None else [("file", (filename, file))]
    body, content_type = encode_multipart_formdata([*fields.items(), *files])
    where = urlsplit(endpoint)
    with closing(http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)) as connection:
        connection.request("POST", f"/{bucket}", body, {"Content-Type": content_type, **(headers or {})})
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


@pytest.fixture(params=[None, "s3v4"], ids=["sigv2", "sigv4"])
def signer(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    client = daemon.client(config=Config(signature_version=request.param))
    yield client
    client.close()


def form(signer: Any, bucket: str, key: str = "k", conditions: Any = (), **fields: str) -> dict[str, str]:
    named = {name.replace("_", "-") if name.startswith("x_") else name: v for name, v in fields.items()}
    given = [*conditions, *({name: value} for name, value in named.items())]
    made: dict[str, str] = signer.generate_presigned_post(bucket, key, named, given)["fields"]
    return made


@pytest.mark.parametrize("size", [0, 1, 70_000, 3 * MIB])
def test_an_upload(daemon: Daemon, s3: Any, bucket: str, signer: Any, size: int) -> None:
    body = os.urandom(size)
    fields = form(signer, bucket, "a b/ü", **{"Content-Type": "image/x", "x-amz-meta-a": "b c"})
    answer = send(daemon.endpoint, bucket, fields, body)
    assert (answer.status, answer.body) == (204, b"")
    got = s3.get_object(Bucket=bucket, Key="a b/ü")
    assert got["Body"].read() == body
    assert (got["ContentType"], got["Metadata"], got["ETag"]) == (
        "image/x",
        {"a": "b c"},
        answer.headers["etag"],
    )
    assert answer.headers["location"] == f"{daemon.endpoint}/{bucket}/a%20b/%C3%BC"


def test_the_files_own_name(daemon: Daemon, s3: Any, bucket: str, signer: Any) -> None:
    fields = form(signer, bucket, "up/${filename}")
    assert send(daemon.endpoint, bucket, fields, b"x", filename="C:\\my photos\\cat 1.jpg").status == 204
    assert s3.get_object(Bucket=bucket, Key="up/cat 1.jpg")["Body"].read() == b"x"


def test_answers(daemon: Daemon, bucket: str, signer: Any) -> None:
    document = send(daemon.endpoint, bucket, form(signer, bucket, success_action_status="201"), b"x")
    assert document.status == 201
    found = ElementTree.fromstring(document.body)
    assert [found.findtext(name) for name in ("Bucket", "Key", "ETag")] == [
        bucket,
        "k",
        document.headers["etag"],
    ]
    assert (
        send(daemon.endpoint, bucket, form(signer, bucket, success_action_status="200"), b"x").status == 200
    )
    assert (
        send(daemon.endpoint, bucket, form(signer, bucket, success_action_status="500"), b"x").status == 204
    )
    url = "https://page.example/done"
    moved = send(daemon.endpoint, bucket, form(signer, bucket, success_action_redirect=url), b"x")
    assert moved.status == 303
    assert moved.headers["location"].startswith(f"{url}?bucket={bucket}&key=k&etag=%22")


def test_acl_tags_and_checksums(daemon: Daemon, s3: Any, bucket: str, signer: Any) -> None:
    crc = new_checksum("crc32")
    crc.update(b"data")
    tags = "<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"
    fields = form(signer, bucket, tagging=tags, **{"x-amz-checksum-crc32": crc.base64()})
    assert send(daemon.endpoint, bucket, fields, b"data").status == 204
    assert s3.get_object_tagging(Bucket=bucket, Key="k")["TagSet"] == [{"Key": "a", "Value": "b"}]
    head = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert head["ChecksumCRC32"] == crc.base64()
    answer = send(daemon.endpoint, bucket, fields, b"other")
    assert (answer.status, answer.code) == (400, "BadDigest")
    uncovered = form(signer, bucket) | {"x-amz-checksum-crc32": "AAAAAA=="}  # it can only refuse
    assert send(daemon.endpoint, bucket, uncovered, b"data").code == "BadDigest"
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"data"


@pytest.mark.parametrize("status", ["200", "201", "204", ""])
def test_the_answer_names_the_checksum(daemon: Daemon, bucket: str, signer: Any, status: str) -> None:
    crc = new_checksum("crc32c")
    crc.update(b"data")
    answered = {"success_action_status": status} if status else {"success_action_redirect": "https://page.x/"}
    fields = form(signer, bucket, **answered, **{"x-amz-checksum-crc32c": crc.base64()})
    answer = send(daemon.endpoint, bucket, fields, b"data")
    assert answer.status == int(status or 303)
    assert answer.headers["x-amz-checksum-crc32c"] == crc.base64()
    assert answer.headers["x-amz-checksum-type"] == "FULL_OBJECT"


def test_a_failed_condition_is_told_as_it_is_written(daemon: Daemon, bucket: str, signer: Any) -> None:
    """With its quotes: minio-go and others search the text of the answer."""
    fields = form(signer, bucket, "k") | {"key": "other"}
    answer = send(daemon.endpoint, bucket, fields, b"x")
    assert (answer.status, answer.code) == (403, "AccessDenied")
    assert b'Policy Condition failed: ["eq", "$key", "k"]' in answer.body


def test_a_redirection_that_is_none(daemon: Daemon, bucket: str, signer: Any) -> None:
    fields = form(signer, bucket, **{"x-amz-website-redirect-location": "page"})
    answer = send(daemon.endpoint, bucket, fields, b"x")
    assert (answer.status, answer.code) == (400, "InvalidRedirectLocation")


def test_sizes_that_the_policy_does_not_allow(daemon: Daemon, s3: Any, bucket: str, signer: Any) -> None:
    fields = form(signer, bucket, conditions=[["content-length-range", 10, 300_000]])
    for size, code in ((9, "EntityTooSmall"), (300_001, "EntityTooLarge"), (5 * MIB, "EntityTooLarge")):
        answer = send(daemon.endpoint, bucket, fields, b"x" * size)
        assert (answer.status, answer.code) == (400, code)
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    for size in (10, 300_000):
        assert send(daemon.endpoint, bucket, fields, b"x" * size).status == 204


def test_conditions_hold_for_forms_too(daemon: Daemon, s3: Any, bucket: str, signer: Any) -> None:
    for fields, headers in (
        (form(signer, bucket, **{"if-none-match": "*"}), {}),
        (form(signer, bucket), {"If-None-Match": "*"}),
    ):
        assert send(daemon.endpoint, bucket, fields, b"first", headers=headers).status == 204
        answer = send(daemon.endpoint, bucket, fields, b"second", headers=headers)
        assert (answer.status, answer.code) == (412, "PreconditionFailed")
        assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"first"
        s3.delete_object(Bucket=bucket, Key="k")


def test_forms_that_are_refused(daemon: Daemon, s3: Any, bucket: str, signer: Any) -> None:
    good = form(signer, bucket)
    signature = "signature" if "signature" in good else "x-amz-signature"
    credential = "AWSAccessKeyId" if "AWSAccessKeyId" in good else "x-amz-credential"
    policy = json.loads(base64.b64decode(good["policy"]))
    policy["conditions"] = []
    forged = base64.b64encode(json.dumps(policy).encode()).decode()
    for changed, code in (
        ({"key": "other"}, "AccessDenied"),
        ({"x-amz-meta-a": "b"}, "AccessDenied"),
        ({"acl": "public-read"}, "AccessDenied"),
        ({signature: "0" * 64}, "SignatureDoesNotMatch"),
        ({"policy": forged}, "SignatureDoesNotMatch"),
        ({credential: good[credential].replace(daemon.access_key, "NOBODY")}, "InvalidAccessKeyId"),
        ({"policy": ""}, "InvalidArgument"),
        ({signature: ""}, "InvalidArgument"),
        ({"key": ""}, "AccessDenied"),
    ):
        answer = send(daemon.endpoint, bucket, good | changed, b"x")
        assert answer.code == code, (changed, answer.body)
    expired = signer.generate_presigned_post(bucket, "k", ExpiresIn=-1)["fields"]
    assert send(daemon.endpoint, bucket, expired, b"x").code == "AccessDenied"
    assert send(daemon.endpoint, bucket, good, None).code == "MalformedPOSTRequest"
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_forms_that_are_none(daemon: Daemon, bucket: str) -> None:
    wire = Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)
    where = urlsplit(daemon.endpoint)
    for content_type, body, code in (
        ("multipart/form-data", b"", "MalformedPOSTRequest"),
        ("multipart/form-data; boundary=b", b"", "MalformedPOSTRequest"),
        ("multipart/form-data; boundary=b", b"--b\r\nrubbish", "MalformedPOSTRequest"),
        ("multipart/form-data; boundary=b", b"x" * 30_000, "MaxPostPreDataLengthExceededError"),
        ("text/plain", b"", "MethodNotAllowed"),
    ):
        with closing(http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)) as connection:
            connection.request("POST", f"/{bucket}", body, {"Content-Type": content_type})
            answer = connection.getresponse()
            assert f"<Code>{code}</Code>".encode() in answer.read()
    signed = wire.call(
        "POST", f"/{bucket}", b"x", headers={"content-type": "multipart/form-data; boundary=b"}
    )
    assert (signed.status, signed.code) == (400, "InvalidArgument")
    wire.close()


def test_anybodys_form_where_the_bucket_lets_everybody_write(daemon: Daemon, s3: Any, bucket: str) -> None:
    assert send(daemon.endpoint, bucket, {"key": "k"}, b"x").code == "AccessDenied"
    statement = {
        "Effect": "Allow",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": f"arn:aws:s3:::{bucket}/open/*",
    }
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    assert send(daemon.endpoint, bucket, {"key": "open/k"}, b"anybody's").status == 204
    assert send(daemon.endpoint, bucket, {"key": "closed/k"}, b"x").code == "AccessDenied"
    assert send(daemon.endpoint, bucket, {"key": "open/../k", "acl": "public-read"}, b"x").status == 403
    assert s3.get_object(Bucket=bucket, Key="open/k")["Body"].read() == b"anybody's"


@pytest.mark.parametrize("version", [None, "s3v4"], ids=["sigv2", "sigv4"])
def test_temporary_credentials_sign_forms(daemon: Daemon, s3: Any, bucket: str, version: str | None) -> None:
    statement = {"Effect": "Allow", "Action": "s3:PutObject", "Resource": f"arn:aws:s3:::{bucket}/up/*"}
    policy = {"Version": "2012-10-17", "Statement": [statement]}
    made = json.loads(daemon.request("POST", "/-/sts", json.dumps({"policy": policy}).encode()).body)
    with closing(
        daemon.client(
            aws_access_key_id=made["AccessKeyId"],
            aws_secret_access_key=made["SecretAccessKey"],
            aws_session_token=made["SessionToken"],
            config=Config(signature_version=version),
        )
    ) as pod:
        assert send(daemon.endpoint, bucket, form(pod, bucket, "up/k"), b"x").status == 204
        assert send(daemon.endpoint, bucket, form(pod, bucket, "down/k"), b"x").code == "AccessDenied"
        tampered = form(pod, bucket, "up/k") | {"x-amz-security-token": "nonsense"}
        assert send(daemon.endpoint, bucket, tampered, b"x").status in (400, 403)
    assert [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]] == ["up/k"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(daemon: Daemon, s3: Any, bucket: str, signer: Any, tmp_path: Path) -> None:
    """It waits for 100 Continue."""
    file = tmp_path / "photo.bin"
    file.write_bytes(os.urandom(2 * MIB))
    fields = form(signer, bucket, "up/${filename}", success_action_status="200")
    command = ["curl", "-sS", "-w", "%{http_code}", "-H", "Expect: 100-continue"]
    for name, value in fields.items():
        command += ["--form-string", f"{name}={value}"]
    said = subprocess.run(
        [*command, "-F", f"file=@{file}", f"{daemon.endpoint}/{bucket}/"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert said.stdout == "200"
    assert s3.get_object(Bucket=bucket, Key="up/photo.bin")["Body"].read() == file.read_bytes()


def test_pages_may_read_the_answer(daemon: Daemon, s3: Any, bucket: str, signer: Any) -> None:
    rule = {"AllowedOrigins": ["https://page.example"], "AllowedMethods": ["POST"], "ExposeHeaders": ["ETag"]}
    s3.put_bucket_cors(Bucket=bucket, CORSConfiguration={"CORSRules": [rule]})
    origin = {"Origin": "https://page.example"}
    for fields, status in ((form(signer, bucket), 204), ({"key": "k"}, 403)):
        answer = send(daemon.endpoint, bucket, fields, b"x", headers=origin)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, origin["Origin"])


def test_a_form_cut_short_stores_nothing(daemon: Daemon, s3: Any, bucket: str, signer: Any) -> None:
    body, content_type = encode_multipart_formdata(
        [*form(signer, bucket).items(), ("file", ("f", b"x" * 99_999))]
    )
    wire = Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)
    for end in (len(body) - 200, 50_000):
        lines = ["Host: h", f"Content-Type: {content_type}", f"Content-Length: {end}", "", ""]
        head = "\r\n".join([f"POST /{bucket} HTTP/1.1", *lines])
        answer = wire.exchange(head.encode() + body[:end], method="POST")
        assert (answer.status, answer.code) == (400, "MalformedPOSTRequest")
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    wire.close()


def test_large_files_pass_through() -> None:
    with Daemon.start() as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="forms")
        worker = psutil.Process(daemon.children()["worker-0"])
        before = worker.memory_info().rss
        fields = client.generate_presigned_post("forms", "big")["fields"]
        head, content_type = encode_multipart_formdata([*fields.items(), ("file", ("big", b"@@@"))])
        start, end = head.split(b"@@@")
        wire = Wire(daemon.endpoint, daemon.access_key, daemon.secret_key)
        sock, piece, peak = wire.connect(), os.urandom(MIB), 0
        length = len(start) + 128 * MIB + len(end)
        sock.sendall(
            f"POST /forms HTTP/1.1\r\nHost: h\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {length}\r\n\r\n".encode()
            + start
        )
        for _ in range(128):
            sock.sendall(piece)
            peak = max(peak, worker.memory_info().rss)
        sock.sendall(end)
        assert sock.recv(12) == b"HTTP/1.1 204"
        assert peak - before < 48 * MIB
        assert client.head_object(Bucket="forms", Key="big")["ContentLength"] == 128 * MIB
        wire.close()
        client.close()
