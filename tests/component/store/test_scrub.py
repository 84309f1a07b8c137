"""Damaged bytes on a real disk: found, put in quarantine, never given out, restored."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from meshd.config import StoreSettings
from meshd.core.document_store import RESERVED_BUCKET
from meshd.datasets.archives.archive_service import LocalArchives
from meshd.documents.garbage_collector import DamagedDocuments
from meshd.store.errors import CorruptExtentError, InvalidPartError, QuarantinedError
from meshd.store.integrity.scrub import DiskDamage
from meshd.store.records import Meta, Upload
from meshd.store.replica.changes import without_local_fields
from meshd.store.replica.inventory import HeldVersion
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.telemetry import metric_registry
from tests.support.archive_files import archive_of
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import LARGE, put_object, put_part

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from meshd.store.records import Extent, Record


def _settings(place: Path) -> StoreSettings:
    return StoreSettings.at(place, small_object_bytes=64 << 10, segment_bytes=1 << 20)


def _on(place: Path, test: Callable[[Store], Awaitable[None]]) -> None:
    async def run() -> None:
        store = Store.open(_settings(place), writer="s", clock=ManualClock())
        try:
            await test(store)
        finally:
            store.close()

    asyncio.run(run())


def _flip(store: Store, extent: Extent, at: int = 0) -> None:
    with open(store._disks.path(extent.disk, extent.file), "r+b") as file:
        file.seek(extent.offset + at)
        byte = file.read(1)[0]
        file.seek(extent.offset + at)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


async def _rest(size: int) -> None:
    await asyncio.sleep(0)


async def _scrub(store: Store) -> int:
    await store.scrub.start_pass()
    while await store.scrub.scrub_next_file(_rest):
        pass
    return store.scrub.state.damaged


def _get(store: Store, key: str) -> Record:
    record = store.get("b", key)
    assert record is not None
    return record


async def _restore(store: Store, key: str, record: Record, data: bytes) -> None:
    writer = store.replica_writer("b", key, size=len(data))
    await writer.write(data)
    assert (await writer.commit_at_stamp(without_local_fields(record))).changed


def test_what_is_damaged_is_found_and_only_that(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        for number in range(50):
            await put_object(store, f"small-{number}", b"%d" % number * 1000)
        await put_object(store, "large", b"l" * LARGE, size=LARGE)
        await put_object(store, "empty")
        assert await _scrub(store) == 0
        state = store.scrub.state
        assert state.bytes >= LARGE + 50_000
        assert (state.running, state.ended > 0) == (False, True)
        _flip(store, _get(store, "small-7").extents[0], 500)
        _flip(store, _get(store, "large").extents[0], LARGE - 1)
        assert await _scrub(store) == 2
        assert [name for name, *_ in store.quarantine.entries()] == [b"b\0large", b"b\0small-7"]
        for key in ("small-7", "large"):
            record = _get(store, key)
            assert record.broken
            with pytest.raises(QuarantinedError):
                store.read_range(record, 0, 10)
            with pytest.raises(QuarantinedError), store.open_spans(record, 0, 10):
                pass
            assert store.try_read_range(record, 0, record.size) is None
            assert store.try_open_span(record, 0, record.size) is None
        assert store.read_range(_get(store, "small-8"), 0, 1000) == b"8" * 1000
        assert await _scrub(store) == 0  # known
        assert store.stats().quarantined == 2

    _on(tmp_path, test)
    report = check_store(_settings(tmp_path))
    assert sorted((each.kind, each.name) for each in report.problems) == [
        ("quarantined", "b/large"),
        ("quarantined", "b/small-7"),
    ]


def test_a_restored_version_is_the_same_and_a_rebuild_believes_it(tmp_path: Path) -> None:
    data = {"small": b"s" * 5000, "large": b"l" * LARGE, "tagged": b"t" * 4000}

    async def test(store: Store) -> None:
        for key, body in data.items():
            await put_object(store, key, body, size=len(body), tags={"a": "1"})
        found = {key: _get(store, key) for key in data}
        tagged = await store.amend("b", "tagged", None, tags={"a": "2"})
        for record in found.values():
            _flip(store, record.extents[0])
        assert await _scrub(store) == 3
        tagged = await store.amend("b", "tagged", None, tags={"a": "3"})  # its facts are sound
        assert tagged.broken
        for key, record in found.items():
            await _restore(store, key, record, data[key])
        for key, body in data.items():
            record = _get(store, key)
            assert not record.broken
            assert record.stamp == found[key].stamp
            assert store.read_range(record, 0, len(body)) == body
        assert _get(store, "tagged").tags == {"a": "3"}
        assert store.quarantine.entries() == ()
        assert await _scrub(store) == 0

    _on(tmp_path, test)
    assert check_store(_settings(tmp_path)).clean
    rebuild_index(_settings(tmp_path))
    assert check_store(_settings(tmp_path)).clean

    async def again(store: Store) -> None:
        for key, body in data.items():
            assert store.read_range(_get(store, key), 0, len(body)) == body
        assert _get(store, "tagged").tags == {"a": "3"}

    _on(tmp_path, again)


def test_multipart_objects_copies_versions_and_parts(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        bodies = [b"1" * LARGE, b"2" * 1000]
        upload = await store.create_upload(Upload("", "b", "whole"))
        for number, body in enumerate(bodies, 1):
            await put_part(store, upload, number, body)
        whole = await store.complete_upload(upload, [1, 2], Meta("whole"))
        copy = await store.link("b", "copy", whole, Meta("copy"))
        old = await put_object(store, "v", b"old" * 100, versioning="Enabled")
        await put_object(store, "v", b"new" * 100, versioning="Enabled")
        upload = await store.create_upload(Upload("", "b", "going"))
        await put_part(store, upload, 1, b"p" * 2000)
        part = store.list_parts(upload).parts[0]
        assert await _scrub(store) == 0
        _flip(store, whole.extents[0])  # a file of its own, which the copy shares
        _flip(store, old.extents[0])
        _flip(store, part.extents[0])
        assert whole.manifest is not None
        _flip(store, whole.manifest, 20)
        assert await _scrub(store) == 4  # the manifest is written again
        assert sorted(name for name, *_ in store.quarantine.entries()) == [b"b\0copy", b"b\0v", b"b\0whole"]
        assert store.get_version("b", "v", old.version or "") is not None
        assert store.read_range(_get(store, "v"), 0, 300) == b"new" * 100
        assert store.list_parts(upload).parts == ()
        with pytest.raises(InvalidPartError):
            await store.complete_upload(upload, [1], Meta("going"))
        with pytest.raises(QuarantinedError):
            await store.link("b", "again", _get(store, "whole"), Meta("again"))
        await _restore(store, "whole", whole, b"".join(bodies))
        restored = _get(store, "whole")
        assert store.read_range(restored, LARGE, 1000) == bodies[1]
        await put_object(store, "copy", b"written anew")
        assert await store.quarantine.prune() == 1
        assert [name for name, *_ in store.quarantine.entries()] == [b"b\0v"]
        assert copy.extents[0] == whole.extents[0]

    _on(tmp_path, test)
    kinds = [each.kind for each in check_store(_settings(tmp_path)).problems]
    assert kinds == ["quarantined"]


def test_a_lost_file_and_a_damaged_header(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put_object(store, "large", b"l" * LARGE, size=LARGE)
        for number in range(3):
            await put_object(store, f"k{number}", b"%d" % number * 3000)
        record = _get(store, "large")
        os.unlink(store._disks.path(record.extents[0].disk, record.extents[0].file))
        extent = _get(store, "k1").extents[0]
        _flip(store, extent, -1024)  # in its header: nobody says what lies here
        _flip(store, extent)
        assert await _scrub(store) == 2
        assert [name for name, *_ in store.quarantine.entries()] == [b"b\0k1", b"b\0large"]
        assert store.read_range(_get(store, "k2"), 0, 3000) == b"2" * 3000

    _on(tmp_path, test)


def _damage_of(disk: str) -> float:
    found = metric_registry.counter_samples({"meshd_store_damage_total"})
    return next(count for _, labels, count in found if labels["disk"] == disk)


def test_damage_that_a_reader_finds_goes_the_same_way(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put_object(store, "k", b"k" * 3000)
        await put_object(store, "other", b"o" * 3000)
        _flip(store, _get(store, "k").extents[0])
        with pytest.raises(CorruptExtentError):
            store.read_range(_get(store, "k"), 0, 3000)
        [disk] = map(str, store._disks.roots.values())
        before = _damage_of(disk)
        assert await store.quarantine.process_damage_reports() == 1
        assert _damage_of(disk) == before + 1
        assert _get(store, "k").broken
        assert not _get(store, "other").broken
        page = store.inventory.read_page(lambda name: True)
        assert [held.versions[0].broken for held in page.names] == [True, False]
        assert isinstance(page.names[0].versions[0], HeldVersion)
        assert await store.quarantine.process_damage_reports() == 0

    _on(tmp_path, test)


def test_damage_of_disks_outlasts_a_restart_and_the_next_pass(tmp_path: Path) -> None:
    settings, damage = _settings(tmp_path), {"/data": DiskDamage(5.0, (7, 9))}

    async def run() -> None:
        store = Store.open(settings, writer="s", clock=ManualClock())
        await store.scrub.save_damage(damage)
        store.close()
        store = Store.open(settings, writer="s", clock=ManualClock())
        assert store.scrub.state.damage == damage
        await store.scrub.start_pass(1)
        assert store.scrub.state.damage == damage
        store.close()

    asyncio.run(run())


def test_a_pass_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = _settings(tmp_path)

    async def run() -> None:
        clock = ManualClock()
        store = Store.open(settings, writer="s", clock=clock)
        for number in range(6):
            await put_object(store, f"k{number}", b"%d" % number * LARGE, size=LARGE)
        await store.scrub.start_pass(7)
        for _ in range(3):
            await store.scrub.scrub_next_file(_rest)
        clock.advance(10)
        await store.scrub.scrub_next_file(_rest)
        before = store.scrub.state
        store.close()
        store = Store.open(settings, writer="s", clock=clock)
        assert store.scrub.state == before
        while await store.scrub.scrub_next_file(_rest):
            pass
        assert (store.scrub.state.bytes, store.scrub.state.asked) == (6 * LARGE, 7)
        store.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["tar", "tgz"])
def test_a_damaged_index_of_an_archive_is_made_again(tmp_path: Path, kind: str) -> None:
    """At once by who reads it; what nobody reads leaves the quarantine. So does a decompressed copy."""
    files = {f"{number}.txt": b"%d" % number * 500 for number in range(40)}

    async def test(store: Store) -> None:
        key = f"all.{kind}"
        record = await put_object(store, key, archive_of(kind, files))

        def made(prefix: str) -> Record:
            (found,) = [each for name, each in store.list(RESERVED_BUCKET).entries if name.startswith(prefix)]
            return found

        async def read() -> bytes:
            archives = LocalArchives(store, lambda used: None)  # which has nothing in memory
            index = await archives.get_index("b", key, record)
            plain = await archives.decompressed("b", key, record)
            place = index.find("7.txt")
            assert place is not None
            assert store.read_range(plain, *place) == files["7.txt"]
            return index.to_bytes()

        first = await read()
        _flip(store, made("archives/").extents[0], 9)
        assert await read() == first  # nothing is in quarantine yet
        assert await _scrub(store) == 0  # it was written again
        derived = ("archives/", "views/") if kind == "tgz" else ("archives/",)
        for prefix in derived:
            _flip(store, made(prefix).extents[0], 9)
        assert await _scrub(store) == len(derived)
        await read()
        _flip(store, record.extents[0], 9)
        for prefix in derived:
            _flip(store, made(prefix).extents[0], 9)
        assert await _scrub(store) == 1 + len(derived)
        assert await DamagedDocuments(store).remove() == len(derived)
        assert [name for name, *_ in store.quarantine.entries()] == [b"b\0" + key.encode()]
        assert await DamagedDocuments(store).remove() == 0

    _on(tmp_path, test)
