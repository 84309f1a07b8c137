"""minio-py."""

from __future__ import annotations

import importlib.metadata
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import urllib3
from driving import PART, Driver, OneWay, serve
from minio import Minio
from minio.commonconfig import CopySource
from minio.deleteobjects import DeleteObject

if TYPE_CHECKING:
    from driving import Endpoint


class MinioPy(Driver):
    name = "minio-py"
    missing = {  # noqa: RUF012
        "put_if_absent": "it has no conditional upload",
        "put_if_match": "it has no conditional upload",
    }

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        pool = urllib3.PoolManager(ca_certs=endpoint.ca) if endpoint.ca else urllib3.PoolManager()
        self.minio = Minio(
            endpoint.host,
            access_key=endpoint.access_key,
            secret_key=endpoint.secret_key,
            secure=endpoint.secure,
            http_client=pool,
        )

    def version(self) -> str:
        return importlib.metadata.version("minio")

    def make_bucket(self, bucket: str) -> None:
        self.minio.make_bucket(bucket)

    def remove_bucket(self, bucket: str) -> None:
        self.minio.remove_bucket(bucket)

    def list_buckets(self) -> list[str]:
        return [bucket.name for bucket in self.minio.list_buckets()]

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        data = Path(path).read_bytes()
        kind = content_type or "application/octet-stream"
        self.minio.put_object(bucket, key, BytesIO(data), len(data), kind, dict(metadata or {}))

    def put_large(self, bucket: str, key: str, path: str) -> None:
        self.minio.fput_object(bucket, key, path, part_size=PART)

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        with OneWay(path) as stream:
            self.minio.put_object(bucket, key, stream, -1, part_size=PART)

    def get(self, bucket: str, key: str, path: str) -> None:
        self.minio.fget_object(bucket, key, path)

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        got = self.minio.get_object(bucket, key, offset=start, length=end - start)
        Path(path).write_bytes(got.read())
        got.close()
        got.release_conn()

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        stat = self.minio.stat_object(bucket, key)
        start = "x-amz-meta-"
        return {
            "size": stat.size,
            "etag": stat.etag,
            "content_type": stat.content_type,
            "metadata": {
                name.lower().removeprefix(start): value
                for name, value in (stat.metadata or {}).items()
                if name.lower().startswith(start)
            },
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        found = list(self.minio.list_objects(bucket, prefix, recursive=not delimiter))
        return {
            "keys": [entry.object_name or "" for entry in found if not entry.is_dir],
            "prefixes": [entry.object_name or "" for entry in found if entry.is_dir],
        }

    def copy(self, bucket: str, key: str, target: str) -> None:
        self.minio.copy_object(bucket, target, CopySource(bucket, key))

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        errors = list(self.minio.remove_objects(bucket, [DeleteObject(key) for key in keys]))
        assert not errors, errors

    def presign_get(self, bucket: str, key: str) -> str:
        return str(self.minio.presigned_get_object(bucket, key))

    def presign_put(self, bucket: str, key: str) -> str:
        return str(self.minio.presigned_put_object(bucket, key))


if __name__ == "__main__":
    serve(MinioPy)
