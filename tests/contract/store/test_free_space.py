"""Several disks, some of them nearly full: what is new goes where there is room, and is found there."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.process.periodic_tasks import compact
from meshd.store.disks.layout import reserves_kept
from meshd.store.engine.compaction import _RESERVES_KEPT
from meshd.store.errors import DiskFullError, IndexFullError, IndexMapFullError
from meshd.store.records import Meta, Record, Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.telemetry import metric_registry
from meshd.util.clock import SystemClock
from meshd.util.disk_space import ASSUMED_FREE, measure_disk_space
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import LARGE, error_of, put_object, put_part
from tests.support.version_suite import ON

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

KEYS = [f"k{number}" for number in range(24)]


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings.at(
        tmp_path,
        disks=(tmp_path / "a", tmp_path / "b"),
        small_object_bytes=64 << 10,
        segment_bytes=100_000,
        index_map_bytes=1 << 28,
        space_check_seconds=0,
    )


class Free:
    """Room of the file systems under `place`, by the name of their directory, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: dict[str, int] = {}
        self.reserve = self.measured = 0
        monkeypatch.setattr("meshd.store.disks.layout.free_above_reserve", self._spare)

    def _spare(self, path: str, reserves: int = 1) -> int:
        self.measured += 1
        return self.left.get(os.path.basename(path), 1 << 40) + self.reserve - self.reserve // reserves


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    return Free(monkeypatch)


def run(settings: StoreSettings, doing: Callable[[Store], Coroutine[None, None, None]]) -> None:
    with closing(Store.open(settings, writer="w0", clock=SystemClock())) as store:
        asyncio.run(doing(store))


def disks_of(store: Store) -> set[int]:
    """Where the bytes of all objects lie."""
    return {extent.disk for _, record in store.list("b").entries for extent in record.extents}


def displaced() -> float:
    found = [
        line
        for line in metric_registry.render_metrics().decode().splitlines()
        if line.startswith("meshd_store_displ")
    ]
    return sum(float(line.split()[-1]) for line in found)


def read_all(store: Store, bodies: dict[str, bytes]) -> None:
    for key, body in bodies.items():
        record = store.get("b", key)
        assert record is not None
        assert store.read_range(record, 0, record.size) == body


@pytest.mark.parametrize("size", [700, LARGE])
def test_a_nearly_full_disk_leaves_what_is_new_to_the_others(
    settings: StoreSettings, free: Free, size: int
) -> None:
    old = {key: os.urandom(size) for key in KEYS}
    new = {key: os.urandom(size) for key in (*KEYS[:12], "new-1", "new-2", "new-3", "new-4", "new-5")}

    async def doing(store: Store) -> None:
        for key, body in old.items():
            await put_object(store, key, body)
        assert disks_of(store) == {0, 1}
        before, free.left["a"] = displaced(), 0
        for key, body in new.items():
            record = await put_object(store, key, body)
            assert [extent.disk for extent in record.extents] == [1]
        assert displaced() > before
        read_all(store, old | new)
        for key in KEYS[18:]:  # and what lies on the full one can be deleted
            await store.delete("b", key)
        del free.left["a"]
        homes = {(await put_object(store, key, body)).extents[0].disk for key, body in new.items()}
        assert homes == {0, 1}
        read_all(store, {key: (old | new)[key] for key in (*KEYS[:18], *new)})

    run(settings, doing)
    assert check_store(settings).clean
    assert rebuild_index(settings).objects == 23
    Store.recover(settings)
    run(settings, lambda store: _reads(store, {key: (old | new)[key] for key in (*KEYS[:18], *new)}))


async def _reads(store: Store, bodies: dict[str, bytes]) -> None:
    read_all(store, bodies)


def test_a_write_is_refused_when_no_disk_takes_it(settings: StoreSettings, free: Free) -> None:
    async def doing(store: Store) -> None:
        await put_object(store, "k", b"old")
        free.left |= {"a": 1000, "b": 20_000}
        for key in KEYS:
            await error_of(DiskFullError, put_object(store, key, bytes(30_000)))
            await error_of(DiskFullError, put_object(store, key, bytes(LARGE), size=LARGE))
            assert (await put_object(store, key, bytes(10_000))).extents[0].disk == 1
        free.left["b"] = 0
        for key in KEYS:
            await error_of(DiskFullError, put_object(store, key, bytes(10_000)))
        assert {(await put_object(store, key, bytes(100))).extents[0].disk for key in KEYS} == {0}
        free.left["a"] = 0
        await error_of(DiskFullError, put_object(store, "k", b"new"))
        await store.delete("b", "k")

    run(settings, doing)
    assert check_store(settings).clean


