"""Full and failing disks under every kind of write: the right error, nothing changed, then it works again."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import tracemalloc
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from meshd.config import StoreSettings
from meshd.store.engine.file_scan import DataFileScan
from meshd.store.errors import CorruptExtentError, DiskFailedError, DiskFullError
from meshd.store.index.index import Index
from meshd.store.records import NULL, Meta, Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.telemetry import metric_registry
from meshd.util import failpoints
from meshd.util.clock import SystemClock
from meshwire.formats.tar import END
from tests.support.store_calls import LARGE, error_of, put_object, put_part
from tests.support.version_suite import OFF, ON, version_bodies

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from meshd.store.records import Record


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings.at(
        tmp_path,
        small_object_bytes=64 << 10,
        segment_bytes=100_000,
        index_map_bytes=1 << 28,
        space_check_seconds=0,
    )


def run(settings: StoreSettings, doing: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
    with closing(Store.open(settings, writer="w0", clock=SystemClock())) as store:
        asyncio.run(doing(store))


@contextmanager
def failing(text: str) -> Iterator[None]:
    failpoints.configure(text)
    try:
        yield
    finally:
        failpoints.configure("")


def counted(name: str, kind: str = "") -> float:
    """A counter of the store, as Prometheus sees it."""
    label = f'{{kind="{kind}"}}' if kind else ""
    found = re.search(
        rf"^meshd_store_{name}_total{re.escape(label)} (\S+)$",
        metric_registry.render_metrics().decode(),
        re.M,
    )
    return float(found.group(1)) if found else 0.0


@dataclass
class Stock:
    """What is in the store before a disk fails."""

    old: Record
    upload: Upload
    other: Upload


async def stock(store: Store) -> Stock:
    await put_object(store, "k", b"null")
    old = await put_object(store, "k", b"old" * 100, versioning=ON)
    await put_object(store, "k", os.urandom(LARGE), versioning=ON)
    await put_object(store, "plain", b"plain")
    upload, other = (
        await store.create_upload(Upload("", "b", "u")),
        await store.create_upload(Upload("", "b", "u")),
    )
    await put_part(store, upload, 1, os.urandom(LARGE))
    await put_part(store, upload, 2, b"tail")
    return Stock(old, upload, other)


def facts(settings: StoreSettings) -> Any:
    with closing(Index.open(settings)) as index, index.read_transaction() as txn:
        return [*index.all_records(txn), *index.uploads.all_uploads(txn), *index.uploads.all_parts(txn)]


WRITES: dict[str, Any] = {
    "put": lambda store, _: put_object(store, "k", b"x", versioning=ON),
    "put large": lambda store, _: put_object(store, "k", bytes(LARGE), versioning=ON),
    "put null": lambda store, _: put_object(store, "k", b"x", versioning=OFF),
    "part": lambda store, has: put_part(store, has.upload, 2, b"again"),
    "part large": lambda store, has: put_part(store, has.upload, 3, bytes(LARGE)),
    "complete": lambda store, has: store.complete_upload(has.upload, [1, 2], Meta("e-2"), versioning=ON),
    "abort": lambda store, has: store.abort_upload(has.other),
    "create upload": lambda store, _: store.create_upload(Upload("", "b", "new")),
    "link": lambda store, has: store.link("b", "plain", has.old, Meta("e")),
    "amend": lambda store, has: store.amend("b", "k", has.old.version, tags={"t": "1"}),
    "mark": lambda store, _: store.delete("b", "k", versioning=OFF),
    "delete": lambda store, _: store.delete("b", "plain"),
    "delete version": lambda store, has: store.delete_version("b", "k", has.old.version),
    "delete null": lambda store, _: store.delete_version("b", "k", NULL),
}
DATA = ("before_write", "before_sync", "after_sync")
GROW = ["put", "put large", "put null", "part", "part large", "create upload", "link", "amend"]


@pytest.mark.parametrize("name", WRITES)
def test_a_disk_that_fails_changes_nothing(settings: StoreSettings, name: str) -> None:
    large = name.endswith("large")
    places = ("before_write", "before_sync", "before_rename", "after_rename") if large else DATA
    points = [f"store.{'own' if large else 'data'}.{place}" for place in places]

    async def doing(store: Store) -> None:
        has = await stock(store)
        for point in (*points, "store.index.before_commit"):
            for number, error in ((28, DiskFullError), (122, DiskFullError), (5, DiskFailedError)):
                kind = "full" if error is DiskFullError else "failed"
                told = counted("disk_errors", kind)
                before = _visible(store)
                with failing(f"{point}=error({number})"):
                    await error_of(error, WRITES[name](store, has))
                    assert _visible(store) == before  # and read while the disk still fails
                assert counted("disk_errors", kind) > told
        await put_object(store, "another", b"x")
        await WRITES[name](store, has)

    run(settings, doing)
    before = facts(settings)
    assert rebuild_index(settings).problems == []
    assert facts(settings) == before
    Store.recover(settings)
    report = check_store(settings)
    assert (report.problems, report.leftovers) == ([], [])


def _visible(store: Store) -> Any:
    """Everything that can be read, byte for byte."""
    versions = [
        (key, record.version, record.tags, store.read_range(record, 0, record.size))
        for key, record in store.list_versions("b").entries
    ]
    uploads = store.list_uploads("b").uploads
    return versions, uploads, [store.list_parts(upload) for upload in uploads]


def test_a_nearly_full_disk_takes_what_frees_room(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def doing(store: Store) -> None:
        has = await stock(store)
        before = _visible(store)
        monkeypatch.setattr("meshd.store.disks.layout.free_above_reserve", lambda path, reserves=1: 0)
        for name in GROW:
            await error_of(DiskFullError, WRITES[name](store, has))
        assert _visible(store) == before
        for name in WRITES:
            if name not in GROW:
                await WRITES[name](store, has)
        monkeypatch.undo()
        assert version_bodies(store, "k") == [before[0][0][3]]
        await put_object(store, "k", b"room again")

    run(settings, doing)
    assert check_store(settings).clean


def test_a_read_error_is_told_and_the_rest_is_read(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        record, other = await put_object(store, "k", b"data"), await put_object(store, "l", b"more")
        with failing("store.read.before=error(5)"):
            with pytest.raises(DiskFailedError, match="meshd fsck"):
                store.read_range(record, 0, 4)
            await error_of(DiskFailedError, store.link("b", "copy", record, Meta("e")))
        with failing("store.read.before=error(5):after 1"):
            assert store.read_range(other, 0, 4) == b"more"
        assert store.read_range(record, 0, 4) == b"data"

    run(settings, doing)
    assert check_store(settings).clean


def test_a_segment_that_cannot_be_read_does_not_stop_compaction(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        for number in range(20):
            await put_object(store, f"k{number}", os.urandom(20_000))
        files = store.compactor.candidates(0.0)
        assert len(files) > 2
        before = _visible(store)
        with failing("store.survey.before_read=error(5)"):
            await error_of(DiskFailedError, store.compactor.compact(files[0]))
        with failing("store.data.before_write=error(28)"):
            await error_of(DiskFullError, store.compactor.compact(files[0]))
        assert _visible(store) == before
        for file in files:
            assert await store.compactor.compact(file)
        assert _visible(store) == before

    run(settings, doing)
    Store.recover(settings)
    assert check_store(settings).clean


def test_compaction_wants_room_first(settings: StoreSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def doing(store: Store) -> None:
        for number in range(8):
            await put_object(store, f"k{number}", bytes(20_000))
        file = store.compactor.candidates(0.0)[0]
        monkeypatch.setattr("meshd.store.disks.layout.free_above_reserve", lambda path, reserves=1: 0)
        await error_of(DiskFullError, store.compactor.compact(file))
        monkeypatch.undo()
        assert await store.compactor.compact(file)

    run(settings, doing)


def test_a_rebuild_keeps_a_file_that_cannot_be_read(settings: StoreSettings) -> None:
    """It goes on with the others, and once the device reads again another rebuild finds everything."""

    async def doing(store: Store) -> None:
        for number in range(20):
            await put_object(store, f"k{number}", os.urandom(20_000))

    run(settings, doing)
    files = sorted(settings.data_dir.glob("extents/*/*.tar"))
    with failing("store.survey.before_read=error(5)"):
        report = rebuild_index(settings)
    assert (report.objects, len(report.problems)) == (0, len(files))
    Store.recover(settings)
    run(settings, lambda store: _compact_all(store))
    Store.recover(settings)
    assert sorted(settings.data_dir.glob("extents/*/*.tar")) == files
    assert rebuild_index(settings).objects == 20
    assert check_store(settings).clean


async def _upload(store: Store, key: str) -> None:
    upload = await store.create_upload(Upload("", "b", key))
    for number in (1, 2):
        await put_part(store, upload, number, os.urandom(LARGE))
    await store.complete_upload(upload, [1, 2], Meta("whole"))


async def _another(store: Store) -> None:
    await put_object(store, "another", bytes(LARGE))


def _no_pread(monkeypatch: pytest.MonkeyPatch, bad: Path) -> None:
    """The device cannot read one file."""
    read = DataFileScan._pread

    def pread(survey: DataFileScan, offset: int, length: int) -> bytes:
        if survey.path == str(bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(survey, offset, length)

    monkeypatch.setattr(DataFileScan, "_pread", pread)


@pytest.mark.parametrize("how", ["unreadable", "damaged", "damaged and sealed", "a part is away"])
def test_a_rebuild_keeps_what_it_cannot_account_for(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """While a manifest cannot be read nothing says what its parts are for; while a part is away it is not
    believed."""
    run(settings, lambda store: _upload(store, "k"))
    files = sorted(settings.data_dir.glob("extents/*/*.tar"))
    large = [path for path in files if path.stat().st_size > LARGE]
    (segment,) = set(files) - set(large)
    whole = segment.read_bytes()
    if how == "unreadable":
        _no_pread(monkeypatch, segment)
    elif how.startswith("damaged"):
        at = whole.rindex(b'"whole"')
        segment.write_bytes(whole[:at] + b"-" + whole[at + 1 :] + (END if "sealed" in how else b""))
    else:
        large[0].rename(settings.data_dir / "away")
    report = rebuild_index(settings)
    assert (report.objects, len(report.problems)) == (0, 1)
    Store.recover(settings)
    run(settings, _another)
    Store.recover(settings)
    monkeypatch.undo()
    if how.startswith("damaged"):
        segment.write_bytes(whole)
    elif how == "a part is away":
        (settings.data_dir / "away").rename(large[0])
    report = rebuild_index(settings)
    assert (report.objects, report.problems) == (2, [])
    Store.recover(settings)
    assert check_store(settings).clean


async def _compact_all(store: Store) -> None:
    for file in store.compactor.candidates(0.0):
        await store.compactor.compact(file)


def test_metrics_count_writes_and_damage(settings: StoreSettings) -> None:
    names = ("commits", "writes", "written_bytes", "corrupt_reads")

    async def doing(store: Store) -> None:
        before = [counted(name) for name in names]
        record = await put_object(store, "k", bytes(1000))
        await put_object(store, "l", bytes(LARGE))
        os.truncate(store.locate(record)[0].path, record.extents[0].offset)
        with pytest.raises(CorruptExtentError):
            store.read_range(record, 0, 1000)
        changes = [counted(name) - was for name, was in zip(names, before, strict=True)]
        commits, writes, written, corrupt = changes
        assert (commits, writes, corrupt) == (2, 2, 1)
        assert LARGE + 1000 < written < LARGE + 5000

    run(settings, doing)
    assert b"meshd_store_sync_seconds_count" in metric_registry.render_metrics()


def test_thousands_of_abandoned_uploads_cost_what_is_asked_for(settings: StoreSettings) -> None:
    """Neither a start nor a page of the listing takes memory for what it does not show."""
    relaxed = StoreSettings.at(settings.data_dir, durability="relaxed", index_map_bytes=1 << 28)

    async def abandon(store: Store) -> None:
        for first in range(0, 5000, 500):
            names = [f"k{number % 50:02}/{number:05}" for number in range(first, first + 500)]
            uploads = await asyncio.gather(
                *[store.create_upload(Upload("", "b", name, metadata={"m": "x" * 200})) for name in names]
            )
            await asyncio.gather(*[put_part(store, upload, 1, b"part") for upload in uploads])

    run(relaxed, abandon)
    tracemalloc.start()
    try:
        Store.recover(relaxed)
        with closing(Store.open(relaxed, writer="w0", clock=SystemClock())) as store:
            assert not store.is_empty("b")
            assert store.stats().uploads == 5000
            assert len(store.list_uploads("b", limit=100).uploads) == 100
            assert len(store.list_uploads("b", delimiter="/").prefixes) == 50
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    found, key, upload_id = 0, "", ""
    with closing(Store.open(relaxed, writer="w0", clock=SystemClock())) as store:
        while True:
            page = store.list_uploads("b", key_marker=key, id_marker=upload_id)
            found += len(page.uploads)
            if not page.truncated:
                break
            key, upload_id = page.next_key, page.next_id
    assert found == 5000
