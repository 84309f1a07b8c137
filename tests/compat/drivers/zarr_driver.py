"""zarr 3 over a store: its store interface, and arrays. Which store, the programs beside this one say."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import zarr
from driving import CannotError, Driver
from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from zarr.abc.store import Store


class Zarr(Driver):
    def _no(self, verb: str) -> NoReturn:
        raise CannotError("zarr stores have no such call")

    def store(self, bucket: str) -> Store:
        raise NotImplementedError

    def run_in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Overridden where the store brings a loop of its own."""
        return asyncio.run(work)

    def version(self) -> str:
        return importlib.metadata.version("zarr")

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
        value = default_buffer_prototype().buffer.from_bytes(Path(path).read_bytes())
        self.run_in_loop(self.store(bucket).set(key, value))

    def get(self, bucket: str, key: str, path: str) -> None:
        got = self.run_in_loop(self.store(bucket).get(key, default_buffer_prototype()))
        Path(path).write_bytes(got.to_bytes())

    def read_range(self, bucket: str, key: str, start: int, end: int, path: str) -> None:
        wanted = RangeByteRequest(start, end)
        got = self.run_in_loop(self.store(bucket).get(key, default_buffer_prototype(), wanted))
        Path(path).write_bytes(got.to_bytes())

    def listing(self, bucket: str, prefix: str, delimiter: str) -> dict[str, list[str]]:
        if delimiter:
            self._no("listing")
        return {"keys": self.run_in_loop(self._keys(bucket, prefix)), "prefixes": []}

    async def _keys(self, bucket: str, prefix: str) -> list[str]:
        return [key async for key in self.store(bucket).list_prefix(prefix)]

    def delete_many(self, bucket: str, keys: list[str]) -> None:
        for key in keys:
            self.run_in_loop(self.store(bucket).delete(key))

    def put_if_absent(self, bucket: str, key: str, path: str) -> bool:
        value = default_buffer_prototype().buffer.from_bytes(Path(path).read_bytes())
        self.run_in_loop(self.store(bucket).set_if_not_exists(key, value))
        held = self.run_in_loop(self.store(bucket).get(key, default_buffer_prototype()))
        return bool(held.to_bytes() == value.to_bytes())

    def own_work(self, bucket: str, prefix: str) -> str:
        root = zarr.create_group(self.store(bucket), path=prefix)
        data = np.random.default_rng(7).integers(0, 1000, (500, 450), dtype=np.int32)
        for name, shards in (("plain", None), ("sharded", (200, 200))):
            array = root.create_array(
                name, shape=data.shape, chunks=(100, 100), shards=shards, dtype=data.dtype
            )
            array[:] = data
            array.attrs["unit"] = "K"
            array[50:150, :] = 7
            again: Any = zarr.open_array(self.store(bucket), path=f"{prefix}/{name}", mode="r")
            assert again.attrs["unit"] == "K"
            np.testing.assert_array_equal(again[150:457, 88:401], data[150:457, 88:401])
            np.testing.assert_array_equal(again[50:150], np.full((100, 450), 7))
        assert sorted(name for name, _ in root.members()) == ["plain", "sharded"]
        del root["plain"]
        found = zarr.open_group(self.store(bucket), path=prefix, mode="r")
        assert [name for name, _ in found.members()] == ["sharded"]
        return "arrays, plain and sharded, partly rewritten; groups"