def test_ample_space_is_not_measured_for_each_write(tmp_path: Path, free: Free) -> None:
    """Only scarce space is, and what changed meanwhile is seen soon."""
    clock, settings = ManualClock(), StoreSettings.at(tmp_path, index_map_bytes=1 << 28)
    root = tmp_path.name

    async def doing(store: Store) -> None:
        for key in KEYS:
            await put_object(store, key, b"small")
        assert free.measured == 2  # of the disk and of the index, once
        free.left[root] = 1 << 30
        clock.advance(settings.space_check_seconds)
        for key in KEYS:
            await put_object(store, key, b"small")
        assert free.measured >= 2 * len(KEYS)
        free.left[root] = 0
        await error_of(DiskFullError, put_object(store, "k", b"small"))

    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        free.measured = 0
        asyncio.run(doing(store))


def test_of_writes_at_once_as_many_are_taken_as_fit(settings: StoreSettings, free: Free) -> None:
    """They are made durable in one group, and the room of the disks is counted over all of it."""

    async def doing(store: Store) -> None:
        await put_object(store, "first", bytes(10))
        free.left |= {"a": 25_000, "b": 45_000}
        answers = await asyncio.gather(
            *[put_object(store, key, bytes(10_000)) for key in KEYS], return_exceptions=True
        )
        taken = [answer for answer in answers if not isinstance(answer, BaseException)]
        refusals = [answer for answer in answers if isinstance(answer, BaseException)]
        assert len(taken) >= 4
        assert refusals
        assert all(isinstance(answer, DiskFullError) for answer in refusals)

    run(settings, doing)


def test_uploads_copies_and_compaction_use_the_disk_with_room(settings: StoreSettings, free: Free) -> None:
    bodies = {key: os.urandom(20_000) for key in KEYS}

    async def doing(store: Store) -> None:
        for key, body in bodies.items():
            await put_object(store, key, body)
        free.left["a"] = 0
        upload = await store.create_upload(Upload("", "b", "u"))
        for number in range(1, 5):
            await put_part(store, upload, number, bytes([number]) * LARGE)
        done = await store.complete_upload(upload, [1, 2, 3, 4], Meta("e-4"), versioning=ON)
        assert {extent.disk for extent in done.extents} == {1}
        source = store.get("b", KEYS[0])
        assert source is not None
        await store.link("b", "copy", source, Meta("e"))
        for file in store.compactor.candidates(0.0):
            assert await store.compactor.compact(file)
        read_all(store, bodies | {"copy": bodies[KEYS[0]]})
        sealed = {extent.disk for key in KEYS[:12] for extent in store.get("b", key).extents}  # type: ignore[union-attr]
        assert sealed == {1}  # compaction made room on the full one

    run(settings, doing)
    assert check_store(settings).clean


def test_the_index_keeps_room_for_deletions(settings: StoreSettings, free: Free) -> None:
    async def doing(store: Store) -> None:
        await put_object(store, "k", b"x")
        free.left["index"] = 0
        error = await error_of(DiskFullError, put_object(store, "l", b"x"))
        assert isinstance(error, IndexFullError)
        assert str(settings.index_dir) in str(error)
        free.left |= {
            "a": 0,
            "b": 0,
        }  # on one of which the index is: deleting helps
        error = await error_of(DiskFullError, put_object(store, "l", b"x"))
        assert not isinstance(error, IndexFullError)
        del free.left["a"]
        await store.delete("b", "k")
        del free.left["index"]
        await put_object(store, "l", b"x")

    run(settings, doing)


