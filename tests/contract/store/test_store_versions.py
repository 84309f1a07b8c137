"""Versions on disk: what rebuilding, compaction and other processes must not do to them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import shutil
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from meshd.cli.fsck import fsck
from meshd.cli.inspect_store import inspect
from meshd.config import StoreSettings
from meshd.store.disks.layout import Disks, find_disks
from meshd.store.errors import DiskFailedError
from meshd.store.index.index import Index, object_key
from meshd.store.index.ordered_table import slot_filter
from meshd.store.records import NULL, Meta, Part, Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import IndexRebuilder, rebuild_index
from meshd.util import failpoints
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import LARGE, error_of, put_object, put_part
from tests.support.store_neighbour import Neighbour, create_versions, settings_at
from tests.support.version_suite import OFF, ON, version_bodies

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreSettings]:
    """A store of segments of 20 kB, rebuilt in steps of two; whole afterwards."""
    monkeypatch.setattr("meshd.store.tools.index_rebuild._BATCH", 2)
    settings = StoreSettings.at(
        tmp_path, small_object_bytes=64 << 10, segment_bytes=20_000, index_map_bytes=1 << 28
    )
    yield settings
    Store.recover(settings)
    report = check_store(settings)
    assert report.clean, report.problems
    assert report.leftovers == []


def opened(settings: StoreSettings, writer: str = "s") -> closing[Store]:
    return closing(Store.open(settings, writer=writer, clock=ManualClock()))


def run(settings: StoreSettings, doing: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
    with opened(settings) as store:
        asyncio.run(doing(store))


def facts(settings: StoreSettings) -> list[Any]:
    with closing(Index.open(settings)) as index, index.read_transaction() as txn:
        return [*index.all_records(txn), *index.uploads.all_uploads(txn), *index.uploads.all_parts(txn)]


def rebuilt(settings: StoreSettings, *, backwards: bool) -> list[Any]:
    """What the index would be, made from the data files in one order or the other."""
    beside = settings.data_dir / "beside"
    with closing(Index(beside, map_bytes=1 << 26, sync=False)) as index:
        rebuilder = IndexRebuilder(index)
        store, roots = find_disks(settings)
        for file in sorted(Disks(roots).files(), reverse=backwards):
            rebuilder.scan_file(*file)
        rebuilder.finish(store, roots)
        assert rebuilder.report.problems == []
        with index.read_transaction() as txn:
            found = [*index.all_records(txn), *index.uploads.all_uploads(txn), *index.uploads.all_parts(txn)]
    shutil.rmtree(beside)
    return found


def same_after_rebuild(settings: StoreSettings) -> None:
    """Once the files that compaction emptied are gone, too."""
    Store.recover(settings)
    before = facts(settings)
    assert rebuilt(settings, backwards=False) == before
    assert rebuilt(settings, backwards=True) == before


async def fill(store: Store) -> None:
    """Ends the open segment."""
    await put_object(store, "filler", bytes(20_000), bucket="filler")
    await put_object(store, "next", b"", bucket="filler")


async def compact(store: Store, *, but: int = 0) -> None:
    for file in sorted(set(store.compactor.candidates(0.0)) - {but}):
        assert await store.compactor.compact(file)


def test_a_deleted_version_stays_deleted_whatever_is_compacted(settings: StoreSettings) -> None:
    """Its bytes lie in a file that stays; the files that remember the deletion are written again."""

    async def doing(store: Store) -> None:
        await put_object(store, "stays", bytes(10_000))
        gone = await put_object(store, "k", bytes(3000), versioning=ON)
        marker = (await store.delete("b", "k", versioning=ON)).marker
        null = await put_object(store, "k", b"null", versioning=OFF)
        assert marker is not None
        old = gone.extents[0].file
        assert {old} == {marker.extents[0].file, null.extents[0].file}
        await fill(store)
        await put_object(store, "k", b"newer", versioning=ON)
        for version in (gone.version, marker.version, NULL):
            await store.delete_version("b", "k", version)
        await fill(store)
        for _ in range(3):
            await compact(store, but=old)
            await fill(store)
        assert version_bodies(store) == [b"newer"]

    run(settings, doing)
    same_after_rebuild(settings)
    for _ in range(4):  # once the old bytes are gone the memory of their deletion goes too
        with opened(settings) as store:
            asyncio.run(compact(store))
            asyncio.run(fill(store))
        same_after_rebuild(settings)
    stats = CliRunner().invoke(inspect, ["stats", "--json", "--data-dir", str(settings.data_dir)])
    assert json.loads(stats.stdout)["remembered_deletions"] == 0


def test_a_newer_version_does_not_bury_an_older_null_one(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        await put_object(store, "stays", bytes(10_000))
        null = await put_object(store, "k", b"null")
        await fill(store)
        await store.delete("b", "k")
        await put_object(store, "k", b"version", versioning=ON)
        await fill(store)
        await compact(store, but=null.extents[0].file)
        assert version_bodies(store) == [b"version"]

    run(settings, doing)
    same_after_rebuild(settings)


async def put_parted(store: Store, key: str, size: int) -> bytes:
    """A version whose bytes were uploaded in two parts elsewhere."""
    data = os.urandom(size)
    writer = store.writer("b", key, size=size)
    await writer.write(data)
    parts = (Part(5, "one", {}), Part(size - 5, "two", {}))
    record = await writer.commit(Meta("of-2", parts=parts), versioning=ON)
    assert record.parts == parts
    return data


def test_compaction_puts_neighbours_together(settings: StoreSettings) -> None:
    """What is current, in order of bucket and key; second copies behind it, and older versions behind all."""

    async def doing(store: Store) -> None:
        keys = [f"{number:02}" for number in random.Random(1).sample(range(24), 24)]
        for key in keys:
            await put_object(store, key, key.encode() * 200, bucket="ab"[int(key) % 2], versioning=ON)
        for key in keys[::3]:
            await put_object(store, key, key.encode() * 100, bucket="ab"[int(key) % 2], versioning=ON)
        for key in keys[::5]:
            await store.amend("ab"[int(key) % 2], key, None, tags={"t": key})
        for _ in range(5):
            await fill(store)
        (file,) = {record.extents[0].file for each in "ab" for _, record in store.list_versions(each).entries}
        mine = bytes(slot % 3 > 0 for slot in range(256))
        store.compactor.first_copies = lambda bucket: mine if bucket == "b" else None
        assert await store.compactor.compact(file)

        def places(number: int) -> list[tuple[Any, ...]]:
            """Of the `number`-th version of each key: the file, the offset, bucket and key."""
            found = []
            for bucket in "ab":
                for key, record in store.list_versions(bucket).entries:
                    newest = record == store.get(bucket, key)
                    assert store.read_range(record, 0, record.size) == key.encode() * (record.size // 2)
                    assert record.tags == ({"t": key} if newest and key in keys[::5] else {})
                    if newest == (number == 0):
                        found.append((record.extents[0].file, record.extents[0].offset, bucket, key))
            return sorted(found)

        first = slot_filter(mine)
        current, older = places(0), places(1)
        assert (len(current), len(older), current[0][0] != file) == (24, 8, True)
        expected = sorted(
            (bucket == "b" and not first(object_key(bucket, key)), bucket, key) for *_, bucket, key in current
        )
        assert [place[2:] for place in current] == [place[1:] for place in expected]
        assert 2 < sum(place[0] for place in expected) < 10
        assert [place[2:] for place in older] == sorted(place[2:] for place in older)
        assert max(current)[:2] < min(older)[:2]

    larger = dataclasses.replace(settings, segment_bytes=100_000)
    run(larger, doing)
    same_after_rebuild(larger)


def test_compaction_moves_every_version(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        made = [await put_object(store, "k", os.urandom(3000), versioning=ON) for _ in range(4)]
        data = [store.read_range(record, 0, 3000) for record in reversed(made)]
        await store.amend("b", "k", made[1].version, tags={"t": "1"})
        await store.link("b", "k", made[0], Meta("copy"), versioning=ON)
        parted = [await put_parted(store, "k", size) for size in (500, LARGE)][::-1]
        upload = await store.create_upload(Upload("", "b", "k"))
        await put_part(store, upload, 1, b"part" * 500)
        await put_part(store, upload, 2, os.urandom(LARGE))
        done = await store.complete_upload(upload, [1, 2], Meta("copy"), versioning=ON)
        whole = store.read_range(done, 0, done.size)
        await store.amend("b", "k", done.version, tags={"t": "2"})
        await store.delete("b", "k", versioning=ON)
        await put_object(store, "k", b"null", versioning=OFF)
        await store.delete("b", "k", versioning=OFF)
        await put_object(store, "k", b"top", versioning=ON)
        for _ in range(3):
            await fill(store)
            await compact(store)
            assert version_bodies(store) == [b"top", None, None, whole, *parted, data[3], *data]
            amended = store.get_version("b", "k", done.version), store.get_version("b", "k", made[1].version)
            assert [found and found.tags for found in amended] == [{"t": "2"}, {"t": "1"}]

    run(settings, doing)
    same_after_rebuild(settings)
    assert rebuild_index(settings).versions == 10


def test_an_amendment_that_overtakes_compaction_holds(tmp_path: Path) -> None:
    """Another process amends an object whose bytes compaction has just written again; then the disk fails."""
    settings = settings_at(tmp_path)
    with opened(settings) as store, Neighbour(tmp_path, "w1") as neighbour:

        def amend() -> None:
            failpoints.configure("store.index.before_commit=error(5):after 1")
            neighbour.tell(do="amend", key="k", tags={"t": "1"})
            assert neighbour.answer() == {"t": "1"}

        async def doing() -> None:
            await put_object(store, "k", b"data")
            await put_object(store, "filler", bytes(60_000))
            await put_object(store, "filler", bytes(60_000))
            await put_object(store, "next", b"")
            failpoints.set_callback("store.compact.placed", amend)
            await error_of(DiskFailedError, compact(store))

        asyncio.run(doing())
        failpoints.configure("")
        found = store.get("b", "k")
        assert found is not None
        assert found.tags == {"t": "1"}
    same_after_rebuild(settings)
    assert check_store(settings).clean


def test_amendments_beside_compaction_are_kept(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        keys = [f"k{number}" for number in range(40)]
        for number, key in enumerate(keys):
            await put_object(store, key, os.urandom(900), versioning=ON if number % 2 else "")
        for turn in range(4):
            await fill(store)
            changes = [store.amend("b", key, None, tags={"turn": str(turn)}) for key in keys]
            await asyncio.gather(compact(store), *changes)
            assert {(store.get("b", key) or _none()).tags["turn"] for key in keys} == {str(turn)}

    run(settings, doing)
    same_after_rebuild(settings)


def _none() -> Any:
    raise AssertionError("there must be a record")


def test_of_two_processes_one_makes_the_first_version(tmp_path: Path) -> None:
    keys = [f"k{number}" for number in range(40)]
    settings = settings_at(tmp_path)
    with opened(settings, "w0") as store, Neighbour(tmp_path, "w1") as one, Neighbour(tmp_path, "w2") as two:
        for neighbour in (one, two):
            neighbour.tell(do="create versions", keys=keys)
        made = [asyncio.run(create_versions(store, keys)), one.answer(), two.answer()]
        assert sum(made) == len(keys)
        assert all(version_bodies(store, key) == [b"x"] for key in keys)
    same_after_rebuild(settings)


def test_an_overtaken_version_gets_the_higher_id(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    for size, point in ((10, "store.data.after_sync"), (LARGE, "store.own.after_rename")):
        with opened(settings, "w0") as store, Neighbour(tmp_path, "w1", clock_ahead=1000) as neighbour:

            def overtake(neighbour: Neighbour = neighbour, key: str = f"k{size}") -> None:
                failpoints.configure("")
                neighbour.tell(do="put", key=key, data="theirs")
                neighbour.answer()

            failpoints.set_callback(point, overtake)
            ours = asyncio.run(put_object(store, f"k{size}", b"o" * size, versioning=ON))
            assert store.get_version("b", f"k{size}", ours.version) == ours
            assert version_bodies(store, f"k{size}") == [b"o" * size, b"theirs"]
    same_after_rebuild(settings)


def test_fsck_sees_versions_out_of_order(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        for number in range(3):
            await put_object(store, "k", b"%d" % number, versioning=ON)
        await put_object(store, "n", b"null")
        await put_object(store, "n", b"version", versioning=ON)

    run(settings, doing)
    assert (check_store(settings).objects, check_store(settings).versions) == (2, 3)
    with closing(Index.open(settings)) as index, index.write_transaction() as txn:
        versions, name = index.versions, object_key("b", "k")
        versions.objects.delete(txn, name)
        versions.nulls.delete(txn, object_key("b", "n"))
    told = {(problem.kind, problem.name) for problem in check_store(settings).problems}
    assert ("mismatch", "b/k") in told
    assert ("mismatch", "b/n") in told
    assert rebuild_index(settings).problems == []


def test_inspect_shows_versions(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        await put_object(store, "k", b"null")
        await put_object(store, "k", b"version", versioning=ON, tags={"t": "1"})
        await store.delete("b", "k", versioning=ON)

    run(settings, doing)
    where = ["--data-dir", str(settings.data_dir)]
    shown = CliRunner().invoke(inspect, ["versions", "b", "k", "--json", *where])
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [(row["version"] == NULL, row["marker"], row["size"]) for row in rows] == [
        (False, True, 0),
        (False, False, 7),
        (True, False, 4),
    ]
    table = CliRunner().invoke(inspect, ["versions", "b", "k", *where])
    assert table.exit_code == 0
    assert rows[1]["version"] in table.stdout
    one = CliRunner().invoke(inspect, ["record", "b", "k", "--version", rows[1]["version"], "--json", *where])
    assert json.loads(one.stdout)["tags"] == {"t": "1"}
    gone = CliRunner().invoke(inspect, ["record", "b", "k", *where])
    assert (gone.exit_code, "inspect versions" in gone.output) == (1, True)
    stats = json.loads(CliRunner().invoke(inspect, ["stats", "--json", *where]).stdout)
    assert (stats["objects"], stats["versions"]) == (0, 3)
    segment = CliRunner().invoke(inspect, ["segment", "1", "--json", *where])
    members = [json.loads(line) for line in segment.stdout.splitlines()]
    assert [(member["kind"], member["used"]) for member in members] == [
        ("object", True),
        ("object", True),
        ("marker", True),
    ]
    assert "3 versions" in CliRunner().invoke(fsck, where).stdout


def test_a_file_that_goes_while_another_is_compacted_counts_as_compacted(settings: StoreSettings) -> None:
    """It held nothing but the manifest of an object whose bytes lie in the other one."""

    async def doing(store: Store) -> None:
        await put_object(store, "k", bytes(1000))
        await fill(store)
        await store.amend("b", "k", None, tags={"t": "1"})
        await put_object(store, "passing", bytes(20_000))
        for key in ("passing", "next", "filler"):
            await put_object(store, key, b"", bucket="b" if key == "passing" else "filler")
        for file in sorted(store.compactor.candidates(0.0)):
            assert await store.compactor.compact(file)
        found = store.get("b", "k")
        assert found is not None
        assert found.tags == {"t": "1"}

    run(settings, doing)
    same_after_rebuild(settings)
