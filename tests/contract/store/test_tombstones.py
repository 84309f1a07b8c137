"""What a store in a mesh remembers of removals, and for how long."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.store.index.index import Index, object_key
from meshd.store.index.tombstones import Tombstones, tombstones_complete_since, tombstones_of_name
from meshd.store.records import NULL, Meta, Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import put_object, put_part
from tests.support.version_suite import ON

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path
    from typing import Any

    from meshd.store.index.tombstones import Tombstone

HOUR = 3600.0


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[StoreSettings]:
    settings = StoreSettings.at(
        tmp_path, segment_bytes=20_000, index_map_bytes=1 << 28, tombstone_seconds=HOUR
    )
    yield settings
    report = check_store(settings)
    assert report.clean, report.problems


def run(
    settings: StoreSettings, clock: ManualClock, doing: Callable[[Store], Coroutine[Any, Any, None]]
) -> None:
    with closing(Store.open(settings, writer="s", clock=clock)) as store:
        asyncio.run(doing(store))


def graves(settings: StoreSettings, key: str) -> list[Tombstone]:
    with closing(Index.open(settings)) as index, index.read_transaction() as txn:
        return list(tombstones_of_name(index, txn, object_key("b", key)))


async def remove_all_kinds(store: Store) -> list[str]:
    """Null version, version of its own, aborted and completed upload, of the key `k`; their names."""
    await put_object(store, "k", b"null")
    await store.delete("b", "k")
    record = await put_object(store, "k", b"versioned", versioning=ON)
    await store.delete_version("b", "k", record.version)
    aborted = await store.create_upload(Upload("", "b", "k"))
    await store.abort_upload(aborted)
    completed = await store.create_upload(Upload("", "b", "k"))
    await put_part(store, completed, 1, b"part")
    await store.complete_upload(completed, [1], Meta("whole"))
    await put_object(store, "k2", b"another")
    await store.delete("b", "k2")
    return ["", record.version, aborted.upload_id, completed.upload_id]


def test_all_that_was_removed_is_remembered_of_its_key_alone(settings: StoreSettings) -> None:
    names: list[str] = []

    async def doing(store: Store) -> None:
        names.extend(await remove_all_kinds(store))

    run(settings, ManualClock(), doing)
    found = graves(settings, "k")
    assert {grave.what for grave in found} == set(names)
    assert all(grave.stamp > 0 for grave in found)
    assert [grave.what for grave in graves(settings, "k2")] == [""]
    assert graves(settings, "k3") == []


def test_a_node_of_its_own_remembers_null_versions_only(tmp_path: Path) -> None:
    alone = StoreSettings.at(tmp_path, index_map_bytes=1 << 28)

    async def doing(store: Store) -> None:
        await remove_all_kinds(store)

    run(alone, ManualClock(), doing)
    assert [grave.what for grave in graves(alone, "k")] == [""]


def test_removals_are_forgotten_after_their_time(settings: StoreSettings) -> None:
    clock = ManualClock()

    async def doing(store: Store) -> None:
        await remove_all_kinds(store)
        clock.advance(HOUR / 2)
        await put_object(store, "later", b"1")
        await store.delete("b", "later")
        await store.compactor.prune_tombstones()
        early = store.inventory.tombstones_complete_since()
        clock.advance(HOUR / 2 + 1)
        await store.compactor.prune_tombstones()
        assert early < store.inventory.tombstones_complete_since() < clock.now_ms() * 1_000_000

    run(settings, clock, doing)
    assert graves(settings, "k") == []
    assert len(graves(settings, "later")) == 1


def test_too_many_are_forgotten_early_and_it_is_told_since_when(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshd.store.index.tombstones._MOST", 10)
    clock = ManualClock()

    async def doing(store: Store) -> None:
        for number in range(40):
            await put_object(store, f"{number:02}", b"x")
            await store.delete("b", f"{number:02}")
            clock.advance(60)
        await store.compactor.prune_tombstones()

    run(settings, clock, doing)
    kept = [number for number in range(40) if graves(settings, f"{number:02}")]
    assert kept
    assert kept == list(range(kept[0], 40))
    assert kept[0] > 0


def test_the_latest_removal_of_a_name_counts(settings: StoreSettings) -> None:
    with closing(Index.open(settings)) as index, index.write_transaction() as txn:
        kept = Tombstones(index, txn, keep=True)
        name = object_key("b", "k")
        for stamp in (5, 9, 7):
            kept.add(txn, name, stamp)
        assert kept.stamp_of(txn, name) == 9
        assert kept.stamp_of(txn, name, "0000000000000001") == 0


@pytest.mark.parametrize("compacted", [False, True])
def test_a_rebuild_remembers_them_too(settings: StoreSettings, compacted: bool) -> None:
    clock = ManualClock()

    async def doing(store: Store) -> None:
        await remove_all_kinds(store)
        for number in range(12):  # seals the segments before
            await put_object(store, f"fill-{number}", bytes(9_000))
        if compacted:
            for file in store.compactor.candidates(0.0):
                assert await store.compactor.compact(file)
            clock.advance(100)
            assert await store.compactor.purge()

    run(settings, clock, doing)
    before = {key: graves(settings, key) for key in ("k", "k2")}
    assert len(before["k"]) == 4
    rebuild_index(settings)
    assert {key: graves(settings, key) for key in ("k", "k2")} == before
    with closing(Index.open(settings)) as index, index.read_transaction() as txn:
        assert tombstones_complete_since(index, txn) > 0


def test_a_write_after_a_removal_lives_on(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        await put_object(store, "k", b"1")
        await store.delete("b", "k")
        record = await put_object(store, "k", b"2")
        assert store.get("b", "k") == record
        assert store.get_version("b", "k", NULL) == record

    run(settings, ManualClock(), doing)
    assert len(graves(settings, "k")) == 1
