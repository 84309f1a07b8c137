"""rclone (Go, aws-sdk-go version 2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driving import Driver, serve

if TYPE_CHECKING:
    from driving import Endpoint


class Rclone(Driver):
    name = "rclone"
    missing = {  # noqa: RUF012
        "put_if_absent": "it has no conditional upload",
        "put_if_match": "it has no conditional upload",
        "presign_put": "it links to objects that are there",
    }

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.settings = {
            "RCLONE_CONFIG_MESH_TYPE": "s3",
            "RCLONE_CONFIG_MESH_PROVIDER": "Other",
            "RCLONE_CONFIG_MESH_ENDPOINT": endpoint.url,
            "RCLONE_CONFIG_MESH_ACCESS_KEY_ID": endpoint.access_key,
            "RCLONE_CONFIG_MESH_SECRET_ACCESS_KEY": endpoint.secret_key,
            "RCLONE_CONFIG_MESH_REGION": endpoint.region,
            "RCLONE_CONFIG": "/dev/null",
            "RCLONE_LOW_LEVEL_RETRIES": "1",
            "RCLONE_RETRIES": "1",
            "RCLONE_S3_UPLOAD_CUTOFF": "5M",
            "RCLONE_S3_CHUNK_SIZE": "5M",
            "RCLONE_STREAMING_UPLOAD_CUTOFF": "100k",
            "RCLONE_LOG_FORMAT": "",
        }
        if endpoint.ca:
            self.settings["RCLONE_CA_CERT"] = endpoint.ca

    def _rclone(self, *arguments: str, **how: Any) -> str:
        return self.run(self.beside_python("rclone"), *arguments, environment=self.settings, **how)

    def version(self) -> str:
        return self._rclone("version").split()[1].removeprefix("v")

    def make_bucket(self, bucket: str) -> None:
        self._rclone("mkdir", f"mesh:{bucket}")

    def remove_bucket(self, bucket: str) -> None:
        self._rclone("rmdir", f"mesh:{bucket}")

    def list_buckets(self) -> list[str]:
        return [line.rstrip("/") for line in self._rclone("lsf", "mesh:").splitlines()]

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        flags = [
            flag for name, value in (metadata or {}).items() for flag in ("--metadata-set", f"{name}={value}")
        ]
        flags += ["--metadata-set", f"content-type={content_type}"] if content_type else []
        flags += ["--metadata"] if flags else []
        self._rclone("copyto", *flags, path, f"mesh:{bucket}/{key}")

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self._rclone("copyto", path, f"mesh:{bucket}/{key}")

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        self._rclone("rcat", f"mesh:{bucket}/{key}", stdin=Path(path).read_bytes())

    def get(self, bucket: str, key: str, path: str) -> None:
        self._rclone("copyto", f"mesh:{bucket}/{key}", path)

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        flags = ["--offset", str(start), "--count", str(end - start)]
        self._rclone("cat", *flags, f"mesh:{bucket}/{key}", stdout=path)

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        entry = json.loads(self._rclone("lsjson", "--stat", "--metadata", f"mesh:{bucket}/{key}"))
        kept = entry.get("Metadata", {})
        known = {"atime", "btime", "content-type", "mtime", "tier", "cache-control", "utime"}
        return {
            "size": entry["Size"],
            "content_type": entry["MimeType"],
            "metadata": {name: value for name, value in kept.items() if name not in known},
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        flags = [] if delimiter else ["--recursive", "--files-only"]
        folder = prefix.rstrip("/")
        found = json.loads(self._rclone("lsjson", *flags, f"mesh:{bucket}/{folder}"))
        start = f"{folder}/" if folder else ""
        return {
            "keys": [start + entry["Path"] for entry in found if not entry["IsDir"]],
            "prefixes": [f"{start}{entry['Path']}/" for entry in found if entry["IsDir"]],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self._rclone("copyto", f"mesh:{bucket}/{key}", f"mesh:{bucket}/{target}")

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        named = Path(self.endpoint.scratch, "named")
        named.write_text("".join(f"{key}\n" for key in keys))
        self._rclone("delete", "--files-from-raw", str(named), f"mesh:{bucket}")

    def presign_get(self, bucket: str, key: str) -> str:
        return self._rclone("link", "--expire", "1h", f"mesh:{bucket}/{key}").strip()

    def sync_up(self, folder: str, bucket: str, prefix: str) -> int | None:
        flags = ["--use-json-log", "--stats-one-line", "--log-level", "INFO", "--stats", "0"]
        log = Path(self.endpoint.scratch, "rclone.log")
        log.unlink(missing_ok=True)
        self._rclone("sync", *flags, "--log-file", str(log), folder, f"mesh:{bucket}/{prefix}")
        return log.read_text().count('"msg":"Copied ') + log.read_text().count('"msg":"Multi-thread Copied ')

    def sync_down(self, bucket: str, prefix: str, folder: str) -> None:
        self._rclone("sync", f"mesh:{bucket}/{prefix}", folder)


if __name__ == "__main__":
    serve(Rclone)