@pytest.mark.parametrize(("at_once", "about"), [(1, {"note": "n" * 9000}), (64, {})])
def test_an_index_of_the_size_of_its_map_takes_deletions_and_then_writes_again(
    tmp_path: Path, at_once: int, about: dict[str, str]
) -> None:
    """Also many deletions at once, which need more free pages than there are. What was acknowledged stays."""
    settings = StoreSettings.at(
        tmp_path, index_map_bytes=16 << 20, space_check_seconds=0, tombstone_seconds=3600
    )
    kept: list[str] = []

    async def put_all(store: Store, keys: list[str]) -> list[BaseException]:
        answers = await asyncio.gather(
            *[put_object(store, key, b"x", metadata=about) for key in keys], return_exceptions=True
        )
        kept.extend(key for key, answer in zip(keys, answers, strict=True) if isinstance(answer, Record))
        return [answer for answer in answers if isinstance(answer, BaseException)]

    async def fill(store: Store) -> None:
        for first in range(0, 100_000, at_once):
            keys = [f"{number * 7919 % 99_991:0300}" for number in range(first, first + at_once)]
            if refused := await put_all(store, keys):
                break
        assert {type(error) for error in refused} == {IndexMapFullError}
        assert "size of index-map; set a higher one" in str(refused[0])
        assert len(kept) > 800
        if at_once == 1:
            assert store.stats().index_map_free_bytes <= 0
        kept.sort()
        deleted = kept[: len(kept) // 2]
        await asyncio.gather(*[store.delete("b", key) for key in deleted])
        del kept[: len(deleted)]
        assert store.stats().index_map_free_bytes > 1 << 20
        assert await put_all(store, keys) == []
        assert [key for key in deleted if store.get("b", key) is not None and key not in keys] == []

    async def read(store: Store) -> None:
        assert [key for key in kept if store.get("b", key) is None] == []

    run(settings, fill)
    run(settings, read)
    assert check_store(settings).clean


@pytest.mark.parametrize("size", [700, LARGE])
def test_a_file_system_that_does_not_tell_its_size_is_not_full(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """As some FUSE and network file systems: statvfs answers zeros."""
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([4096, 4096, *[0] * 8]))
    bodies = {key: os.urandom(size) for key in KEYS[:4]}

    async def doing(store: Store) -> None:
        for key, body in bodies.items():
            await put_object(store, key, body)
        read_all(store, bodies)
        assert {(disk.free, disk.total) for disk in store.stats().disks} == {(ASSUMED_FREE, 0)}

    Store.recover(settings)  # as a daemon does when it starts: makes the reserves
    run(settings, doing)


@pytest.mark.parametrize("size", [1000, LARGE])
def test_documents_of_the_node_may_use_half_of_the_reserve(
    settings: StoreSettings, free: Free, size: int
) -> None:
    async def doing(store: Store) -> None:
        free.left, free.reserve = {"a": -1000, "b": -1000}, 4 * LARGE
        await error_of(DiskFullError, put_object(store, "k", bytes(size)))
        await put_object(store, "plans/1", bytes(size), bucket="-mesh-")
        assert store.get("-mesh-", "plans/1") is not None
        free.left = {"a": -3 * LARGE, "b": -3 * LARGE}  # what deletions need is left
        await error_of(DiskFullError, put_object(store, "plans/2", bytes(size), bucket="-mesh-"))

    run(settings, doing)


def test_space_is_what_df_says(tmp_path: Path) -> None:
    argv = ["df", "-B1", "--output=used,avail", str(tmp_path)]
    text = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
    used, free = map(int, text.splitlines()[1].split())
    space = measure_disk_space(tmp_path)
    assert space.usable == pytest.approx(used + free, rel=0.05)
    assert space.free <= space.usable <= space.total


def test_a_full_disk_is_compacted_with_its_reserve(settings: StoreSettings, free: Free) -> None:
    bodies = {f"s{number:03}": os.urandom(5_000) for number in range(120)}

    async def doing(store: Store) -> None:
        for key, body in bodies.items():
            await put_object(store, key, body)
        free.left |= {"a": 0, "b": 0}
        await error_of(DiskFullError, put_object(store, "new", bytes(5_000)))
        for key in list(bodies)[::3]:
            await store.delete("b", key)
            del bodies[key]
        free.reserve = 40_000  # takes no segment's live bytes
        assert await compact(store, SystemClock()) == 0
        free.reserve = 200_000
        assert await compact(store, SystemClock()) > 0
        read_all(store, bodies)

    run(settings, doing)
    assert check_store(settings).clean


def test_with_room_only_segments_that_are_mostly_dead_are_rewritten(settings: StoreSettings) -> None:
    bodies = {f"s{number:03}": os.urandom(5_000) for number in range(120)}

    async def doing(store: Store) -> None:
        for key, body in bodies.items():
            await put_object(store, key, body)
        for key in list(bodies)[::3]:
            await store.delete("b", key)
        assert await compact(store, SystemClock()) == 0

    run(settings, doing)


def test_documents_are_accepted_beside_a_rewrite_on_a_full_disk() -> None:
    """Snapshots and plans of new jobs; other writes leave all of the reserve."""
    assert reserves_kept("-mesh-") > _RESERVES_KEPT > reserves_kept("bucket") == 1
