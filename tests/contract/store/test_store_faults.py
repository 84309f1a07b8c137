"""Full disks, failing disks, cancelled callers, damaged bytes: nothing half is visible."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import threading
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from meshd.config import StoreSettings
from meshd.store.disks.layout import has_free_space
from meshd.store.engine.data_files import LargeObjectFile
from meshd.store.engine.packs import PACKED
from meshd.store.errors import (
    CorruptExtentError,
    DiskFailedError,
    DiskFullError,
    ExtentGoneError,
    MetadataTooLargeError,
    NoSuchUploadError,
    StoreClosedError,
)
from meshd.store.records import Meta, Upload
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util import failpoints
from meshd.util.clock import SystemClock
from tests.support.bounded_wait import WAIT_TIMEOUT
from tests.support.store_calls import LARGE, error_of, put_object, put_part

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings.at(tmp_path, small_object_bytes=64 << 10, index_map_bytes=1 << 28)


@pytest.fixture
def damages() -> None:
    """A test that asks for this leaves a damaged store behind."""


@pytest.fixture(autouse=True)
def _whole_afterwards(settings: StoreSettings, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "damages" not in request.fixturenames and (settings.index_dir / "data.mdb").exists():
        report = check_store(settings)
        assert report.clean, report.problems
        assert report.leftovers == []


def opened(settings: StoreSettings) -> closing[Store]:
    return closing(Store.open(settings, writer="w0", clock=SystemClock()))


def run(settings: StoreSettings, doing: Callable[[Store], Coroutine[Any, Any, None]]) -> None:
    with opened(settings) as store:
        asyncio.run(doing(store))


@contextmanager
def failing(text: str) -> Iterator[None]:
    failpoints.configure(text)
    try:
        yield
    finally:
        failpoints.configure("")


@pytest.mark.parametrize(
    ("point", "size"),
    [
        ("store.data.before_write", 10),
        ("store.data.before_sync", 10),
        ("store.data.after_sync", 10),
        ("store.index.before_commit", 10),
        ("store.own.before_write", LARGE),
        ("store.own.before_sync", LARGE),
        ("store.own.before_rename", LARGE),
        ("store.own.after_rename", LARGE),
        ("store.index.before_commit", LARGE),
    ],
)
@pytest.mark.parametrize(
    ("number", "error"), [(28, DiskFullError), (122, DiskFullError), (5, DiskFailedError)]
)
def test_a_failing_disk_fails_the_write_and_nothing_else(
    settings: StoreSettings, point: str, size: int, number: int, error: type[Exception]
) -> None:
    async def doing(store: Store) -> None:
        await put_object(store, "k", b"before")
        with failing(f"{point}=error({number})"):
            await error_of(error, put_object(store, "k", bytes(size)))
            await error_of(error, put_object(store, "fresh", bytes(size), size=size))
        found = store.get("b", "k")
        assert found is not None
        assert store.read_range(found, 0, 10) == b"before"
        assert store.get("b", "fresh") is None
        await put_object(store, "k", b"after" * 50_000)
        await put_object(store, "l", b"after")

    run(settings, doing)
    run(settings, lambda store: put_object(store, "again", b"x"))  # type: ignore[arg-type, return-value]  # its record is not needed
    before = _listing(settings)
    assert rebuild_index(settings).problems == []
    assert _listing(settings) == before


def _listing(settings: StoreSettings) -> Any:
    with opened(settings) as store:
        return store.list("b")


def test_one_of_a_group_that_cannot_be_kept_does_not_harm_the_others(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        gone = await store.create_upload(Upload("", "b", "u"))
        await store.abort_upload(gone)
        results = await asyncio.gather(
            put_object(store, "a", b"1"),
            put_object(store, "b", b"2", metadata={"x": "y" * 20_000}),
            put_object(store, "c", bytes(LARGE), metadata={"x": "y" * 20_000}),
            put_part(store, gone, 1, b"late"),
            put_part(store, gone, 2, bytes(LARGE)),
            put_object(store, "d", bytes(LARGE)),
            return_exceptions=True,
        )
        kinds = [type(result) for result in results if isinstance(result, Exception)]
        assert kinds == [MetadataTooLargeError] * 2 + [NoSuchUploadError] * 2
        assert [key for key, _ in store.list("b").entries] == ["a", "d"]

    run(settings, doing)


def test_an_object_that_does_not_fit_is_refused_at_once(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        writer = store.writer("b", "k", size=1 << 60)
        await error_of(DiskFullError, writer.write(bytes(2 << 20)))
        await writer.abort()

    run(settings, doing)
    assert has_free_space(str(settings.data_dir), 0)
    assert not has_free_space(str(settings.data_dir), 1 << 60)


def test_a_full_index_is_a_full_disk(settings: StoreSettings) -> None:
    small = StoreSettings.at(settings.data_dir, index_map_bytes=6 << 20)

    async def fill(store: Store) -> None:
        for number in range(5000):
            names = [f"{number}-{i}" * 40 for i in range(16)]
            await asyncio.gather(*[put_object(store, name, metadata={"m": "x" * 900}) for name in names])

    async def doing(store: Store) -> None:
        assert "index-map" in str(await error_of(DiskFullError, fill(store)))
        count = store.stats().objects
        assert count > 100
        assert len(store.list("b", limit=5000).entries) == count

    run(small, doing)
    run(settings, lambda store: put_object(store, "fits", b"now"))  # type: ignore[arg-type, return-value]  # its record is not needed


def test_cancelled_writers_leave_nothing(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        async def slow(key: str) -> None:
            writer = store.writer("b", key, size=None)
            for _ in range(1000):
                await writer.write(os.urandom(50_000))
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(slow(f"k{number}")) for number in range(4)]
        for _ in range(200):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del tasks
        gc.collect()
        assert store.is_empty("b")

    run(settings, doing)
    gc.collect()


def test_a_draft_that_is_created_after_its_event_loop_has_ended_is_removed(
    settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, reserve, drafts = (
        threading.Event(),
        threading.Event(),
        LargeObjectFile.reserve,
        list[Path](),
    )

    def pause(draft: LargeObjectFile, size: int) -> None:
        begun.set()
        assert go_on.wait(WAIT_TIMEOUT)
        reserve(draft, size)
        drafts.append(Path(draft._draft))
        assert drafts[0].exists()

    async def doing(store: Store) -> None:
        writing = asyncio.create_task(store.writer("b", "k", size=None).write(bytes(2 << 20)))
        await asyncio.to_thread(begun.wait, WAIT_TIMEOUT)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

    monkeypatch.setattr(LargeObjectFile, "reserve", pause)
    with opened(settings) as store:
        asyncio.run(doing(store))
        go_on.set()
    assert [draft.exists() for draft in drafts] == [False]


@pytest.mark.parametrize("how", ["dropped", "aborted twice"])
def test_a_draft_is_not_closed_under_the_thread_that_writes_it(settings: StoreSettings, how: str) -> None:
    """Its descriptor's number would be that of the next file that anybody opens, and the bytes go there."""
    writes, go_on, drafts = threading.Event(), threading.Event(), list[Path]()

    def pause() -> None:
        writes.set()
        assert go_on.wait(WAIT_TIMEOUT)

    async def doing(store: Store) -> None:
        writer = store.writer("b", "k", size=None)
        await writer.write(os.urandom(2 << 20))
        await asyncio.to_thread(writes.wait, WAIT_TIMEOUT)
        own = writer._large_file
        assert own is not None
        if how == "dropped":
            del writer
            gc.collect()
        else:
            ending = asyncio.create_task(writer.abort())
            await asyncio.sleep(0)
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
        os.fstat(own._fd)
        go_on.set()
        async with asyncio.timeout(WAIT_TIMEOUT):
            while own._fd >= 0:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0.01)
        drafts.append(Path(own._draft))

    failpoints.set_callback("store.own.before_write", pause)
    try:
        run(settings, doing)
    finally:
        go_on.set()
        failpoints.configure("")
    assert [draft.exists() for draft in drafts] == [False]


