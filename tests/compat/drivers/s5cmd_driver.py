"""s5cmd (Go, aws-sdk-go version 1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driving import Driver, serve

if TYPE_CHECKING:
    from collections.abc import Sequence


class S5cmd(Driver):
    name = "s5cmd"
    missing = {  # noqa: RUF012
        "put_if_absent": "it has no conditional upload (--no-clobber asks first, then writes)",
        "put_if_match": "it has no conditional upload",
        "read_range": "its ranges are its own: parts of a download",
    }

    def _s5cmd(self, *arguments: str, flags: Sequence[str] = (), stdin: bytes | None = None) -> str:
        common = ["--retry-count", "0", "--endpoint-url", self.endpoint.url, *flags]
        return self.run(self.beside_python("s5cmd"), *common, *arguments, stdin=stdin)

    def version(self) -> str:
        return self.run(self.beside_python("s5cmd"), "version").strip().split("-")[0].removeprefix("v")

    def make_bucket(self, bucket: str) -> None:
        self._s5cmd("mb", f"s3://{bucket}")

    def remove_bucket(self, bucket: str) -> None:
        self._s5cmd("rb", f"s3://{bucket}")

    def list_buckets(self) -> list[str]:
        return [line.split("s3://")[1] for line in self._s5cmd("ls").splitlines()]

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        flags = [f"--metadata={name}={value}" for name, value in (metadata or {}).items()]
        flags += [f"--content-type={content_type}"] if content_type else []
        # It would take * and ? in the path of a file for patterns, but not in its target.
        self._s5cmd("cp", *flags, "--raw", path, f"s3://{bucket}/{key}")

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self._s5cmd("cp", "--part-size", "5", path, f"s3://{bucket}/{key}")

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        self._s5cmd("pipe", "--part-size", "5", f"s3://{bucket}/{key}", stdin=Path(path).read_bytes())

    def get(self, bucket: str, key: str, path: str) -> None:
        self._s5cmd("cp", "--raw", "--part-size", "5", f"s3://{bucket}/{key}", path)

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        head = json.loads(self._s5cmd("head", "--raw", f"s3://{bucket}/{key}", flags=["--json"]))
        return {
            "size": head["size"],
            "etag": head["etag"].strip('"'),
            "metadata": {name.lower(): value for name, value in head.get("metadata", {}).items()},
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        pattern = f"{prefix}*" if not delimiter else prefix
        said = self._s5cmd("ls", f"s3://{bucket}/{pattern}", flags=["--json"])
        found = [json.loads(line) for line in said.splitlines()]
        names = [entry["key"].removeprefix(f"s3://{bucket}/") for entry in found]
        return {
            "keys": [name for name, entry in zip(names, found, strict=True) if entry["type"] == "file"],
            "prefixes": [name for name, entry in zip(names, found, strict=True) if entry["type"] != "file"],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self._s5cmd("cp", "--raw", f"s3://{bucket}/{key}", f"s3://{bucket}/{target}")

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        self._s5cmd("rm", "--raw", *(f"s3://{bucket}/{key}" for key in keys))

    def presign_get(self, bucket: str, key: str) -> str:
        return self._s5cmd("presign", f"s3://{bucket}/{key}").strip()

    def sync_up(self, folder: str, bucket: str, prefix: str) -> int | None:
        said = self._s5cmd("sync", f"{folder}/", f"s3://{bucket}/{prefix}/")
        return len(said.splitlines())

    def sync_down(self, bucket: str, prefix: str, folder: str) -> None:
        self._s5cmd("sync", f"s3://{bucket}/{prefix}/*", f"{folder}/")


if __name__ == "__main__":
    serve(S5cmd)
