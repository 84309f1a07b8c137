"""obstore: the Rust object_store crate."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from driving import PART, Driver, OneWay, serve
from obstore.store import S3Store

if TYPE_CHECKING:
    from collections.abc import Iterator


class Obstore(Driver):
    name = "obstore"
    checksums = ("SHA256",)
    missing = {  # noqa: RUF012
        "make_bucket": "it works inside a bucket that is there",
        "remove_bucket": "it works inside a bucket that is there",
        "list_buckets": "it works inside a bucket that is there",
    }

    def _store(self, bucket: str, **config: Any) -> S3Store:
        options: dict[str, Any] = {"allow_http": not self.endpoint.secure}
        return S3Store(
            bucket,
            endpoint=self.endpoint.url,
            access_key_id=self.endpoint.access_key,
            secret_access_key=self.endpoint.secret_key,
            region=self.endpoint.region,
            virtual_hosted_style_request=False,
            client_options=options,
            retry_config={"max_retries": 0},
            **config,
        )

    def version(self) -> str:
        return str(obstore.__version__)

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        store = self._store(bucket, checksum_algorithm=checksum) if checksum else self._store(bucket)
        attributes = dict(metadata or {}) | ({"Content-Type": content_type} if content_type else {})
        obstore.put(store, key, Path(path).read_bytes(), attributes=attributes, use_multipart=False)

    def put_large(self, bucket: str, key: str, path: str) -> None:
        obstore.put(self._store(bucket), key, Path(path), chunk_size=PART, use_multipart=True)

    def put_stream(self, bucket: str, key: str, path: str) -> None:
        obstore.put(self._store(bucket), key, _pieces(path), chunk_size=PART)

    def get(self, bucket: str, key: str, path: str) -> None:
        Path(path).write_bytes(obstore.get(self._store(bucket), key).bytes())

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        Path(path).write_bytes(obstore.get_range(self._store(bucket), key, start=start, end=end))

    def head(self, bucket: str, key: str) -> dict[str, Any]:
        got = obstore.get(self._store(bucket), key)
        kept = dict(got.attributes)
        return {
            "size": got.meta["size"],
            "etag": (got.meta["e_tag"] or "").strip('"'),
            "content_type": kept.pop("Content-Type", None),
            "metadata": kept,
        }

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        store = self._store(bucket)
        if delimiter:
            found = obstore.list_with_delimiter(store, prefix)
            return {
                "keys": [entry["path"] for entry in found["objects"]],
                "prefixes": [f"{name}/" for name in found["common_prefixes"]],
            }
        keys = [entry["path"] for batch in obstore.list(store, prefix) for entry in batch]
        return {"keys": keys, "prefixes": []}

    def copy(self, bucket: str, key: str, target: str) -> None:
        obstore.copy(self._store(bucket), key, target)

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        obstore.delete(self._store(bucket), keys)

    def presign_get(self, bucket: str, key: str) -> str:
        return str(obstore.sign(self._store(bucket), "GET", key, timedelta(minutes=5)))

    def presign_put(self, bucket: str, key: str) -> str:
        return str(obstore.sign(self._store(bucket), "PUT", key, timedelta(minutes=5)))

    def put_if_absent(self, bucket: str, key: str, path: str) -> bool:
        try:
            obstore.put(self._store(bucket), key, Path(path).read_bytes(), mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    def put_if_match(self, bucket: str, key: str, path: str, etag: str) -> bool:
        try:
            obstore.put(self._store(bucket), key, Path(path).read_bytes(), mode={"e_tag": f'"{etag}"'})
        except obstore.exceptions.PreconditionError:
            return False
        return True


def _pieces(path: str) -> Iterator[bytes]:
    with OneWay(path) as stream:
        while piece := stream.read(100_001):
            yield piece


if __name__ == "__main__":
    serve(Obstore)
