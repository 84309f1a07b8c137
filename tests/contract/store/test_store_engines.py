"""The store's contract, bound to the one on disks and to the one in memory."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.store.errors import MetadataTooLargeError
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util.clock import SystemClock
from tests.support.reference_store import MemoryStore
from tests.support.store_calls import new_object, put_object
from tests.support.store_suite import StoreSuite

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from meshd.store.api import ObjectStore


class TestMemoryStore(StoreSuite):
    def open_store(self) -> AbstractContextManager[ObjectStore]:
        return closing(MemoryStore(SystemClock()))


class _OnDisk(StoreSuite):
    settings: StoreSettings

    @pytest.fixture(autouse=True)
    def _checked(self) -> Iterator[None]:
        """After each test the store on disk is whole."""
        yield
        report = check_store(self.settings)
        assert report.clean, report.problems
        assert report.leftovers == []

    def open_store(self) -> AbstractContextManager[ObjectStore]:
        return closing(Store.open(self.settings, writer="w0", clock=SystemClock()))

    def test_one_object_that_cannot_be_stored_refuses_all_put_with_it(self) -> None:
        """Also once the index has been made again from the data files, which have those before it."""

        async def check(store: ObjectStore) -> None:
            await put_object(store, "a", b"earlier")
            refused = [
                new_object("a", b"1"),
                new_object("b", b"2"),
                new_object("c", b"3", tags={"t": "x" * 2**20}),
            ]
            beside = [store.put_many("b", refused), store.put_many("b", [new_object("d", b"4")])]
            results = await asyncio.gather(*beside, return_exceptions=True)
            assert isinstance(results[0], MetadataTooLargeError)
            assert {key: record.size for key, record in store.list("b").entries} == {"a": 7, "d": 1}

        self._run(check)
        assert rebuild_index(self.settings).problems == []
        Store.recover(self.settings)  # removes a file that has nothing else
        with self.open_store() as store:
            assert {key: record.size for key, record in store.list("b").entries} == {"a": 7, "d": 1}


class TestOneDisk(_OnDisk):
    @pytest.fixture(autouse=True)
    def _settings(self, tmp_path: Path) -> None:
        self.settings = StoreSettings.at(tmp_path, small_object_bytes=64 << 10, index_map_bytes=1 << 30)


class TestThreeDisksRelaxed(_OnDisk):
    @pytest.fixture(autouse=True)
    def _settings(self, tmp_path: Path) -> None:
        self.settings = StoreSettings.at(
            tmp_path,
            disks=(tmp_path / "d1", tmp_path / "d2", tmp_path / "d3"),
            durability="relaxed",
            small_object_bytes=64 << 10,
            segment_bytes=100_000,
            index_map_bytes=1 << 30,
        )
