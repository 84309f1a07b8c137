"""A power cut under a store that does not sync at each commit: it is back at its last checkpoint, whatever of
the later pages had reached the disk."""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import os
import random
import shutil
import sys
from contextlib import closing, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.store.engine.checkpointer import LostSyncError, close_relaxed, has_lost_sync
from meshd.store.errors import FormatError
from meshd.store.index.checkpoint import read_checkpoint
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util.clock import SystemClock
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import LARGE, put_object

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_SECTOR = 512


def settings_at(place: Path, **changes: object) -> StoreSettings:
    return StoreSettings.at(
        place,
        **{
            "durability": "relaxed",
            "small_object_bytes": 64 << 10,
            "segment_bytes": 200_000,
            "index_map_bytes": 1 << 28,
        }
        | changes,
    )


def other_boot(settings: StoreSettings) -> None:
    """As if the machine had been started anew since."""
    mark = settings.data_dir / "boot"
    mark.write_text("checkpoints another")


def run(settings: StoreSettings, doing: Callable[[Store], Coroutine[None, None, None]]) -> None:
    with closing(Store.open(settings, writer="w0", clock=SystemClock())) as store:
        asyncio.run(doing(store))


def contents(settings: StoreSettings) -> dict[str, bytes]:
    with closing(Store.open(settings, writer="w0", clock=SystemClock())) as store:
        return {key: store.read_range(record, 0, record.size) for key, record in store.list("b").entries}


async def change(store: Store, chance: random.Random, model: dict[str, bytes], count: int) -> None:
    """Objects that come, are replaced and go; small ones and such that have a file of their own."""
    for _ in range(count):
        key = f"k{chance.randrange(60)}"
        if model and chance.random() < 0.3:
            await store.delete("b", key)
            model.pop(key, None)
        else:
            model[key] = chance.randbytes(LARGE if chance.random() < 0.15 else chance.randrange(2000))
            await put_object(store, key, model[key])


