"""A disk that fails is taken out of service; what it had is refused until it is restored."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import threading
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.store.disks import disk_probes, health_monitor, replacement
from meshd.store.errors import DiskFailedError, FormatError, QuarantinedError
from meshd.store.replica.changes import without_local_fields
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util import failpoints
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import LARGE, error_of, put_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.records import Record

BODIES = {f"k{number}": b"%d" % number * (3000 if number % 4 else LARGE) for number in range(24)}


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.configure("")


def _settings(place: Path, *disks: str) -> StoreSettings:
    return StoreSettings.at(
        place, disks=tuple(place / disk for disk in disks), small_object_bytes=64 << 10, segment_bytes=1 << 20
    )


def _open(place: Path, *disks: str) -> Store:
    settings = _settings(place, *disks)
    Store.recover(settings)
    return Store.open(settings, writer="s", clock=ManualClock())


def _all(store: Store) -> dict[str, Record]:
    return dict(store.list("b").entries)


async def _fill(place: Path) -> tuple[dict[str, Record], set[str], int]:
    """Two disks, one of which fails: all objects, those that were on it, and its number."""
    for disk in ("one", "two"):
        (place / disk).mkdir(parents=True, exist_ok=True)
    with closing(_open(place, "one", "two")) as store:
        for key, body in BODIES.items():
            await put_object(store, key, body, size=len(body))
        every = _all(store)
        number = next(disk for disk, root in store._disks.roots.items() if root.name == "two")
        gone = {key for key, record in every.items() if record.extents[0].disk == number}
        assert 0 < len(gone) < len(every)
        await store.disk_health.probe_disks()
        assert not store._disks.lost
        failpoints.configure(f"store.probe.{number}=error")
        for _ in range(3):
            await store.disk_health.probe_disks()
        assert list(store._disks.lost) == [number]
        return every, gone, number


async def _restore(store: Store, every: dict[str, Record], gone: set[str]) -> None:
    for key in gone:
        writer = store.replica_writer("b", key, size=len(BODIES[key]))
        await writer.write(BODIES[key])
        await writer.commit_at_stamp(without_local_fields(every[key]))


def test_what_was_on_it_is_refused_and_can_be_restored_to_the_others(tmp_path: Path) -> None:
    async def run() -> None:
        every, gone, number = await _fill(tmp_path)
        with closing(_open(tmp_path, "one", "two")) as store:
            assert list(store._disks.lost) == [number]
            why = store.disk_health.disk_states()[1].why  # of the life before
            assert why.startswith("failed (Input/output error")
            for key, record in _all(store).items():
                if key in gone:
                    with pytest.raises(QuarantinedError):
                        store.read_range(record, 0, 1)
                else:
                    assert store.read_range(record, 0, record.size) == BODIES[key]
            await put_object(store, "new", b"n" * LARGE, size=LARGE)
            await _restore(store, every, gone)
            assert all(record.extents[0].disk != number for record in _all(store).values())
            assert store.quarantine.entries() == ()
        shutil.rmtree(tmp_path / "two")
        for disks in (("one",), ("one", "two")):
            with closing(_open(tmp_path, *disks)) as store:
                found = {key: store.read_range(record, 0, record.size) for key, record in _all(store).items()}
                assert found == BODIES | {"new": b"n" * LARGE}
        assert check_store(_settings(tmp_path, "one", "two")).problems == []

    asyncio.run(run())


def test_a_start_without_it_and_a_rebuild_know_of_it(tmp_path: Path) -> None:
    async def run() -> None:
        every, gone, number = await _fill(tmp_path)
        with closing(_open(tmp_path, "one")) as store:
            assert list(store._disks.lost) == [number]
            await _restore(store, every, gone)
        rebuild_index(_settings(tmp_path, "one"))
        assert check_store(_settings(tmp_path, "one")).problems == []
        with closing(_open(tmp_path, "one")) as store:
            assert {key: store.read_range(each, 0, each.size) for key, each in _all(store).items()} == BODIES

    asyncio.run(run())


def test_a_disk_that_holds_the_index_is_not_to_be_emptied(tmp_path: Path) -> None:
    """After one start with other disks, as with a mistyped --disk, its data is old; all else is in use."""

    async def run() -> None:
        with closing(_open(tmp_path, ".")) as store:
            await put_object(store, "k", b"k" * 3000, size=3000)
        Store.recover(_settings(tmp_path, "two"), lambda path, how: None)
        both = _settings(tmp_path, "two", ".")
        Store.recover(both)
        with closing(Store.open(both, writer="s", clock=ManualClock())) as store:
            state = store.disk_health.disk_states()[1]
            why = f"was missing when the node started: remove {tmp_path / 'extents'}"
            why += ", or put an empty disk in its place"
            assert (state.serves, state.why) == (False, why)
            shutil.rmtree(tmp_path / "extents")
            await store.disk_health.check_missing_disks()
            assert [state.serves for state in store.disk_health.disk_states()] == [True, True]

    asyncio.run(run())


def test_a_disk_that_is_not_given_is_named_where_an_old_one_is(tmp_path: Path) -> None:
    async def run() -> None:
        with closing(_open(tmp_path, "one")) as store:
            await put_object(store, "k", b"k" * 3000, size=3000)
        Store.recover(_settings(tmp_path, "two"), lambda path, how: None)
        with pytest.raises(FormatError, match=r"one was taken out of service .* start the node with .*/two$"):
            Store.recover(_settings(tmp_path, "one"), lambda path, how: None)
        Store.recover(_settings(tmp_path, "two"))

    asyncio.run(run())


def test_an_empty_directory_takes_its_place_at_a_start(tmp_path: Path) -> None:
    async def run() -> None:
        settings = _settings(tmp_path, "one", "two")
        with closing(_open(tmp_path, "one", "two")) as store:
            for key, body in BODIES.items():
                await put_object(store, key, body, size=len(body))
            every = _all(store)
        (tmp_path / "two" / "extents").rename(tmp_path / "gone")
        with pytest.raises(FormatError, match="two is missing; mount it"):
            Store.recover(settings)
        gone = {key for key, record in every.items() if record.extents[0].disk == 1}
        assert Store.recover(settings, lambda path, how: None) == len(gone)
        for _ in range(2):  # and so it stays
            with closing(_open(tmp_path, "one", "two")) as store:
                assert {key for key, record in _all(store).items() if record.broken} == gone
                assert [state.serves for state in store.disk_health.disk_states()] == [True, True]
        with closing(_open(tmp_path, "one", "two")) as store:
            await store.disk_health.probe_disks()
            assert (store.disk_health.take_data_lost_flag(), store.disk_health.take_data_lost_flag()) == (
                True,
                False,
            )
            await _restore(store, every, gone)
            assert {key: store.read_range(each, 0, each.size) for key, each in _all(store).items()} == BODIES
            assert {record.extents[0].disk for record in _all(store).values()} == {0, 2}
        assert check_store(settings).problems == []
        rebuild_index(settings)
        with closing(_open(tmp_path, "one", "two")) as store:
            assert {key: store.read_range(each, 0, each.size) for key, each in _all(store).items()} == BODIES

    asyncio.run(run())


def test_an_empty_directory_takes_its_place_under_a_running_store(tmp_path: Path) -> None:
    async def run() -> None:
        with closing(_open(tmp_path, "one", "two")) as store:
            for key, body in BODIES.items():
                await put_object(store, key, body, size=len(body))
            every = _all(store)
            gone = {key for key, record in every.items() if record.extents[0].disk == 1}
            (tmp_path / "two" / "extents").rename(tmp_path / "gone")
            for key in gone:
                if len(BODIES[key]) == LARGE:  # no file of a large object is kept open
                    with pytest.raises(QuarantinedError):
                        store.read_range(every[key], 0, 10)
            await store.disk_health.check_missing_disks()
            assert {key for key, record in _all(store).items() if record.broken} == gone
            assert sorted(store._disks.roots) == [0, 2]
            await _restore(store, every, gone)
            assert {key: store.read_range(each, 0, each.size) for key, each in _all(store).items()} == BODIES
            assert store.quarantine.entries() == ()

    asyncio.run(run())


def test_what_another_process_finds_out_is_heeded(tmp_path: Path) -> None:
    async def run() -> None:
        with closing(_open(tmp_path, "one", "two")) as store:
            key = next(key for key in BODIES if store._disks.placement_order("b", key)[0] == 1)
            await store._committer.submit(replacement.RetireDisk(1))
            error = await error_of(
                DiskFailedError, put_object(store, key, b"late")
            )  # this one does not know yet
            assert "repeat the write" in str(error)
            await store._committer.submit(replacement.AddDisk(tmp_path / "three"))
            assert store._disks.path(2, 7).startswith(
                str(tmp_path / "three")
            )  # asked for before it is heeded
            assert sorted(store._disks.roots) == [0, 2]
            record = await put_object(store, key, b"late")
            assert record.extents[0].disk != 1

    asyncio.run(run())


def test_a_mount_that_failed_is_no_empty_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = {"two"}
    for module in (replacement, health_monitor):
        monkeypatch.setattr(module, "is_mounted", lambda root: root.name in mounted)
    settings = _settings(tmp_path, "one", "two")
    with closing(_open(tmp_path, "one", "two")):
        pass
    (tmp_path / "two" / "extents").rename(tmp_path / "gone")
    mounted.clear()
    Store.recover(settings, lambda path, how: None)
    assert not (tmp_path / "two" / "extents").exists()

    async def run() -> None:
        with closing(_open(tmp_path, "one", "two")) as store:
            await store.disk_health.probe_disks()
            assert [state.why for state in store.disk_health.disk_states()] == [
                "",
                "not mounted: mount an empty file system there",
            ]
            mounted.add("two")
            await store.disk_health.check_missing_disks()
            assert [state.serves for state in store.disk_health.disk_states()] == [True, True]

    asyncio.run(run())


def test_the_last_disk_is_told_clearly(tmp_path: Path) -> None:
    async def run() -> None:
        with closing(_open(tmp_path, "one")) as store:
            await put_object(store, "k", b"k" * 3000)
            number = next(iter(store._disks.roots))
            failpoints.configure(f"store.probe.{number}=error")
            for _ in range(3):
                await store.disk_health.probe_disks()
            for size in (10, LARGE):
                error = await error_of(DiskFailedError, put_object(store, "new", b"n" * size, size=size))
                assert "every disk" in str(error)
            record = store.get("b", "k")
            assert record is not None
            assert record.broken

    asyncio.run(run())


def test_a_probe_that_fails_once_and_a_full_disk_do_no_harm(tmp_path: Path) -> None:
    async def run() -> None:
        with closing(_open(tmp_path, "one")) as store:
            number = next(iter(store._disks.roots))
            for action in ("error", "error(28)", "error", "error(28)", "error"):
                failpoints.configure(f"store.probe.{number}={action}")
                await store.disk_health.probe_disks()
            assert not store._disks.lost

    asyncio.run(run())


def test_a_disk_that_hangs_is_told_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk_probes, "PROBE_WAIT", 0.05)
    hangs, clock, settings = threading.Event(), ManualClock(), _settings(tmp_path, "one", "two")

    def hang() -> None:
        hangs.wait(60)

    async def run() -> None:
        Store.recover(settings)
        with closing(Store.open(settings, writer="s", clock=clock)) as store:
            health, disks = store.disk_health, {root.name: n for n, root in store._disks.roots.items()}
            await health.probe_disks()
            failpoints.set_callback(f"store.probe.{disks['two']}", hang)
            try:
                for seconds in (0, 10):
                    clock.advance(seconds)
                    await health.probe_disks()
                    assert health.silent_seconds() == 0  # a busy one takes seconds
                clock.advance(10)
                for _ in range(2):
                    await health.probe_disks()
                assert health.silent_seconds() == 20
                one, two = health.disk_states()
                assert (one.why, two.serves) == ("", True)
                assert two.why.startswith("has not answered since ")
                shutil.rmtree(tmp_path / "one" / "extents")  # another one fails meanwhile
                await health.probe_disks()
                assert list(store._disks.lost) == [disks["one"]]
            finally:
                hangs.set()
            await asyncio.wait([health._probes._running[tmp_path / "two"].task])
            await health.probe_disks()
            assert list(store._disks.lost) == [disks["one"]]
            assert [state.why for state in health.disk_states()][1:] == [""]

    asyncio.run(run())
    assert caplog.text.count("a disk does not answer") == caplog.text.count("a disk answers again") == 1


def test_an_index_on_a_full_file_system_of_its_own_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disks have room, so nothing else says why writes are refused."""
    shm = Path("/dev/shm")
    if shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("not run here: /dev/shm is no file system of its own")
    with TemporaryDirectory(dir=shm) as index, closing(_open_with_index(tmp_path, Path(index))) as store:
        assert [state.why for state in store.disk_health.disk_states()] == [""]
        monkeypatch.setattr(health_monitor, "index_has_free_space", lambda path: False)
        one, found = store.disk_health.disk_states()
        assert (one.why, found.path, found.serves) == ("", index, True)
        assert "holds the index and is full" in found.why
    with closing(_open(tmp_path / "together", "one")) as store:
        _, found = store.disk_health.disk_states()  # the disk has room, so it does not say it
        assert "holds the index and is full" in found.why
        monkeypatch.setattr(health_monitor, "has_free_space", lambda path, wanted: False)
        assert [state.why for state in store.disk_health.disk_states()] == [""]


