"""Which directories make a store, who may hold it, and what the commands say about it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import lmdb
import pytest
from click.testing import CliRunner

from meshd.cli.fsck import fsck
from meshd.cli.inspect_store import inspect
from meshd.config import StoreSettings
from meshd.store.disks.data_dir_guards import DataDirLock
from meshd.store.disks.layout import Disks
from meshd.store.engine.member_header import ALIGNED, PAGE
from meshd.store.errors import FormatError, StoreInUseError
from meshd.store.index.index import Index
from meshd.store.records import Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util.clock import SystemClock
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import LARGE, put_object

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def settings_at(place: Path, *disks: str) -> StoreSettings:
    changes = {"disks": tuple(place / disk for disk in disks)} if disks else {}
    return StoreSettings.at(place, small_object_bytes=64 << 10, index_map_bytes=1 << 28, **changes)


def opened(settings: StoreSettings, writer: str = "w0") -> closing[Store]:
    return closing(Store.open(settings, writer=writer, clock=SystemClock()))


def run(settings: StoreSettings, doing: Callable[[Store], Coroutine[None, None, object]]) -> None:
    with opened(settings) as store:
        asyncio.run(doing(store))


def fill(settings: StoreSettings, count: int = 40) -> None:
    async def doing(store: Store) -> None:
        await asyncio.gather(*[put_object(store, f"k{number}", b"x" * number) for number in range(count)])
        await put_object(store, "large", bytes(LARGE))

    run(settings, doing)


def test_objects_spread_over_disks_and_disks_may_be_reordered_and_added(tmp_path: Path) -> None:
    fill(settings_at(tmp_path, "a", "b"))
    assert all(list((tmp_path / disk).glob("extents/*/*.tar")) for disk in "ab")
    for disks in ("ba", "bac", "cab"):
        settings = settings_at(tmp_path, *disks)
        Store.recover(settings)
        fill(settings)
        assert check_store(settings).clean
        with opened(settings) as store:
            assert len(store.list("b").entries) == 41
    assert rebuild_index(settings_at(tmp_path, *"cab")).objects == 41


def test_a_name_whose_sync_failed_is_synced_by_the_next_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut takes the index, and all that was acknowledged."""
    place, synced, fsync = tmp_path / "index", list[str](), os.fsync

    def failing_once(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        if synced.count(synced[-1]) == 1:
            raise OSError(5, "this sync fails")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", failing_once)
    for _ in range(2):
        with pytest.raises(OSError, match="this sync fails"):
            Index(place, map_bytes=1 << 24)
    Index(place, map_bytes=1 << 24).close()
    assert synced == [str(tmp_path), str(tmp_path), str(place), str(place)]


def test_large_members_of_a_segment_begin_with_a_page(tmp_path: Path) -> None:
    settings = dataclasses.replace(settings_at(tmp_path), small_object_bytes=1 << 20)
    sizes = (10, ALIGNED, 700, ALIGNED + 1, ALIGNED - 1, 1 << 20, 0, 300_000)

    async def doing(store: Store) -> None:
        for number, size in enumerate(sizes):
            await put_object(store, f"k{number}", bytes([number]) * size)

    run(settings, doing)
    for _ in range(2):
        with opened(settings) as store:
            for number, size in enumerate(sizes):
                record = store.get("b", f"k{number}")
                assert record is not None
                assert store.read_range(record, 0, size) == bytes([number]) * size
                assert size < ALIGNED or [extent.offset % PAGE for extent in record.extents] == [0]
        assert check_store(settings).clean
        assert rebuild_index(settings).problems == []


def test_a_new_disk_takes_only_its_share() -> None:
    two, three = (Disks({n: Path(f"/d{n}") for n in range(count)}) for count in (2, 3))
    keys = [f"k{number}" for number in range(3000)]
    moved = [key for key in keys if two.placement_order("b", key)[0] != three.placement_order("b", key)[0]]
    assert all(three.placement_order("b", key)[0] == 2 for key in moved)
    assert 800 < len(moved) < 1200


def test_a_missing_disk_is_named(tmp_path: Path) -> None:
    fill(settings_at(tmp_path, "a", "b"))
    with pytest.raises(FormatError, match=r"disk .*/b is missing; mount it"):
        Store.recover(settings_at(tmp_path, "a"))
    with pytest.raises(FormatError, match="disk number 1 of this store is missing"):
        rebuild_index(settings_at(tmp_path, "a"))


def test_a_disk_of_another_store_is_refused(tmp_path: Path) -> None:
    fill(settings_at(tmp_path / "one"))
    fill(settings_at(tmp_path / "two"))
    both = StoreSettings.at(tmp_path / "one", disks=(tmp_path / "one", tmp_path / "two"))
    with pytest.raises(FormatError, match="another store"):
        Store.recover(both)
    with pytest.raises(FormatError, match="different stores"):
        rebuild_index(both)


def test_a_lost_index_never_costs_data(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    fill(settings)
    files = sorted(tmp_path.glob("extents/*/*.tar"))
    (settings.index_dir / "data.mdb").unlink()
    for attempt in (Store.recover, lambda settings: Store.open(settings, writer="w0", clock=SystemClock())):
        with pytest.raises(FormatError, match="fsck --rebuild"):
            attempt(settings)
    assert sorted(tmp_path.glob("extents/*/*.tar")) == files
    assert rebuild_index(settings).objects == 41
    Store.recover(settings)
    fill(settings)
    assert check_store(settings).clean


def test_an_index_that_gets_no_memory_is_not_to_be_rebuilt(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    fill(settings)
    more = dataclasses.replace(settings, index_map_bytes=1 << 47)  # more than a process can map
    with pytest.raises(FormatError, match=r"134,217,728 MiB of address space.*index-map.* intact") as refused:
        Store.recover(more)
    assert "rebuild" not in str(refused.value)
    (settings.index_dir / "data.mdb").write_bytes(bytes(8192))
    with pytest.raises(FormatError, match="run meshd fsck --rebuild"):
        Store.recover(settings)


def test_an_index_of_another_user_is_not_to_be_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one start as root, or a backup that root has restored."""
    settings = settings_at(tmp_path)
    fill(settings)

    def refuse(path: str, *_: object, **__: object) -> None:
        raise lmdb.ReadonlyError(f"{path}: Permission denied")

    monkeypatch.setattr(lmdb, "open", refuse)
    with pytest.raises(FormatError, match=r"Permission denied.* chown -R") as refused:
        Store.recover(settings)
    assert "rebuild" not in str(refused.value)


def test_a_first_start_that_died_is_begun_again(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    Store.recover(settings)
    (settings.index_dir / "data.mdb").unlink()  # the marker was written, the index was not
    fill(settings)
    assert check_store(settings).clean


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    fill(settings)
    with closing(Index.open(settings)) as index, index.write_transaction() as txn:
        index.put_meta(txn, "format", 99)
    with pytest.raises(FormatError, match="format 99"):
        Store.recover(settings)
    marker = tmp_path / "extents" / "DISK"
    marker.write_text(marker.read_text().replace('"format":1', '"format":99'))
    with pytest.raises(FormatError, match="upgrade meshd"):
        rebuild_index(settings)


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    fill(settings)
    (settings.index_dir / "data.mdb").write_bytes(os.urandom(1 << 16))
    with pytest.raises(FormatError, match="rebuild"):
        Store.recover(settings)
    assert rebuild_index(settings).objects == 41


def test_a_store_is_held_by_its_workers_or_by_its_keeper(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    fill(settings)
    with opened(settings):
        with pytest.raises(StoreInUseError, match="as w0"):
            opened(settings)
        for alone in (check_store, rebuild_index, Store.recover):
            with pytest.raises(StoreInUseError, match="stop its daemon"):
                alone(settings)
    with pytest.raises(ValueError, match="writer name"):
        opened(settings, "../w")
    assert check_store(settings).clean


def test_recovery_waits_for_workers_that_are_ending(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    fill(settings)
    lock = DataDirLock.acquire_shared(settings.data_dir, "w0")
    ending = threading.Timer(0.3, lock.release)
    ending.start()
    try:
        assert Store.recover(settings) == 0
        assert ending.finished.is_set()
    finally:
        ending.join(30)


def test_a_writer_goes_on_in_its_segment(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    for number in range(3):
        run(settings, lambda store, n=number: put_object(store, f"k{n}", b"x"))  # type: ignore[misc]  # bound at once
    assert len(list(tmp_path.glob("extents/*/*.tar"))) == 1


def test_a_stepped_back_clock_does_not_lose_a_write(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    for seconds in (1000, 10):
        clock = ManualClock()
        clock.advance(seconds)
        with closing(Store.open(settings, writer="w0", clock=clock)) as store:
            asyncio.run(put_object(store, "k", b"at %d" % seconds))
    rebuild_index(settings)
    with opened(settings) as store:
        found = store.get("b", "k")
        assert found is not None
        assert store.read_range(found, 0, 10) == b"at 10"


def test_dead_files_go_and_compaction_gives_back_room(tmp_path: Path) -> None:
    settings = StoreSettings.at(
        tmp_path, small_object_bytes=64 << 10, segment_bytes=100_000, index_map_bytes=1 << 28
    )

    async def doing(store: Store) -> None:
        for number in range(60):
            await put_object(store, f"k{number}", os.urandom(20_000))
        for number in range(60):
            if number % 6:
                await store.delete("b", f"k{number}")
        before = _used(tmp_path)
        for file in store.compactor.candidates(0.5):
            assert await store.compactor.compact(file)
        clock.advance(61)
        assert await store.compactor.purge() > 5
        assert _used(tmp_path) < before / 2
        assert len(store.list("b").entries) == 10

    clock = ManualClock()
    with closing(Store.open(settings, writer="s", clock=clock)) as store:
        asyncio.run(doing(store))
    assert check_store(settings).clean
    assert rebuild_index(settings).objects == 10


@pytest.mark.parametrize("durability", ["relaxed", "commit"])
def test_a_candidate_whose_last_user_goes_meanwhile_is_compacted(tmp_path: Path, durability: str) -> None:
    """A store that does not sync at each commit keeps such a file, as retired; another has removed it."""
    settings = StoreSettings.at(
        tmp_path, durability=durability, segment_bytes=20_000, index_map_bytes=1 << 28
    )

    async def doing(store: Store) -> None:
        await put_object(store, "gone", bytes(10_000))
        await put_object(store, "fills", bytes(20_000))
        await put_object(store, "in the next file", b"")
        candidates = store.compactor.candidates(0.0)
        await store.delete("b", "gone")
        await store.delete("b", "fills")
        assert candidates
        for file in candidates:
            assert await store.compactor.compact(file)

    with closing(Store.open(settings, writer="s", clock=ManualClock())) as store:
        asyncio.run(doing(store))


def test_what_was_deleted_stays_deleted_until_nothing_could_bring_it_back(tmp_path: Path) -> None:
    """The deletion lies behind the bytes, in a later file; compacting that one must carry it along."""
    settings = dataclasses.replace(settings_at(tmp_path), segment_bytes=20_000)

    async def doing(store: Store) -> None:
        await put_object(store, "stays", bytes(10_000))
        gone = await put_object(store, "gone", bytes(5_000))
        upload = await store.create_upload(Upload("", "b", "upload"))
        await put_object(store, "fills", bytes(20_000))
        await put_object(store, "in the next file", b"")
        await store.delete("b", "gone")
        await store.abort_upload(upload)
        await put_object(store, "fills too", bytes(30_000))
        await put_object(store, "again in the next", b"")
        old = gone.extents[0].file
        for file in sorted(set(store.compactor.candidates(0.0)) - {old}):
            assert await store.compactor.compact(file)

    def gone_for_good() -> None:
        assert rebuild_index(settings).problems == []
        with opened(settings, "s") as store:
            assert len(store.list("b").entries) == 5
            assert store.get("b", "gone") is None
            assert store.list_uploads("b").uploads == ()

    with opened(settings, "s") as store:
        asyncio.run(doing(store))
    Store.recover(settings)
    gone_for_good()
    for _ in range(3):  # once the old bytes are gone the memory of their deletion goes too
        with opened(settings, "s") as store:
            for file in store.compactor.candidates(0.0):
                assert asyncio.run(store.compactor.compact(file))
        Store.recover(settings)
        gone_for_good()
    assert (
        json.loads(CliRunner().invoke(inspect, ["stats", "--json", "--data-dir", str(tmp_path)]).stdout)[
            "remembered_deletions"
        ]
        == 0
    )


def test_a_file_that_only_remembers_a_deletion_is_kept(tmp_path: Path) -> None:
    settings = dataclasses.replace(settings_at(tmp_path), segment_bytes=20_000)

    async def doing(store: Store) -> None:
        await put_object(store, "stays", bytes(20_000))
        await put_object(store, "gone", b"in the same group or the next file")
        await put_object(store, "fills", bytes(20_000))
        await store.delete("b", "gone")
        await put_object(store, "passing", bytes(30_000))
        await put_object(store, "next file", b"")
        await store.delete("b", "passing")

    run(settings, doing)
    assert rebuild_index(settings).problems == []
    with opened(settings) as store:
        assert [key for key, _ in store.list("b").entries] == ["fills", "next file", "stays"]


def _used(place: Path) -> int:
    return sum(path.stat().st_size for path in place.glob("extents/*/*.tar"))


def test_fsck_says_what_it_found(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    fill(settings)
    where = ["--data-dir", str(tmp_path)]
    clean = CliRunner().invoke(fsck, where)
    assert (clean.exit_code, clean.stdout.splitlines()[-1]) == (0, "clean")
    anew = CliRunner().invoke(fsck, [*where, "--rebuild", "--json"])
    assert json.loads(anew.stdout)["rebuilt"]["objects"] == 41
    path = next(path for path in tmp_path.glob("extents/*/*.tar") if path.stat().st_size > LARGE)
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"?")
    damaged = CliRunner().invoke(fsck, where)
    assert damaged.exit_code == 1
    assert "damaged: b/large" in damaged.stdout
    assert not json.loads(CliRunner().invoke(fsck, [*where, "--json"]).stdout)["clean"]
    missing = CliRunner().invoke(fsck, ["--data-dir", str(tmp_path / "none")])
    assert (missing.exit_code, (tmp_path / "none").exists()) == (1, False)


def test_inspect_shows_a_running_store(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    fill(settings)
    where = ["--data-dir", str(tmp_path)]
    with opened(settings):
        pass
    shown = CliRunner().invoke(inspect, ["record", "b", "large", *where])
    assert shown.exit_code == 0
    assert f"{LARGE:,} bytes" in shown.stdout
    record = json.loads(CliRunner().invoke(inspect, ["record", "b", "k3", "--json", *where]).stdout)
    assert record["size"] == 3
    listed = CliRunner().invoke(inspect, ["segment", record["extents"][0]["path"], "--json", *where])
    members = [json.loads(line) for line in listed.stdout.splitlines()]
    assert {member["key"] for member in members} >= {"k3", "k7"}
    assert CliRunner().invoke(inspect, ["segment", "1", *where]).exit_code == 0
    stats = json.loads(CliRunner().invoke(inspect, ["stats", "--json", *where]).stdout)
    assert (stats["objects"], stats["own_files"]) == (41, 1)
    for wrong in (["record", "b", "nothing"], ["segment", "ffff"], ["segment", "zz"]):
        assert CliRunner().invoke(inspect, [*wrong, *where]).exit_code == 1