def test_a_cancelled_move_ends_with_the_commit_in_progress(settings: StoreSettings) -> None:
    """What waits for its turn, compaction, finds nothing half done."""
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        begun.set()
        assert go_on.wait(WAIT_TIMEOUT)

    async def doing(store: Store) -> None:
        for key in ("k1", "k2"):
            await put_object(store, key, b"data")
        placed = store.rewriter.page("b", "", "", 10)
        failpoints.set_callback("store.data.before_sync", pause)
        moving = asyncio.ensure_future(store.rewriter.move("b", placed))
        assert await asyncio.to_thread(begun.wait, WAIT_TIMEOUT)
        moving.cancel()
        await asyncio.wait([moving], timeout=0.1)
        assert (moving.done(), store.compactor.turn.locked()) == (False, True)
        go_on.set()
        async with asyncio.timeout(WAIT_TIMEOUT):
            await asyncio.wait([moving])
        assert (moving.cancelled(), store.compactor.turn.locked()) == (True, False)
        moved = store.rewriter.page("b", "", "", 10)
        assert [each.key for each in moved] == ["k1", "k2"]
        assert not {each.extent for each in moved} & {each.extent for each in placed}

    try:
        run(settings, doing)
    finally:
        go_on.set()
        failpoints.configure("")


def test_a_file_that_is_not_closed_well_does_not_end_all_writing(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        await put_object(store, "k", bytes(LARGE))
        async with asyncio.timeout(WAIT_TIMEOUT):
            await put_object(store, "k2", bytes(LARGE))
        assert len(store.list("b").entries) == 2

    with failing("store.own.after_close=error"):
        run(settings, doing)


def test_a_cancelled_commit_happens_or_not_but_never_half(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        for turns in range(12):
            for size in (10, LARGE):
                task = asyncio.create_task(put_object(store, "k", bytes([turns]) * size))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                found = store.get("b", "k")
                if found is not None:
                    data = store.read_range(found, 0, LARGE)
                    assert len(data) == found.size
                    assert len(set(data)) == 1

    run(settings, doing)


def test_a_closed_store_takes_nothing(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        writer = store.writer("b", "k", size=None)
        await writer.write(b"x")
        store.close()
        await error_of(StoreClosedError, writer.commit(Meta("e")))

    run(settings, doing)


@pytest.mark.usefixtures("damages")
def test_damaged_bytes_are_not_served(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        for key, size in (("small", 1000), ("large", LARGE)):
            record = await put_object(store, key, bytes(size))
            _scribble(store.locate(record)[0].path, record.extents[0].offset + 500)
            with pytest.raises(CorruptExtentError, match="meshd fsck"):
                store.read_range(record, 0, size)
        await error_of(
            CorruptExtentError, store.link("b", "copy", store.get("b", "small") or record, Meta("e"))
        )

    run(settings, doing)
    problems = check_store(settings).problems
    assert sorted((problem.kind, problem.name) for problem in problems) == [
        ("damaged", "b/large"),
        ("damaged", "b/small"),
    ]


@pytest.mark.usefixtures("damages")
def test_a_removed_file_is_told_apart_from_damage(settings: StoreSettings) -> None:
    async def doing(store: Store) -> None:
        record = await put_object(store, "k", bytes(LARGE))
        os.unlink(store.locate(record)[0].path)
        with pytest.raises(ExtentGoneError, match="look the object up again"):
            store.read_range(record, 0, 10)

    run(settings, doing)
    assert [problem.kind for problem in check_store(settings).problems] == ["missing"]


@pytest.mark.usefixtures("damages")
@pytest.mark.parametrize(("size", "back"), [(1, 40), (PACKED + 1, 950)], ids=["packed", "alone"])
def test_a_damaged_header_costs_a_rebuild_that_member_alone(
    settings: StoreSettings, size: int, back: int
) -> None:
    """Also when the data of a member are themselves a data file of this store."""

    async def doing(store: Store) -> None:
        await put_object(store, "inner", bytes(size))
        await put_object(store, "hit", _file_of(store, "inner"))
        await put_object(store, "hit2", b"y" * size)
        await put_object(store, "behind", b"safe" * size)
        for key in ("hit", "hit2"):
            record = store.get("b", key) or _none()
            _scribble(store.locate(record)[0].path, record.extents[0].offset - back)
        await store.delete("b", "inner")

    run(settings, doing)
    assert {problem.kind for problem in check_store(settings).problems} == {"header"}
    assert len(rebuild_index(settings).problems) >= 2
    with opened(settings) as store:
        assert [key for key, _ in store.list("b").entries] == ["behind"]


def _file_of(store: Store, key: str) -> bytes:
    return Path(store.locate(store.get("b", key) or _none())[0].path).read_bytes()


def _none() -> Any:
    raise AssertionError("there must be a record")


def _scribble(path: str, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(4)
        file.seek(offset)
        file.write(bytes(byte ^ 0x55 for byte in old))


def test_gnu_tar_lists_every_data_file(settings: StoreSettings) -> None:
    keys = ["plain.jpg", "../../etc/passwd", "/abs", "folder/", "ü/日本", "x" * 1000, "-rf", "new\nline"]

    async def doing(store: Store) -> None:
        for key in keys:
            await put_object(store, key, b"data")
            await put_object(store, f"{key}-large", bytes(LARGE))
        await store.delete("b", keys[0])

    run(settings, doing)
    names: list[str] = []
    for path in sorted(settings.data_dir.glob("extents/*/*.tar")):
        out = subprocess.run(
            ["tar", "--warning=no-unknown-keyword", "-tf", str(path)],
            capture_output=True,
            check=True,
            text=True,
            timeout=100,
        )
        assert out.stderr == ""
        names += out.stdout.splitlines()
    assert len(names) == 2 * len(keys) + 1
    assert all(name.startswith("b/") and "/../" not in name and not name.endswith("/") for name in names)