def _open_with_index(place: Path, index: Path) -> Store:
    settings = dataclasses.replace(_settings(place, "one"), index_dir=index)
    Store.recover(settings)
    return Store.open(settings, writer="s", clock=ManualClock())


def test_an_exchanged_disk_is_told_and_not_retired(tmp_path: Path) -> None:
    """Another directory with files is in its place: its data is elsewhere, not lost."""

    async def run() -> None:
        for disk in ("one", "two"):
            (tmp_path / disk).mkdir()
        with closing(_open(tmp_path, "one", "two")) as store:
            for key, body in BODIES.items():
                await put_object(store, key, body, size=len(body))
            health, every = store.disk_health, _all(store)
            shutil.copytree(tmp_path / "two", tmp_path / "copy")
            assert not health.misses_disks()
            (tmp_path / "two").rename(tmp_path / "real")
            (tmp_path / "copy").rename(tmp_path / "two")
            assert health.misses_disks()
            await health.check_missing_disks()
            assert not await health.probe_disks()
            [state] = health.exchanged_disks()
            assert state.path == str(tmp_path / "two")
            assert not store._disks.lost
            (tmp_path / "two").rename(tmp_path / "copy")
            (tmp_path / "real").rename(tmp_path / "two")
            assert not health.misses_disks()
            assert not health.exchanged_disks()
            for key, record in every.items():
                assert store.read_range(record, 0, record.size) == BODIES[key]

    asyncio.run(run())


def test_a_file_that_an_exchanged_disk_lacks_is_no_lost_object(tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "one").mkdir()
        with closing(_open(tmp_path, "one")) as store:
            shutil.copytree(tmp_path / "one", tmp_path / "copy")
            await put_object(store, "k", b"1" * LARGE, size=LARGE)
            record = _all(store)["k"]
            (tmp_path / "one").rename(tmp_path / "real")
            (tmp_path / "copy").rename(tmp_path / "one")
            with pytest.raises(QuarantinedError):
                store.read_range(record, 0, record.size)

    asyncio.run(run())
