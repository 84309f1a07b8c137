"""Several processes on one store: conditions are exact, the last commit wins, a death harms nobody else."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from meshd.store.engine.member_header import ALIGNED
from meshd.store.store import Store
from meshd.store.tools.fsck import check_store
from meshd.store.tools.index_rebuild import rebuild_index
from meshd.util import failpoints
from meshwire.http_values.conditional_requests import Conditions
from tests.support.manual_clock import ManualClock
from tests.support.store_calls import LARGE, put_object
from tests.support.store_neighbour import Neighbour, increment, settings_at

if TYPE_CHECKING:
    from pathlib import Path


def opened(place: Path, writer: str) -> closing[Store]:
    return closing(Store.open(settings_at(place), writer=writer, clock=ManualClock()))


def value(store: Store, key: str) -> bytes:
    found = store.get("b", key)
    assert found is not None
    return store.read_range(found, 0, found.size)


def test_compare_and_swap_is_exact_across_processes(tmp_path: Path) -> None:
    with opened(tmp_path, "w0") as store, Neighbour(tmp_path, "w1") as one, Neighbour(tmp_path, "w2") as two:
        for neighbour in (one, two):
            neighbour.tell(do="increment", key="n", times=40)
        lost = asyncio.run(increment(store, "n", 40)) + one.answer() + two.answer()
        assert int(value(store, "n")) == 120
        assert lost > 0
    assert check_store(settings_at(tmp_path)).clean


@pytest.mark.parametrize("conditions", [None, Conditions(if_none_match=("*",))])
def test_a_write_is_of_the_time_it_was_asked_for(tmp_path: Path, conditions: Conditions | None) -> None:
    """The process may stand still before its thread comes to it, and other nodes decide meanwhile."""
    clock = ManualClock()
    with closing(Store.open(settings_at(tmp_path), writer="w0", clock=clock)) as store:

        async def run() -> None:
            began, goes_on = threading.Event(), threading.Event()

            def stand_still() -> None:
                failpoints.configure("")
                began.set()
                goes_on.wait(60)

            failpoints.set_callback("store.data.after_sync", stand_still)
            first = asyncio.ensure_future(put_object(store, "first", b"1"))
            assert await asyncio.to_thread(began.wait, 60)
            then = clock.stamp()
            second = asyncio.ensure_future(put_object(store, "second", b"2", conditions=conditions))
            await asyncio.sleep(0.1)  # until it is queued
            clock.advance(60)
            goes_on.set()
            for write in (await first, await second):
                assert write.stamp < then + 1_000_000_000
            assert (await put_object(store, "third", b"3")).stamp > then + 59_000_000_000

        asyncio.run(run())


def test_an_overtaken_write_still_holds_after_a_rebuild(tmp_path: Path) -> None:
    """The neighbour's clock runs ahead; it commits while our bytes are already placed with a lower stamp."""
    written = "store.data.after_sync"
    for size, point in ((10, written), (ALIGNED, written), (LARGE, "store.own.after_rename")):
        with opened(tmp_path, "w0") as store, Neighbour(tmp_path, "w1", clock_ahead=1000) as neighbour:
            theirs: list[int] = []

            def overtake(neighbour: Neighbour = neighbour, theirs: list[int] = theirs) -> None:
                failpoints.configure("")
                neighbour.tell(do="put", key="k", data="theirs")
                theirs.append(neighbour.answer())

            failpoints.set_callback(point, overtake)
            ours = asyncio.run(put_object(store, "k", b"o" * size))
            assert ours.stamp > theirs[0]
            assert value(store, "k") == b"o" * size
        assert rebuild_index(settings_at(tmp_path)).problems == []
        with opened(tmp_path, "w0") as store:
            assert value(store, "k") == b"o" * size
        assert check_store(settings_at(tmp_path)).clean


def test_a_write_that_missed_a_deletion_still_holds_after_a_rebuild(tmp_path: Path) -> None:
    """The neighbour's clock runs ahead; it puts and deletes the key while our bytes are already placed."""
    written = "store.data.after_sync"
    for size, point in ((10, written), (ALIGNED, written), (LARGE, "store.own.after_rename")):
        for others in (0, 5000):  # with many more deletions the store no longer knows each of them
            key = f"k{size}-{others}"
            with opened(tmp_path, "w0") as store, Neighbour(tmp_path, "w1", clock_ahead=1000) as neighbour:

                def miss(neighbour: Neighbour = neighbour, key: str = key, others: int = others) -> None:
                    failpoints.configure("")
                    neighbour.tell(do="put and delete", key=key)
                    assert neighbour.answer()
                    neighbour.tell(do="delete many", count=others)
                    assert neighbour.answer() == others

                failpoints.set_callback(point, miss)
                asyncio.run(put_object(store, key, b"o" * size))
                assert value(store, key) == b"o" * size
            assert rebuild_index(settings_at(tmp_path)).problems == []
            with opened(tmp_path, "w0") as store:
                assert value(store, key) == b"o" * size
            assert check_store(settings_at(tmp_path)).clean


