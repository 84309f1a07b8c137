"""The store's contract, bound to the one on disks and to the one in memory."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.util.clock import SystemClock
from tests.support.reference_store import MemoryStore
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