class PowerCut:
    """Copies of a store's directory: as it was when it was synced, and later. `torn` is what a cut
    leaves: the synced bytes, with any sectors of any later copy over them."""

    def __init__(self, settings: StoreSettings, place: Path) -> None:
        self._settings, self._place = settings, place
        self._copies: list[Path] = []

    def photograph(self) -> None:
        copy = self._place / f"copy{len(self._copies)}"
        shutil.copytree(self._settings.data_dir, copy)
        self._copies.append(copy)

    def torn(self, chance: random.Random) -> StoreSettings:
        synced, *later = self._copies
        place = self._place / f"torn{chance.randrange(1 << 40)}"
        shutil.copytree(synced, place)
        for copy in later:
            for path in copy.rglob("*.mdb"):
                self._write_back(path, place / path.relative_to(copy), chance)
            for path in copy.rglob("*.tar"):  # what nobody had synced: all, some or none of it
                target = place / path.relative_to(copy)
                if chance.random() < 0.5:
                    target.parent.mkdir(exist_ok=True)
                    self._write_back(path, target, chance)
        settings = settings_at(place)
        other_boot(settings)
        return settings

    @staticmethod
    def _write_back(source: Path, target: Path, chance: random.Random) -> None:
        new, share = source.read_bytes(), chance.random()
        old = target.read_bytes() if target.exists() else b""
        size = chance.choice([max(len(old), len(new)), len(old)])
        mixed = bytearray(old.ljust(size, b"\0")[:size])
        for at in range(0, min(size, len(new)), _SECTOR):
            if chance.random() < share:
                piece = new[at : at + _SECTOR]
                mixed[at : at + len(piece)] = piece
        target.write_bytes(mixed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_it_is_back_at_its_checkpoint(tmp_path: Path, seed: int) -> None:
    settings, chance = settings_at(tmp_path / "store"), random.Random(seed)
    settings.data_dir.mkdir()
    Store.recover(settings)
    model: dict[str, bytes] = {}
    cut = PowerCut(settings, tmp_path)

    async def doing(store: Store) -> None:
        for _ in range(3):
            await change(store, chance, model, 40)
            assert store.checkpointer.take()
        synced.update(model)
        cut.photograph()
        for _ in range(4):
            await change(store, chance, model, 25)
            await store.compactor.purge(store.checkpointer.synced_before)
            cut.photograph()

    synced: dict[str, bytes] = {}
    run(settings, doing)
    for number in range(12):
        torn = cut.torn(chance)
        if number % 2:
            check_store(torn)  # before the daemon starts: it must not follow a torn page either
        Store.recover(torn)
        assert contents(torn) == synced
        assert not check_store(torn).problems
        shutil.rmtree(torn.data_dir)


def test_without_the_copy_the_index_is_torn(tmp_path: Path) -> None:
    """That the cut above takes something away, and that only the checkpoint puts it right."""
    settings, chance = settings_at(tmp_path / "store"), random.Random(7)
    settings.data_dir.mkdir()
    Store.recover(settings)
    cut, model, wrong = PowerCut(settings, tmp_path), dict[str, bytes](), 0

    async def doing(store: Store) -> None:
        await change(store, chance, model, 60)
        store.checkpointer.take()
        synced.update(model)
        cut.photograph()
        await change(store, chance, model, 200)
        cut.photograph()

    synced: dict[str, bytes] = {}
    run(settings, doing)
    for _ in range(10):
        torn = cut.torn(chance)
        (torn.index_dir / "checkpoint").unlink()
        (torn.data_dir / "boot").unlink()
        process = get_context("fork").Process(target=_read, args=(torn, synced))
        process.start()
        process.join(60)
        wrong += process.exitcode != 0
    assert wrong > 3


def _read(settings: StoreSettings, wanted: dict[str, bytes]) -> None:
    """In a process of its own: LMDB may follow a torn page to its death."""
    faulthandler.disable()
    Store.recover(settings)
    sys.exit(contents(settings) != wanted)


def test_files_go_only_after_a_checkpoint(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    Store.recover(settings)
    body = os.urandom(LARGE)

    def large() -> Path:
        (found,) = (path for path in tmp_path.glob("extents/*/*.tar") if path.stat().st_size > LARGE)
        return found

    async def doing(store: Store) -> None:
        await put_object(store, "large", body)
        store.checkpointer.take()
        file = large()
        await store.delete("b", "large")
        assert await store.compactor.purge(store.checkpointer.synced_before) == 0
        assert file.exists()
        store.checkpointer.take()
        assert await store.compactor.purge(store.checkpointer.synced_before) == 1
        assert not file.exists()

    run(settings, doing)


def test_what_nothing_changed_needs_no_checkpoint(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")
        assert store.checkpointer.take()
        taken = 0
        while store.checkpointer.take():
            taken += 1
        assert taken <= 1

    run(settings, doing)


def test_a_store_that_went_back_asks_the_others_until_they_were_asked(tmp_path: Path) -> None:
    """Other owners may have what this one has lost: a comparison with them fetches it. One that is cut short
    is made again after the next start."""
    settings = settings_at(tmp_path)
    Store.recover(settings)
    asked = list[bool]()

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")
        asked.append(store.disk_health.take_data_lost_flag())
        assert not store.disk_health.take_data_lost_flag()
        if len(asked) == 3:
            await store.disk_health.forget_loss()

    for boots in (False, True, False, False):
        if boots:
            other_boot(settings)
        Store.recover(settings)
        run(settings, doing)
    assert asked == [False, True, True, False]


def test_a_kill_takes_nothing_back(tmp_path: Path) -> None:
    """The kernel still has every page: the index is newer than its checkpoint, and stays."""
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")

    run(settings, doing)
    Store.recover(settings)
    assert contents(settings) == {"a": b"1"}


def test_a_clean_end_syncs_everything(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")

    run(settings, doing)
    close_relaxed(settings, SystemClock())
    assert (tmp_path / "boot").read_text() == "clean"
    Store.recover(settings)
    assert contents(settings) == {"a": b"1"}
    other_boot(settings)
    Store.recover(settings)
    assert contents(settings) == {"a": b"1"}


def test_from_relaxed_to_commit(tmp_path: Path) -> None:
    """A power cut before the change: back at the checkpoint, which nobody may use later."""
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")
        store.checkpointer.take()
        await put_object(store, "b", b"2")

    run(settings, doing)
    other_boot(settings)
    commit = settings_at(tmp_path, durability="commit")
    Store.recover(commit)
    assert contents(commit) == {"a": b"1"}
    assert read_checkpoint(settings.index_dir) is None
    assert not (tmp_path / "boot").exists()


def test_an_index_without_checkpoint_is_refused_and_rebuilt(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")

    run(settings, doing)
    other_boot(settings)
    (settings.index_dir / "checkpoint").unlink()
    with pytest.raises(FormatError, match="has no checkpoint: run meshd fsck --rebuild"):
        Store.recover(settings)
    rebuild_index(settings)
    Store.recover(settings)
    assert contents(settings) == {"a": b"1"}


@pytest.mark.parametrize("damage", [0, 4096])
def test_a_torn_checkpoint_leaves_the_one_before(tmp_path: Path, damage: int) -> None:
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")
        store.checkpointer.take()
        store.checkpointer.take()

    run(settings, doing)
    path = settings.index_dir / "checkpoint"
    raw = bytearray(path.read_bytes())
    raw[damage + 60] ^= 1
    path.write_bytes(raw)
    found = read_checkpoint(settings.index_dir)
    assert found is not None
    other_boot(settings)
    Store.recover(settings)
    assert set(contents(settings)) <= {"a"}


def test_pins_end_with_the_first_checkpoint(tmp_path: Path) -> None:
    """A process that only opened the index does not keep LMDB from reusing pages for ever."""
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        index = store.checkpointer._index
        before = index.env.readers()
        await put_object(store, "a", b"1")
        store.checkpointer.take()
        assert index._pin is not None
        for _ in range(100):
            if not index._pin._thread.is_alive():
                break
            await asyncio.sleep(0.05)
        assert len(index.env.readers().splitlines()) <= len(before.splitlines()) + 1
        assert not index._pin._thread.is_alive()

    run(settings, doing)


def test_writers_wait_for_slow_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshd.store.engine import group_commit

    settings, clock, synced = settings_at(tmp_path), ManualClock(), [1.0]
    Store.recover(settings)
    monkeypatch.setattr(group_commit, "last_checkpoint", lambda family: synced[0])

    async def doing(store: Store) -> None:
        clock.advance(10)
        waits = asyncio.ensure_future(put_object(store, "a", b"1"))
        done, _ = await asyncio.wait([waits], timeout=0.3)
        assert not done
        synced[0] = clock.monotonic()
        await waits

    with closing(Store.open(settings, writer="w0", clock=clock)) as store:
        asyncio.run(doing(store))


def test_what_a_sync_has_lost_is_not_taken_for_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports lost pages once, and the next sync succeeds: the store goes back to the checkpoint
    before, on the same boot, too."""
    settings = settings_at(tmp_path)
    Store.recover(settings)
    fdatasync, calls = os.fdatasync, list[int]()

    def fails_once(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fdatasync(fd)

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")
        assert store.checkpointer.take()
        await put_object(store, "b", b"2")
        monkeypatch.setattr(os, "fdatasync", fails_once)
        for _ in range(2):
            with pytest.raises(LostSyncError):
                store.checkpointer.take()
        monkeypatch.undo()

    run(settings, doing)
    close_relaxed(settings, SystemClock())
    assert has_lost_sync(settings)
    Store.recover(settings)
    assert contents(settings) == {"a": b"1"}
    assert not has_lost_sync(settings)
    assert check_store(settings).clean


def test_a_cache_that_lost_a_sync_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_at(tmp_path)
    Store.recover(settings)

    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")
        monkeypatch.setattr(os, "fdatasync", fails)
        with pytest.raises(LostSyncError):
            store.checkpointer.take()
        store.checkpointer.abandon()
        assert not store.checkpointer.take()
        monkeypatch.undo()

    run(settings, doing)
    with pytest.raises(FormatError, match=r"a sync failed before, and the index .* has no checkpoint"):
        Store.recover(settings)


def test_files_unlinked_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    """A cut may go back to a checkpoint that names files which were retired before it and unlinked later."""
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        await put_object(store, "large", os.urandom(LARGE))
        await store.delete("b", "large")
        assert await store.compactor.purge(store.checkpointer.synced_before) == 0
        store.checkpointer.take()
        assert await store.compactor.purge(store.checkpointer.synced_before) == 1

    run(settings, doing)
    other_boot(settings)
    Store.recover(settings)
    assert check_store(settings).problems == []


@pytest.mark.parametrize(
    ("step", "links"), [*((step, True) for step in (0, 2, 4, 6, 8, 9, 10, 11)), (1, False), (3, False)]
)
def test_a_rebuild_is_finished_by_the_next_start(
    tmp_path: Path, step: int, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after each change of the directory: there is no step without an index that starts."""
    settings = settings_at(tmp_path)
    Store.recover(settings)

    async def doing(store: Store) -> None:
        await put_object(store, "a", b"1")
        store.checkpointer.take()

    run(settings, doing)
    other_boot(settings)
    steps = iter(range(step))

    def interrupted(act: Callable[..., object]) -> Callable[..., object]:
        def stepped(*args: object, **options: object) -> object:
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return act(*args, **options)

        return stepped

    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        if not links:
            patch.setattr(Path, "hardlink_to", refused)
        for name in ("replace", "unlink", *(("hardlink_to",) if links else ())):
            patch.setattr(Path, name, interrupted(getattr(Path, name)))
        rebuild_index(settings)
    Store.recover(settings)
    assert contents(settings) == {"a": b"1"}
    assert not (settings.index_dir / "rebuild").exists()
