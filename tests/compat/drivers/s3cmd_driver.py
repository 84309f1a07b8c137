"""s3cmd: Python with its own HTTP and signing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driving import Driver, serve

if TYPE_CHECKING:
    from driving import Endpoint


class S3cmd(Driver):
    name = "s3cmd"
    missing = {  # noqa: RUF012
        "put_if_absent": "it has no conditional upload",
        "put_if_match": "it has no conditional upload",
        "read_range": "it reads whole objects",
        "presign_put": "it signs URLs for reading",
    }

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.config = Path(endpoint.scratch, "s3cfg")
        self.config.write_text(
            "[default]\n"
            f"access_key = {endpoint.access_key}\nsecret_key = {endpoint.secret_key}\n"
            f"host_base = {endpoint.host}\nhost_bucket = {endpoint.host}\n"
            f"use_https = {endpoint.secure}\nca_certs_file = {endpoint.ca}\n"
            f"signurl_use_https = {endpoint.secure}\nbucket_location = {endpoint.region}\n"
            "multipart_chunk_size_mb = 5\nmax_retries = 1\n"
        )

    def _s3cmd(self, *arguments: str, **how: Any) -> str:
        program = self.beside_python("s3cmd")
        flags = ["--config", str(self.config), "--no-progress"]
        return self.run(sys.executable, "-W", "ignore", program, *flags, *arguments, **how)

    def version(self) -> str:
        return self._s3cmd("--version").split()[-1]

    def make_bucket(self, bucket: str) -> None:
        self._s3cmd("mb", f"s3://{bucket}")

    def remove_bucket(self, bucket: str) -> None:
        self._s3cmd("rb", f"s3://{bucket}")

    def list_buckets(self) -> list[str]:
        return [line.split("s3://")[1] for line in self._s3cmd("ls").splitlines()]

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        flags = [f"--add-header=x-amz-meta-{name}:{value}" for name, value in (metadata or {}).items()]
        flags += [f"--mime-type={content_type}"] if content_type else []
        self._s3cmd("put", *flags, path, f"s3://{bucket}/{key}")

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self._s3cmd("put", path, f"s3://{bucket}/{key}")

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        self._s3cmd("put", "-", f"s3://{bucket}/{key}", stdin=Path(path).read_bytes())

    def get(self, bucket: str, key: str, path: str) -> None:
        self._s3cmd("get", "--force", f"s3://{bucket}/{key}", path)

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        said = self._s3cmd("info", f"s3://{bucket}/{key}")
        fields = [line.strip().partition(":") for line in said.splitlines()[1:]]
        told = {name: value.strip() for name, _, value in fields}
        return {
            "size": int(told["File size"]),
            "content_type": told["MIME type"],
            "etag": told["MD5 sum"],
            "metadata": {
                name.removeprefix("x-amz-meta-"): value
                for name, value in told.items()
                if name.startswith("x-amz-meta-") and name != "x-amz-meta-s3cmd-attrs"
            },
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        flags = [] if delimiter else ["--recursive"]
        said = self._s3cmd("ls", *flags, f"s3://{bucket}/{prefix}").splitlines()
        found = [(line.split()[0], line.split(f"s3://{bucket}/", 1)[1]) for line in said]
        return {
            "keys": [name for kind, name in found if kind != "DIR"],
            "prefixes": [name for kind, name in found if kind == "DIR"],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self._s3cmd("cp", f"s3://{bucket}/{key}", f"s3://{bucket}/{target}")

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        self._s3cmd("del", *(f"s3://{bucket}/{key}" for key in keys))

    def presign_get(self, bucket: str, key: str) -> str:
        return self._s3cmd("signurl", f"s3://{bucket}/{key}", "+600").strip()

    def sync_up(self, folder: str, bucket: str, prefix: str) -> int | None:
        said = self._s3cmd("sync", f"{folder}{os.sep}", f"s3://{bucket}/{prefix}/")
        return sum(line.startswith("upload:") for line in said.splitlines())

    def sync_down(self, bucket: str, prefix: str, folder: str) -> None:
        self._s3cmd("sync", f"s3://{bucket}/{prefix}/", f"{folder}{os.sep}")


if __name__ == "__main__":
    serve(S3cmd)
