"""A store that starts while one of its disks gives errors: without it, or not at all, by the rules for a disk
that is missing. A directory that is a link to itself gives an error to whoever looks, root too."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from meshd.cluster.data_dir_identity import has_been_used
from meshd.config import ConfigError, NodeSettings, StoreSettings
from meshd.process.data_dir import prepare_data_dir
from meshd.process.wiring.cache import recover_cache
from meshd.store.disks import startup_recovery
from meshd.store.errors import FormatError
from meshd.store.store import Store
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import put_object

if TYPE_CHECKING:
    from meshd.store.disks.startup_recovery import MissingDiskPolicy

BODIES = {f"k{number}": b"%d" % number * 3000 for number in range(12)}


def _settings(place: Path, *disks: str, family: int = 0) -> StoreSettings:
    roots = tuple(place / disk for disk in disks or ("one", "two"))
    return StoreSettings.at(
        place, disks=roots, small_object_bytes=64 << 10, segment_bytes=1 << 20, family=family
    )


def _fail(directory: Path) -> None:
    """Looking into it is an error from now on."""
    if directory.exists():
        directory.rename(directory.with_name(f"{directory.name}-before"))
    directory.symlink_to(directory.name)


def _fill(place: Path) -> set[str]:
    """Two disks; what lies on the second."""
    for disk in ("one", "two"):
        (place / disk).mkdir(parents=True)
    settings = _settings(place)
    Store.recover(settings)

    async def fill() -> set[str]:
        with closing(Store.open(settings, writer="s", clock=ManualClock())) as store:
            for key, body in BODIES.items():
                await put_object(store, key, body)
            second = {key for key, record in store.list("b").entries if record.extents[0].disk == 1}
            assert 0 < len(second) < len(BODIES)
            return second

    return asyncio.run(fill())


def _given_up(asked: list[tuple[str, str]]) -> MissingDiskPolicy:
    return lambda path, how: asked.append((path.name, how))


def test_an_old_copy_of_a_disk_is_as_one_that_is_missing(tmp_path: Path) -> None:
    """It lacks what was written since: its bytes at these places are others."""
    second, settings = _fill(tmp_path), _settings(tmp_path)
    shutil.copytree(tmp_path / "two", tmp_path / "copy")
    Store.recover(settings)
    (tmp_path / "two").rename(tmp_path / "real")
    (tmp_path / "copy").rename(tmp_path / "two")
    with pytest.raises(FormatError, match=r"disk .*two is an old copy, or the index is one .*; mount it"):
        Store.recover(settings)
    (tmp_path / "two").rename(tmp_path / "copy")
    (tmp_path / "real").rename(tmp_path / "two")
    assert Store.recover(settings) == 0  # nothing was done to either
    (tmp_path / "two").rename(tmp_path / "real")
    (tmp_path / "copy").rename(tmp_path / "two")
    assert Store.recover(settings, lambda path, how: None) == len(second)
    with closing(Store.open(settings, writer="s", clock=ManualClock())) as store:
        one, two = store.disk_health.disk_states()
        assert one.serves
        assert two.why.startswith("is an old copy, or the index is one: remove ")


def test_a_full_disk_is_no_old_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start cannot be noted on it."""
    _fill(tmp_path)

    def full(root: Path, marker: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(startup_recovery, "write_marker", full)
            assert Store.recover(_settings(tmp_path)) == 0
    assert Store.recover(_settings(tmp_path)) == 0


@pytest.mark.parametrize("where", ["extents", "extents/DISK", "extents/drafts", "extents/05"])
def test_a_disk_that_gives_errors_is_as_one_that_is_missing(tmp_path: Path, where: str) -> None:
    second, settings = _fill(tmp_path), _settings(tmp_path)
    _fail(tmp_path / "two" / where)
    with pytest.raises(FormatError, match=r"disk .*two cannot be read \(.+\); mount it"):
        Store.recover(settings)
    asked: list[tuple[str, str]] = []
    assert Store.recover(settings, _given_up(asked)) == len(second)
    assert [(name, how.partition(" (")[0]) for name, how in asked] == [("two", "cannot be read")]
    for _ in range(2):  # and so it stays, unasked
        Store.recover(settings)
        with closing(Store.open(settings, writer="s", clock=ManualClock())) as store:
            states = store.disk_health.disk_states()
            assert [state.serves for state in states] == [True, False]
            assert "put an empty disk in its place" in states[1].why
            found = dict(store.list("b").entries)
            assert {key for key, record in found.items() if record.broken} == second
            for key in BODIES.keys() - second:
                assert store.read_range(found[key], 0, 3000) == BODIES[key][:3000]


def test_a_disk_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second, settings, asked = _fill(tmp_path), _settings(tmp_path), list[tuple[str, str]]()
    statvfs = os.statvfs

    def told(path: Path) -> os.statvfs_result:
        found = list(statvfs(path))
        found[8] |= os.ST_RDONLY if str(path).endswith("two") else 0
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", told)
    assert Store.recover(settings, _given_up(asked)) == len(second)
    assert asked == [("two", "cannot be read (Read-only file system)")]


def test_a_new_disk_that_gives_errors_is_refused(tmp_path: Path) -> None:
    _fill(tmp_path)
    (tmp_path / "three").mkdir()
    _fail(tmp_path / "three" / "extents")
    settings = _settings(tmp_path, "one", "two", "three")
    with pytest.raises(
        FormatError, match=r"three cannot be read .*this node has never used it.*remove it from --disk"
    ):
        Store.recover(settings, lambda path, how: None)
    shutil.rmtree(tmp_path / "three")
    (tmp_path / "three").mkdir()
    Store.recover(settings)


def test_a_cache_begins_without_it_and_takes_an_empty_one(tmp_path: Path) -> None:
    """After another boot its index is empty: it knows none of its disks."""
    _fill(tmp_path)
    settings = _settings(tmp_path, family=1)
    shutil.rmtree(settings.index_dir)
    _fail(tmp_path / "two" / "extents")
    (settings.data_dir / "boot").write_text("another")
    recover_cache(settings)

    async def look(serves: list[bool]) -> None:
        with closing(Store.open(settings, writer="s", clock=ManualClock())) as cache:
            await cache.disk_health.probe_disks()
            assert [state.serves for state in cache.disk_health.disk_states()] == serves
            await put_object(cache, "k", b"k")

    asyncio.run(look([True, False]))
    recover_cache(settings)
    asyncio.run(look([True, False]))
    (tmp_path / "two" / "extents").unlink()
    asyncio.run(look([True, True]))


def test_a_cache_lets_a_disk_lie_that_was_not_emptied(tmp_path: Path) -> None:
    """It can be read again, with the marker of an index that is gone: what lies on it is in nobody's way."""
    _fill(tmp_path)
    settings = _settings(tmp_path, family=1)
    shutil.rmtree(settings.index_dir)
    _fail(tmp_path / "two" / "extents")
    (settings.data_dir / "boot").write_text("another")
    recover_cache(settings)
    (tmp_path / "two" / "extents").unlink()
    (tmp_path / "two" / "extents-before").rename(tmp_path / "two" / "extents")
    held = sorted((tmp_path / "two" / "extents").rglob("*"))
    recover_cache(settings)
    with closing(Store.open(settings, writer="s", clock=ManualClock())) as cache:
        assert [state.serves for state in cache.disk_health.disk_states()] == [True, False]
    assert sorted((tmp_path / "two" / "extents").rglob("*")) == held


def test_the_directories_of_a_node(tmp_path: Path) -> None:
    """A disk that cannot even be looked at is left to recovery, the data directory is not."""
    store = _settings(tmp_path / "n")
    (tmp_path / "n").mkdir()
    _fail(tmp_path / "n" / "two")
    prepare_data_dir(NodeSettings("n", store)).release()
    assert not (tmp_path / "n" / "two").exists()


def test_nothing_is_written_beside_a_directory_for_the_index(tmp_path: Path) -> None:
    """It may be the root of a file system, or the only directory there that this user may write to."""
    mount, place = tmp_path / "mount", tmp_path / "n"
    settings = NodeSettings("n", StoreSettings.at(place, index_dir=mount / "fast"))
    prepare_data_dir(settings).release()
    assert [path.name for path in mount.iterdir()] == ["fast"]
    recover_cache(settings.cache_store)
    kept = settings.cache_store.index_dir
    assert (kept / "data.mdb").exists()
    kept.rename(mount / "fast-cache")  # where earlier releases have it
    prepare_data_dir(settings).release()
    assert [path.name for path in mount.iterdir()] == ["fast"]
    assert (kept / "data.mdb").exists()
    assert NodeSettings("n", StoreSettings.at(place)).cache_store.index_dir == place / "index-cache"


@pytest.mark.parametrize("index", ["n/index", "fast"])
def test_a_directory_is_used_once_it_has_an_index(tmp_path: Path, index: str) -> None:
    """A node that prepares its directories and does not start yet, as one that joins a mesh, leaves none. Nor
    does mkfs, if the index is to be in the root of a file system."""
    settings = NodeSettings("n", StoreSettings.at(tmp_path / "n", index_dir=tmp_path / index))
    (tmp_path / index / "lost+found").mkdir(parents=True)
    for _ in range(2):
        prepare_data_dir(settings).release()
        recover_cache(settings.cache_store)
        assert not has_been_used(settings)
    with closing(Store.open(settings.store, writer="n", clock=ManualClock())):
        assert has_been_used(settings)


def test_an_index_of_the_cache_that_cannot_be_moved_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is on another file system if the directory for the index is the root of one."""
    settings = NodeSettings("n", StoreSettings.at(tmp_path / "n", index_dir=tmp_path / "fast"))
    earlier = tmp_path / "fast-cache"
    earlier.mkdir()
    (earlier / "data.mdb").touch()

    def elsewhere(path: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(Path, "rename", elsewhere)
    prepare_data_dir(settings).release()
    assert settings.cache_store.index_dir.is_dir(), "the cache starts empty"
    (told,) = [record for record in caplog.records if "cache" in record.getMessage()]
    assert "delete" in told.getMessage()
    assert (vars(told)["directory"], vars(told)["why"]) == (str(earlier), os.strerror(errno.EXDEV))
    caplog.clear()
    prepare_data_dir(settings).release()
    assert [record for record in caplog.records if "cache" in record.getMessage()] == []


def test_a_node_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ConfigError, match=r"is on a full file system: a node needs 2 MiB there to start; remove"
    ):
        prepare_data_dir(NodeSettings("n", StoreSettings.at(tmp_path)))
    assert not list(tmp_path.glob("room.*"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot create the directory .*file: it is a file"):
        prepare_data_dir(NodeSettings("n", StoreSettings.at(tmp_path / "file")))
