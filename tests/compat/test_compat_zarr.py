"""zarr 3 over obstore: arrays, sharded ones too, and the store's own contract as far as it goes."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
import pytest
import zarr
from obstore.store import S3Store
from zarr.storage import ObjectStore

if TYPE_CHECKING:
    from tests.support.daemons import Daemon

MIB = 1 << 20


@pytest.fixture
def store(daemon: Daemon) -> S3Store:
    bucket = f"zarr-{uuid.uuid4().hex[:10]}"
    daemon.client().create_bucket(Bucket=bucket)
    return S3Store(
        bucket,
        endpoint=daemon.endpoint,
        access_key_id=daemon.access_key,
        secret_access_key=daemon.secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


@pytest.mark.parametrize("shards", [None, (400, 400)])
def test_arrays(store: S3Store, shards: tuple[int, int] | None) -> None:
    zarr_store = ObjectStore(store)
    data = np.random.default_rng(7).integers(0, 1000, (1000, 900), dtype=np.int32)
    array = zarr.create_array(
        zarr_store, name="x", shape=data.shape, chunks=(100, 100), shards=shards, dtype=data.dtype
    )
    array[:] = data
    array.attrs["unit"] = "K"
    again: Any = zarr.open_array(zarr_store, path="x", mode="r")
    assert again.attrs["unit"] == "K"
    np.testing.assert_array_equal(again[:], data)
    np.testing.assert_array_equal(again[123:457, 88:701], data[123:457, 88:701])
    array[50:150, :] = 7
    np.testing.assert_array_equal(
        zarr.open_array(zarr_store, path="x", mode="r")[50:150], np.full((100, 900), 7)
    )


def test_groups(store: S3Store) -> None:
    group = zarr.create_group(ObjectStore(store))
    for name in ("a", "b/c"):
        group.create_array(name, shape=(10,), chunks=(5,), dtype="f8")[:] = np.arange(10)
    found = zarr.open_group(ObjectStore(store), mode="r")
    assert sorted(name for name, _ in found.members(max_depth=None)) == ["a", "b", "b/c"]
    del group["a"]
    assert sorted(name for name, _ in found.members()) == ["b"]


def test_obstore_itself(store: S3Store) -> None:
    large = os.urandom(12 * MIB)
    obstore.put(store, "large", large, chunk_size=5 * MIB, use_multipart=True)
    obstore.put(store, "small", b"0123456789", attributes={"Content-Type": "text/x", "m": "1"})
    assert bytes(obstore.get(store, "large").bytes()) == large
    assert bytes(obstore.get_range(store, "large", start=MIB, end=2 * MIB)) == large[MIB : 2 * MIB]
    pieces = obstore.get_ranges(store, "small", starts=[0, 8], ends=[2, 10])
    assert [bytes(piece) for piece in pieces] == [b"01", b"89"]
    assert obstore.head(store, "small")["size"] == 10
    obstore.copy(store, "small", "odd key+ü&")
    obstore.rename(store, "odd key+ü&", "renamed")
    keys = [entry["path"] for batch in obstore.list(store) for entry in batch]
    assert keys == ["large", "renamed", "small"]
    obstore.delete(store, keys)
    assert [entry for batch in obstore.list(store) for entry in batch] == []


def test_put_if_absent_and_if_unchanged(store: S3Store) -> None:
    first = obstore.put(store, "k", b"1", mode="create")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(store, "k", b"2", mode="create")
    obstore.put(store, "k", b"3", mode={"e_tag": first["e_tag"]})
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.put(store, "k", b"4", mode={"e_tag": first["e_tag"]})
    assert bytes(obstore.get(store, "k").bytes()) == b"3"


def test_one_of_many_racing_creators_wins(store: S3Store) -> None:
    async def create(i: int) -> bool:
        try:
            await obstore.put_async(store, "commit", str(i).encode(), mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    async def race() -> list[bool]:
        return await asyncio.gather(*(create(i) for i in range(16)))

    assert sum(asyncio.run(race())) == 1
