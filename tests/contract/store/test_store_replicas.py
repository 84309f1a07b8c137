"""Stores as replicas: the shipped suite over every engine; on disks also after a rebuild."""

from __future__ import annotations

import shutil
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util.clock import SystemClock
from tests.support.reference_store import MemoryStore
from tests.support.replica_suite import ReplicaSuite, store_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from meshd.store.api import ObjectStore


class TestMemory(ReplicaSuite):
    def open_store(self) -> AbstractContextManager[ObjectStore]:
        return closing(MemoryStore(SystemClock()))

    def renew(self) -> None:
        """Every one is new."""


class TestDisks(ReplicaSuite):
    @pytest.fixture(autouse=True)
    def _settings(self, tmp_path: Path) -> Iterator[None]:
        self.settings = StoreSettings.at(
            tmp_path / "store", small_object_bytes=64 << 10, index_map_bytes=1 << 30, tombstone_seconds=3600
        )
        yield
        self._examine()

    @contextmanager
    def open_store(self) -> Iterator[ObjectStore]:
        with closing(Store.open(self.settings, writer="w0", clock=SystemClock())) as store:
            yield store
            self.seen = store_state(store)

    def renew(self) -> None:
        self._examine()
        shutil.rmtree(self.settings.data_dir)

    def _examine(self) -> None:
        """Whole, and the same when it is made again from the data files."""
        if not self.settings.data_dir.exists():
            return
        report = check_store(self.settings)
        assert report.clean, report.problems
        assert report.leftovers == []
        assert rebuild_index(self.settings).problems == []
        with closing(Store.open(self.settings, writer="w0", clock=SystemClock())) as store:
            assert store_state(store) == self.seen
