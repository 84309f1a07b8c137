"""zarr-python's own store tests (`zarr.testing.store`), which it runs over a folder, over obstore's S3.

Only what the tests ask for is here: a store, and a second way to its bytes.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

import boto3
import obstore
import pytest
from obstore.store import S3Store
from zarr.core.buffer import cpu
from zarr.storage import ObjectStore
from zarr.testing.store import StoreTests

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer

ENDPOINT = os.environ["MESHD_ENDPOINT"].rstrip("/")


class TestObjectStoreOverS3(StoreTests[ObjectStore[S3Store], cpu.Buffer]):
    store_cls = ObjectStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self) -> dict[str, Any]:
        bucket = f"zarr-{uuid.uuid4().hex[:16]}"
        boto3.client("s3", endpoint_url=ENDPOINT).create_bucket(Bucket=bucket)
        return {"store": _store(bucket), "read_only": False}

    @pytest.fixture
    def store(self, store_kwargs: dict[str, Any]) -> ObjectStore[S3Store]:
        return self.store_cls(**store_kwargs)

    async def get(self, store: ObjectStore[S3Store], key: str) -> Buffer:
        return self.buffer_cls.from_bytes(obstore.get(_again(store), key).bytes())

    async def set(self, store: ObjectStore[S3Store], key: str, value: Buffer) -> None:
        obstore.put(_again(store), key, value.to_bytes())

    def test_store_repr(self, store: ObjectStore[S3Store]) -> None:
        assert repr(store).startswith("ObjectStore(object_store://S3Store(")

    def test_store_supports_writes(self, store: ObjectStore[S3Store]) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: ObjectStore[S3Store]) -> None:
        assert store.supports_listing


def _store(bucket: str) -> S3Store:
    return S3Store(
        bucket,
        endpoint=ENDPOINT,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )


def _again(store: ObjectStore[S3Store]) -> S3Store:
    return _store(store.store.config["bucket"])
