"""Large files by boto3 and awscli, in parts, there and back."""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import TYPE_CHECKING, Any

from boto3.s3.transfer import TransferConfig

from tests.support.interpreters import program

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MIB = 1 << 20
PART = 8 * MIB
"""Of awscli by default."""


def by_boto3(s3: Any, bucket: str, key: str, source: Path, target: Path) -> None:
    """Upload a file in parts, download it in parts. Raises AssertionError unless it came back as it was."""
    parts = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=4)
    s3.upload_file(str(source), bucket, key, Config=parts)
    etag = s3.head_object(Bucket=bucket, Key=key)["ETag"].strip('"')
    assert etag.endswith(f"-{-(-source.stat().st_size // PART)}"), etag
    s3.download_file(bucket, key, str(target), Config=parts)
    assert digest(target) == digest(source)


def by_awscli(env: Mapping[str, str], bucket: str, key: str, source: Path, target: Path) -> None:
    """The same with `aws s3 cp`. Raises AssertionError."""
    for words in ((str(source), f"s3://{bucket}/{key}"), (f"s3://{bucket}/{key}", str(target))):
        done = aws("s3", "cp", "--no-progress", *words, env=env)
        assert done.returncode == 0, done.stderr
    assert digest(target) == digest(source)


def aws(*words: str, env: Mapping[str, str], given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run awscli with these variables, and none of ours."""
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true"}
    return subprocess.run(
        [program("aws"), *words],
        env=own | dict(env),
        input=given,
        capture_output=True,
        check=False,
        timeout=120,
    )


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
