"""Temporary credentials with boto3: session tokens in headers and presigned URLs, and credential_process."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.daemons import Daemon
from tests.support.s3_raw import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READ_TRAIN = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::photos/train/*"}],
}


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with Daemon.start(workers=2) as running:
        with contextlib.closing(running.client()) as client:
            client.create_bucket(Bucket="photos")
            client.put_object(Bucket="photos", Key="train/1", Body=b"one")
            client.put_object(Bucket="photos", Key="test/1", Body=b"two")
        yield running


def make(node: Daemon, **body: Any) -> dict[str, str]:
    answer = node.request("POST", "/-/sts", json.dumps(body).encode())
    assert answer.status == 200, answer.body
    assert answer.headers["cache-control"] == "no-store"
    document: dict[str, str] = json.loads(answer.body)
    return document


def client(node: Daemon, made: dict[str, str], **changes: Any) -> Any:
    options: dict[str, Any] = {
        "aws_access_key_id": made["AccessKeyId"],
        "aws_secret_access_key": made["SecretAccessKey"],
        "aws_session_token": made["SessionToken"],
    }
    return contextlib.closing(node.client(**(options | changes)))


def code(call: Any, **arguments: Any) -> str:
    try:
        call(**arguments)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def test_boto3_reads_one_prefix_with_a_session_token(node: Daemon) -> None:
    made = make(node, policy=READ_TRAIN)
    with client(node, made) as pod:
        assert pod.get_object(Bucket="photos", Key="train/1")["Body"].read() == b"one"
        assert code(pod.get_object, Bucket="photos", Key="test/1") == "AccessDenied"
        assert code(pod.put_object, Bucket="photos", Key="train/1", Body=b"") == "AccessDenied"
        assert code(pod.list_objects_v2, Bucket="photos") == "AccessDenied"
        assert code(pod.delete_bucket, Bucket="photos") == "AccessDenied"


def test_without_a_policy_they_may_what_their_key_may(node: Daemon) -> None:
    with client(node, make(node)) as pod:
        pod.put_object(Bucket="photos", Key="new", Body=b"x")
        assert [entry["Key"] for entry in pod.list_objects_v2(Bucket="photos")["Contents"]] == [
            "new",
            "test/1",
            "train/1",
        ]
        pod.delete_object(Bucket="photos", Key="new")


@pytest.mark.parametrize("version", ["s3", "s3v4"])
def test_presigned_urls_carry_the_token(node: Daemon, version: str) -> None:
    made = make(node, policy=READ_TRAIN)
    with client(node, made, config=Config(signature_version=version)) as pod:
        url = pod.generate_presigned_url("get_object", {"Bucket": "photos", "Key": "train/1"})
        other = pod.generate_presigned_url("get_object", {"Bucket": "photos", "Key": "test/1"})
    with urlopen(url) as answer:
        assert answer.read() == b"one"
    assert status(node, other) == 403
    assert status(node, url.replace("mesht1.", "mesht1.A")) == 400


def status(node: Daemon, url: str) -> int:
    wire = Wire(node.endpoint, "", "")
    target = url.removeprefix(node.endpoint)
    answer = wire.exchange(f"GET {target} HTTP/1.1\r\nHost: {wire.host}\r\n\r\n".encode(), method="GET")
    wire.close()
    return answer.status


def test_the_longest_tokens_fit_headers_and_urls(node: Daemon) -> None:
    statement = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": ["*", "arn:aws:s3:::" + "x" * 3950]}
    long = {"Version": "2012-10-17", "Statement": statement}
    made = make(node, policy=long)
    with contextlib.closing(Wire(node.endpoint, made["AccessKeyId"], made["SecretAccessKey"])) as wire:
        wire.session_token = made["SessionToken"]
        made = json.loads(wire.call("POST", "/-/sts", json.dumps({"policy": long}).encode()).body)
    assert len(made["SessionToken"]) > 10_000
    with client(node, made) as pod:
        assert pod.get_object(Bucket="photos", Key="test/1")["Body"].read() == b"two"
        assert code(pod.list_buckets) in ("", "AccessDenied")
        url = pod.generate_presigned_url("get_object", {"Bucket": "photos", "Key": "test/1"})
    with urlopen(url) as answer:
        assert answer.read() == b"two"


def test_tokens_of_another_key_forged_ones_and_none_are_refused(node: Daemon) -> None:
    made, other = make(node), make(node)
    with client(node, made, aws_session_token=other["SessionToken"]) as mixed:
        assert code(mixed.list_buckets) == "InvalidToken"
    with client(node, made, aws_session_token=made["SessionToken"][:-2] + "AA") as forged:
        assert code(forged.list_buckets) == "InvalidToken"
    with client(node, made, aws_session_token=None) as without:
        assert code(without.list_buckets) == "InvalidAccessKeyId"
    with client(node, made, aws_secret_access_key=other["SecretAccessKey"]) as mixed:
        assert code(mixed.list_buckets) == "SignatureDoesNotMatch"
    with contextlib.closing(node.client(aws_session_token=made["SessionToken"])) as mixed:
        assert code(mixed.list_buckets) == "InvalidToken"


def test_they_survive_a_restart_and_end_with_their_key(tmp_path: Path) -> None:
    with Daemon.start(workers=2) as node:
        node.request("POST", "/-/admin/users", b'{"user_id": "ann"}')
        key = json.loads(node.request("POST", "/-/admin/keys", b'{"user_id": "ann"}').body)
        with contextlib.closing(Wire(node.endpoint, key["access_key"], key["secret_key"])) as ann:
            made = json.loads(ann.call("POST", "/-/sts", b"{}").body)
        assert json.loads(node.request("GET", "/-/admin/keys?user=ann").body)["keys"][0]["last_used"] == ""
        node.restart()
        (used,) = json.loads(node.request("GET", "/-/admin/keys?user=ann").body)["keys"]
        assert used["last_used"].startswith("20")
        with client(node, made) as pod:
            assert code(pod.list_buckets) == ""
            node.request("PATCH", f"/-/admin/keys/{key['access_key']}", b'{"enabled": false}')
            assert code(pod.list_buckets) == "InvalidToken"
            node.request("PATCH", f"/-/admin/keys/{key['access_key']}", b'{"enabled": true}')
            assert code(pod.list_buckets) == ""
            node.request("DELETE", "/-/admin/users/ann")
            assert code(pod.list_buckets) == "InvalidToken"


def test_botocore_gets_them_from_the_command_by_itself(
    node: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"access_key": node.access_key, "secret_key": node.secret_key}))
    words = [sys.executable, "-m", "meshd", "admin", "sts", "--endpoint", node.endpoint, "--keys", str(keys)]
    config = tmp_path / "config"
    config.write_text(f"[profile train]\nregion = us-east-1\ncredential_process = {shlex.join(words)}\n")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    session = boto3.session.Session(profile_name="train")
    with contextlib.closing(session.client("s3", endpoint_url=node.endpoint)) as pod:
        assert pod.get_object(Bucket="photos", Key="train/1")["Body"].read() == b"one"
    credentials = session.get_credentials()
    assert credentials is not None
    assert credentials.access_key.startswith("MSTS")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"duration_seconds": 60}', "15 minutes"),
        (b'{"duration_seconds": "900"}', "$.duration_seconds"),
        (b'{"duration": 900}', "unknown field"),
        (b'{"policy": {"Statement": []}}', "Statement"),
        (b"no json", "the body is not valid"),
        (b"\xff\xfe", "the body is not valid"),
    ],
)
def test_bad_wishes_are_refused_with_the_place(node: Daemon, body: bytes, told: str) -> None:
    answer = node.request("POST", "/-/sts", body)
    assert answer.status == 400
    error = json.loads(answer.body)["error"]
    assert told in error["message"]
    assert set(error) == {"code", "message", "request_id", "detail", "help"}


def test_unsigned_presigned_and_unsigned_bodies_get_none(node: Daemon) -> None:
    with contextlib.closing(Wire(node.endpoint, node.access_key, node.secret_key)) as wire:
        head = f"POST /-/sts HTTP/1.1\r\nHost: {wire.host}\r\nContent-Length: 0\r\n\r\n".encode()
        assert wire.exchange(head, method="POST").status == 403
        body = b'{"name": "x"}'
        signed = wire.head("POST", "/-/sts", headers={"content-length": str(len(body))})
        answer = wire.exchange(signed + body, method="POST")
        assert answer.status == 403
        assert b"sign the body too" in answer.body
    with contextlib.closing(node.client(config=Config(signature_version="s3v4"))) as root:
        url = root.generate_presigned_url("put_object", {"Bucket": "-", "Key": "admin/policies/x"})
        target = url.removeprefix(node.endpoint)
    with contextlib.closing(Wire(node.endpoint, "", "")) as wire:
        put = f"PUT {target} HTTP/1.1\r\nHost: {wire.host}\r\nContent-Length: 0\r\n\r\n"
        answer = wire.exchange(put.encode())
        assert answer.status == 403
        assert b"presigned URLs are not accepted here" in answer.body
