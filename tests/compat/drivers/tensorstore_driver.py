"""tensorstore: its key-value store, transactions over it, and Zarr arrays with shards."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorstore as ts
from driving import Driver, serve

if TYPE_CHECKING:
    from driving import Endpoint


class Tensorstore(Driver):
    name = "tensorstore"
    missing = {  # noqa: RUF012
        "make_bucket": "it works inside a bucket that is there",
        "remove_bucket": "it works inside a bucket that is there",
        "list_buckets": "it works inside a bucket that is there",
        "put_large": "it writes every value with one PUT",
        "put_stream": "it writes values that are in memory",
        "presign_get": "it signs no URLs",
        "presign_put": "it signs no URLs",
        "copy": "its driver copies through the client",
    }

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        os.environ.update(endpoint.environment())
        os.environ["TENSORSTORE_CA_BUNDLE"] = endpoint.ca
        self.context = ts.Context({"s3_request_retries": {"max_retries": 1}})

    def _spec(self, bucket: str, path: str = "") -> dict[str, Any]:
        return {
            "driver": "s3",
            "bucket": bucket,
            "path": path,
            "endpoint": self.endpoint.url,
            "aws_region": self.endpoint.region,
            "aws_credentials": {"type": "environment"},
        }

    def _store(self, bucket: str) -> Any:
        return ts.KvStore.open(self._spec(bucket), context=self.context).result()

    def version(self) -> str:
        return importlib.metadata.version("tensorstore")

    def put(
        self,
        bucket: str,
        key: str,
        path: str,
        metadata: dict[str, str] | None = None,
        content_type: str | None = None,
        checksum: str | None = None,
    ) -> None:
        self.only_bytes(metadata, content_type, checksum)
        self._store(bucket).write(key, Path(path).read_bytes()).result()

    def get(self, bucket: str, key: str, path: str) -> None:
        got = self._store(bucket).read(key).result()
        assert got.state == "value", got
        Path(path).write_bytes(got.value)

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        got = self._store(bucket).read(key, byte_range=slice(start, end)).result()
        Path(path).write_bytes(got.value)

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        if delimiter:
            self._no("listing")
        whole = ts.KvStore.KeyRange(prefix, prefix + "\U0010ffff")
        return {
            "keys": [key.decode() for key in self._store(bucket).list(whole).result()],
            "prefixes": [],
        }

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        store = self._store(bucket)
        for done in [store.write(key, None) for key in keys]:
            done.result()

    def put_if_absent(self, bucket: str, key: str, path: str) -> bool:
        nothing = self._store(bucket).read("never written").result().stamp.generation
        return self._conditional(bucket, key, path, nothing)

    def put_if_match(self, bucket: str, key: str, path: str, etag: str) -> bool:
        seen = self._store(bucket).read(key).result().stamp.generation
        assert etag.encode() in seen
        return self._conditional(bucket, key, path, seen)

    def _conditional(self, bucket: str, key: str, path: str, seen: bytes) -> bool:
        wrote = self._store(bucket).write(key, Path(path).read_bytes(), if_equal=seen).result()
        return bool(wrote.generation)

    def own_work(self, bucket: str, prefix: str) -> str:
        for driver, more in (("zarr3", self._sharded()), ("zarr", {})):
            spec = {"driver": driver, "kvstore": self._spec(bucket, f"{prefix}/{driver}/")}
            array = ts.open(
                spec | more, create=True, dtype=ts.int32, shape=[300, 200], context=self.context
            ).result()
            data = np.arange(60_000, dtype=np.int32).reshape(300, 200)
            array.write(data).result()
            array[40:60, 5:195].write(data[40:60, 5:195] * 2).result()  # chunks that are half written
            data[40:60, 5:195] *= 2
            again = ts.open(spec, open=True, context=ts.Context()).result()
            np.testing.assert_array_equal(again.read().result(), data)
            np.testing.assert_array_equal(again[77:80, 33:40].read().result(), data[77:80, 33:40])
        with ts.Transaction() as transaction:
            store = self._store(bucket).with_transaction(transaction)
            store[f"{prefix}/a"], store[f"{prefix}/b"] = b"1", b"2"
        assert self._store(bucket)[f"{prefix}/b"] == b"2"
        return "Zarr arrays (version 3 sharded, version 2), partly rewritten; a transaction"

    @staticmethod
    def _sharded() -> dict[str, Any]:
        inner = {"chunk_shape": [20, 20], "codecs": [{"name": "bytes"}, {"name": "crc32c"}]}
        return {
            "metadata": {
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [100, 100]}},
                "codecs": [{"name": "sharding_indexed", "configuration": inner}],
            }
        }


if __name__ == "__main__":
    serve(Tensorstore)
