"""The AWS command line: its entry point, called in this process, as starting Python each time is slow."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import awscli
from awscli.clidriver import create_clidriver
from driving import PART, Driver, FailedError, serve

if TYPE_CHECKING:
    from driving import Endpoint


class Awscli(Driver):
    name = "awscli"
    checksums = ("CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256")

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        os.chdir(endpoint.scratch)
        config = Path(endpoint.scratch, "aws-config")
        config.write_text(
            f"[default]\ns3 =\n  multipart_threshold = {PART}\n  multipart_chunksize = {PART}\n"
        )
        self.more = {"AWS_CONFIG_FILE": str(config), "AWS_MAX_ATTEMPTS": "1", "AWS_PAGER": ""}
        os.environ.update(endpoint.environment() | self.more)

    def version(self) -> str:
        return str(awscli.__version__)

    def _aws(self, *arguments: str) -> str:
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = create_clidriver().main(["--endpoint-url", self.endpoint.url, *arguments])
        if code:
            raise FailedError(f"aws {arguments[0]} {arguments[1]} {code}: {errors.getvalue()}")
        return out.getvalue()

    def _api(self, call: str, *arguments: str) -> dict[str, Any]:
        printed = self._aws("s3api", call, "--output", "json", *arguments)
        return dict(json.loads(printed)) if printed.strip() else {}

    def make_bucket(self, bucket: str) -> None:
        self._aws("s3", "mb", f"s3://{bucket}")

    def remove_bucket(self, bucket: str) -> None:
        self._aws("s3", "rb", f"s3://{bucket}")

    def list_buckets(self) -> list[str]:
        return [line.split()[-1] for line in self._aws("s3", "ls").splitlines()]

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        arguments = ["--bucket", bucket, "--key", key, "--body", path]
        arguments += ["--metadata", json.dumps(metadata)] if metadata else []
        arguments += ["--content-type", content_type] if content_type else []
        arguments += ["--checksum-algorithm", checksum] if checksum else []
        self._api("put-object", *arguments)

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self._aws("s3", "cp", "--quiet", path, f"s3://{bucket}/{key}")

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        command = [sys.executable, self.beside_python("aws"), "--endpoint-url", self.endpoint.url]
        with Path(path).open("rb") as file, subprocess.Popen(["cat"], stdin=file, stdout=-1) as pipe:
            subprocess.run([*command, "s3", "cp", "-", f"s3://{bucket}/{key}"], stdin=pipe.stdout, check=True)

    def get(self, bucket: str, key: str, path: str) -> None:
        self._aws("s3", "cp", "--quiet", f"s3://{bucket}/{key}", path)

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        self._api("get-object", "--bucket", bucket, "--key", key, "--range", f"bytes={start}-{end - 1}", path)

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        head = self._api("head-object", "--bucket", bucket, "--key", key)
        return {
            "size": head["ContentLength"],
            "metadata": head["Metadata"],
            "content_type": head["ContentType"],
            "etag": head["ETag"].strip('"'),
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        arguments = ["--bucket", bucket, "--prefix", prefix, "--page-size", "400"]
        arguments += ["--delimiter", delimiter] if delimiter else []
        listing = self._api("list-objects-v2", *arguments)
        return {
            "keys": [entry["Key"] for entry in listing.get("Contents", [])],
            "prefixes": [entry["Prefix"] for entry in listing.get("CommonPrefixes", [])],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self._aws("s3", "cp", "--quiet", f"s3://{bucket}/{key}", f"s3://{bucket}/{target}")

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        named = json.dumps({"Objects": [{"Key": key} for key in keys]})
        gone = self._api("delete-objects", "--bucket", bucket, "--delete", named)
        assert not gone.get("Errors"), gone["Errors"]

    def presign_get(self, bucket: str, key: str) -> str:
        return self._aws("s3", "presign", f"s3://{bucket}/{key}").strip()

    def put_if_absent(self, bucket: str, key: str, path: str) -> bool:
        return self._conditional(bucket, key, path, "--if-none-match", "*")

    def put_if_match(self, bucket: str, key: str, path: str, etag: str) -> bool:
        return self._conditional(bucket, key, path, "--if-match", etag)

    def _conditional(self, bucket: str, key: str, path: str, *condition: str) -> bool:
        try:
            self._api("put-object", "--bucket", bucket, "--key", key, "--body", path, *condition)
        except FailedError as error:
            if "PreconditionFailed" not in str(error):
                raise
            return False
        return True

    def sync_up(self, folder: str, bucket: str, prefix: str) -> int | None:
        said = self._aws("s3", "sync", "--no-progress", folder, f"s3://{bucket}/{prefix}")
        return said.count("upload:")

    def sync_down(self, bucket: str, prefix: str, folder: str) -> None:
        self._aws("s3", "sync", "--quiet", f"s3://{bucket}/{prefix}", folder)


if __name__ == "__main__":
    serve(Awscli)
