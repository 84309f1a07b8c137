"""The number by which a listing is known to hold still: over restarts, and after an earlier release wrote."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.store.errors import DiskFullError
from meshd.store.index import change_log
from meshd.store.records import RESERVED_BUCKET, StoreChanges
from meshd.store.store import Store
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import put_object

if TYPE_CHECKING:
    from pathlib import Path


def test_the_revision_survives_a_restart_with_documents(tmp_path: Path) -> None:
    settings, clock = StoreSettings.at(tmp_path, index_map_bytes=1 << 30), ManualClock()
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        asyncio.run(put_object(store, "k", b"one"))
        seen = store.revision()
        asyncio.run(put_object(store, "snapshot", b"two", bucket=RESERVED_BUCKET))
        assert store.revision() == seen
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        assert store.revision() == seen
        asyncio.run(put_object(store, "snapshot", b"three", bucket=RESERVED_BUCKET))
        assert store.revision() == seen
        asyncio.run(put_object(store, "k", b"one"))
        assert store.revision() > seen


def test_what_an_earlier_release_wrote_counts(tmp_path: Path) -> None:
    """It knows `last_stamp` alone, so the note of documents must not hide its writes."""
    settings, clock = StoreSettings.at(tmp_path, index_map_bytes=1 << 30), ManualClock()
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        asyncio.run(put_object(store, "k", b"one"))
        asyncio.run(put_object(store, "snapshot", b"two", bucket=RESERVED_BUCKET))
        seen, index = store.revision(), store._index
        last = index.get_meta("last_stamp")
        with index.write_transaction() as txn:
            index.put_meta(txn, "last_stamp", last + 7)
        assert store.revision() == last + 7 > seen
        asyncio.run(put_object(store, "snapshot", b"three", bucket=RESERVED_BUCKET))
        assert store.revision() == last + 7


def test_changes_are_named_after_a_restart_and_many_as_a_range(tmp_path: Path) -> None:
    settings, clock = StoreSettings.at(tmp_path, index_map_bytes=1 << 30), ManualClock()
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        asyncio.run(put_object(store, "k", b"one"))
        before = store.revision()

        async def put_many() -> None:
            names = [f"{number:03}" for number in range(200)]
            await asyncio.gather(*(put_object(store, name, b"x") for name in names))

        asyncio.run(put_many())
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        changes = store.changes_since(before, "b")
        assert changes is not None
        assert changes.revision == store.revision()
        named = set(changes.keys)
        for first, last in changes.ranges:
            named.update(f"{n:03}" for n in range(int(first), int(last) + 1))
        assert named == {f"{n:03}" for n in range(200)}
        assert store.changes_since(before, "c") == StoreChanges(changes.revision)


def test_what_an_earlier_release_wrote_is_not_known(tmp_path: Path) -> None:
    """It writes no entry, so the chain is broken: nothing is said, instead of too little."""
    settings, clock = StoreSettings.at(tmp_path, index_map_bytes=1 << 30), ManualClock()
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        asyncio.run(put_object(store, "k", b"one"))
        seen, index = store.revision(), store._index
        with index.write_transaction() as txn:
            index.put_meta(txn, "last_stamp", index.get_meta("last_stamp") + 7)
        between = store.revision()
        assert store.changes_since(seen, "b") is None
        asyncio.run(put_object(store, "l", b"two"))
        assert store.changes_since(seen, "b") is None
        assert store.changes_since(between, "b") == StoreChanges(store.revision(), ("l",))
        assert store.changes_since(between - 1, "b") is None
        assert store.changes_since(store.revision() + 1, "b") is None


def test_the_log_of_changes_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "_KEPT", 8)
    settings, clock = StoreSettings.at(tmp_path, index_map_bytes=1 << 30), ManualClock()
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        seen = list[int]()
        for number in range(20):
            asyncio.run(put_object(store, f"{number:02}", b"x"))
            seen.append(store.revision())
        assert store.changes_since(seen[0], "b") is None
        assert store.changes_since(seen[16], "b") == StoreChanges(seen[-1], ("17", "18", "19"))
        log = store._index.change_log
        assert log is not None
        with store._index.read_transaction() as txn:
            assert txn.stat(log._db)["entries"] <= 8


def test_a_write_that_failed_is_not_logged(tmp_path: Path) -> None:
    settings, clock = StoreSettings.at(tmp_path, index_map_bytes=1 << 30), ManualClock()
    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        asyncio.run(put_object(store, "k", b"one"))
        seen, index = store.revision(), store._index
        with index.write_transaction() as txn:
            index.objects.put(txn, b"b\0lost", b"x")
            txn.abort()
        asyncio.run(put_object(store, "l", b"two"))
        assert store.changes_since(seen, "b") == StoreChanges(store.revision(), ("l",))


def test_a_log_that_does_not_fit_leaves_out_no_acknowledged_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry is written in the transaction of its commit: the index takes both or neither."""
    monkeypatch.setattr("meshd.store.index.index._MAP_RESERVES", (0, 0))
    settings = StoreSettings.at(tmp_path, index_map_bytes=1 << 20)
    acknowledged = set[str]()

    async def fill(store: Store) -> None:
        for number in range(5000):
            await put_object(store, f"{number:05}-{'x' * 200}", b"x")
            acknowledged.add(f"{number:05}-{'x' * 200}")

    with closing(Store.open(settings, writer="w0", clock=ManualClock())) as store:
        asyncio.run(put_object(store, "first", b"x"))
        before = store.revision()
        with pytest.raises(DiskFullError):
            asyncio.run(fill(store))
        _named_or_unknown(store, before, acknowledged)
    larger = StoreSettings.at(tmp_path, index_map_bytes=1 << 28)
    with closing(Store.open(larger, writer="w0", clock=ManualClock())) as store:
        _named_or_unknown(store, before, acknowledged)
        asyncio.run(put_object(store, "last", b"x"))
        _named_or_unknown(store, before, {*acknowledged, "last"})


def _named_or_unknown(store: Store, revision: int, names: set[str]) -> None:
    """The log names at least these, or says that it does not know; and all of them are there."""
    changes = store.changes_since(revision, "b")
    if changes is not None:
        ranged = {name for name in names if any(a <= name <= b for a, b in changes.ranges)}
        assert names <= {*changes.keys, *ranged}
    assert all(store.get("b", name) is not None for name in names)
