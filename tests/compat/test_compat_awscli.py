"""The AWS command line, unmodified."""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from typing import TYPE_CHECKING

import pytest

from tests.support.interpreters import program

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.daemons import Daemon

Aws = "Callable[..., str]"
MIB = 1 << 20


@pytest.fixture
def aws(daemon: Daemon, tmp_path: Path) -> Callable[..., str]:
    """Runs `aws ARGS` against the daemon; returns what it prints, fails with what it complains of."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "AWS_ACCESS_KEY_ID": daemon.access_key,
        "AWS_SECRET_ACCESS_KEY": daemon.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_PAGER": "",
    }

    def run(*arguments: str) -> str:
        command = [program("aws"), "--endpoint-url", daemon.endpoint, *arguments]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def bucket(aws: Callable[..., str]) -> str:
    name = f"cli-{uuid.uuid4().hex[:10]}"
    aws("s3", "mb", f"s3://{name}")
    return name


def test_a_folder_goes_there_and_back(aws: Callable[..., str], bucket: str, tmp_path: Path) -> None:
    files = {
        "empty": b"",
        "small.txt": b"small",
        "dir/sub/ünï cödé+&.bin": os.urandom(1000),
        "large.bin": os.urandom(20 * MIB),
    }
    for name, data in files.items():
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    aws("s3", "sync", "out", f"s3://{bucket}/p")
    assert aws("s3", "sync", "out", f"s3://{bucket}/p") == ""
    aws("s3", "sync", f"s3://{bucket}/p", "back")
    for name, data in files.items():
        assert (tmp_path / "back" / name).read_bytes() == data
    listed = aws("s3", "ls", "--recursive", f"s3://{bucket}/p/")
    assert len(listed.splitlines()) == len(files)
    aws("s3", "cp", f"s3://{bucket}/p/large.bin", f"s3://{bucket}/copied")
    aws("s3", "mv", f"s3://{bucket}/p/small.txt", f"s3://{bucket}/moved")
    aws("s3", "cp", f"s3://{bucket}/copied", "copied")
    assert (tmp_path / "copied").read_bytes() == files["large.bin"]
    aws("s3", "rm", "--recursive", f"s3://{bucket}")
    aws("s3", "rb", f"s3://{bucket}")


def test_s3api(aws: Callable[..., str], bucket: str, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"0123456789")
    put = ("s3api", "put-object", "--bucket", bucket, "--key", "k", "--body", "body")
    stored = json.loads(aws(*put, "--metadata", "a=1,b=2", "--checksum-algorithm", "SHA256"))
    head = json.loads(aws("s3api", "head-object", "--bucket", bucket, "--key", "k"))
    assert (head["ETag"], head["Metadata"]) == (stored["ETag"], {"a": "1", "b": "2"})
    get = ("s3api", "get-object", "--bucket", bucket, "--key", "k")
    part = json.loads(aws(*get, "--range", "bytes=2-4", "part"))
    assert (part["ContentRange"], (tmp_path / "part").read_bytes()) == ("bytes 2-4/10", b"234")
    with pytest.raises(AssertionError, match="PreconditionFailed"):
        aws(*put, "--if-none-match", "*")
    listing = json.loads(aws("s3api", "list-objects-v2", "--bucket", bucket))
    assert [entry["Key"] for entry in listing["Contents"]] == ["k"]
    named = '{"Objects": [{"Key": "k"}, {"Key": "none"}]}'
    deleted = json.loads(aws("s3api", "delete-objects", "--bucket", bucket, "--delete", named))
    assert len(deleted["Deleted"]) == 2


def test_from_standard_input(aws: Callable[..., str], bucket: str, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"streamed")
    aws("s3", "cp", "body", f"s3://{bucket}/k")
    assert aws("s3", "cp", f"s3://{bucket}/k", "-") == "streamed"