def test_a_put_before_a_deletion_of_nothing_still_holds_after_a_rebuild(tmp_path: Path) -> None:
    """Two deletions of a key are placed together, ours between them; the second finds nothing to delete."""
    clock = ManualClock()
    with (
        closing(Store.open(settings_at(tmp_path), writer="w0", clock=clock)) as store,
        Neighbour(tmp_path, "w1", clock_ahead=1000) as neighbour,
    ):
        asyncio.run(put_object(store, "k", b"before"))
        clock.advance(1001)

        def overtake() -> None:
            failpoints.configure("")
            neighbour.tell(do="delete twice", key="k", seconds=2)
            assert neighbour.answer() == [True, False]

        failpoints.set_callback("store.data.after_sync", overtake)
        asyncio.run(put_object(store, "k", b"ours"))
        assert value(store, "k") == b"ours"
    assert rebuild_index(settings_at(tmp_path)).problems == []
    with opened(tmp_path, "w0") as store:
        assert value(store, "k") == b"ours"


def test_a_put_behind_an_overtaken_deletion_still_holds_after_a_rebuild(tmp_path: Path) -> None:
    """One group deletes and puts a key that a neighbour, its clock ahead, has just written."""
    point, held, gathered = "store.data.after_sync", threading.Event(), threading.Event()
    with opened(tmp_path, "w0") as store, Neighbour(tmp_path, "w1", clock_ahead=1000) as neighbour:
        asyncio.run(put_object(store, "k", b"before"))

        def hold() -> None:
            failpoints.set_callback(point, overtake)
            held.set()
            gathered.wait(30)

        def overtake() -> None:
            failpoints.configure("")
            neighbour.tell(do="put", key="k", data="theirs")
            neighbour.answer()

        async def doing() -> None:
            failpoints.set_callback(point, hold)
            first = asyncio.create_task(put_object(store, "first", b""))
            await asyncio.to_thread(held.wait, 30)
            both = asyncio.gather(store.delete("b", "k"), put_object(store, "k", b"ours"))
            for _ in range(20):  # until both are queued
                await asyncio.sleep(0)
            gathered.set()
            await asyncio.gather(first, both)

        asyncio.run(doing())
        assert value(store, "k") == b"ours"
    assert rebuild_index(settings_at(tmp_path)).problems == []
    with opened(tmp_path, "w0") as store:
        assert value(store, "k") == b"ours"


def test_a_neighbour_that_dies_harms_nobody(tmp_path: Path) -> None:
    with opened(tmp_path, "w0") as store:
        for _ in range(3):
            with Neighbour(tmp_path, "w1") as neighbour:
                neighbour.tell(do="increment", key="n", times=100_000)
                asyncio.run(increment(store, "m", 30))
                neighbour.kill()
            before = int(value(store, "n"))
            asyncio.run(increment(store, "n", 1))
            # A writer that dies between its commit and LMDB's announcement of it leaves a commit, not
            # acknowledged to anybody, that readers see only once the next writer has repaired the table.
            assert int(value(store, "n")) - before in (1, 2)
        assert int(value(store, "m")) == 90
    Store.recover(settings_at(tmp_path))
    report = check_store(settings_at(tmp_path))
    assert report.clean, report.problems


def test_compaction_goes_on_beside_writers_and_readers(tmp_path: Path) -> None:
    async def fill(store: Store) -> None:
        await asyncio.gather(
            *[put_object(store, f"k{number}", b"%d" % number * 3000) for number in range(60)]
        )

    with opened(tmp_path, "w0") as store, Neighbour(tmp_path, "s") as coordinator:
        asyncio.run(fill(store))
        asyncio.run(put_object(store, "seals", b"the full segment"))
        held = {key: record for key, record in store.list("b").entries}
        coordinator.tell(do="compact")
        asyncio.run(increment(store, "n", 50))
        assert coordinator.answer()
        for key, record in held.items():
            assert store.read_range(record, 0, record.size) == value(store, key)
    report = check_store(settings_at(tmp_path))
    assert report.clean, report.problems
