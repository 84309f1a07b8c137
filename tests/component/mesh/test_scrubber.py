"""The scrubber of a node: when it begins, what it tells, and when it mends."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from meshd.cluster.repair.scrub_scheduler import (
    REQUEST_TOPIC,
    STATUS_TOPIC,
    RateLimiter,
    ScrubRequest,
    ScrubScheduler,
    ScrubStatus,
    publish_disks,
)
from meshd.config import StoreSettings
from meshd.control.control_api import ControlError
from meshd.store.disks.layout import SET_BACK_KEY
from meshd.store.integrity.verification import report_damage
from meshd.store.store import Store
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl
from tests.support.store_calls import put_object

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


class Node:
    """A store with a scrubber whose mending and comparing are counted."""

    def __init__(self, place: Path, publish_interval: float = 1.0) -> None:
        self.clock = ManualClock()
        self.store = Store.open(StoreSettings.at(place), writer="s", clock=self.clock)
        self.control = MemoryControl(self.clock)
        self.mended = self.compared = 0
        self.scrubber = ScrubScheduler(
            "n1",
            self.store,
            self.control,
            self.clock,
            repair=self._mend,
            compare=self._compare,
            throttle=self._rest,
            every=1000.0,
            publish_interval=lambda: publish_interval,
        )

    def close(self) -> None:
        self.store.close()

    async def _mend(self, count: Callable[[int], None]) -> None:
        self.mended += 1
        self.count = count

    async def _compare(self) -> None:
        self.compared += 1

    async def _rest(self, size: int) -> None:
        await asyncio.sleep(0)

    async def turn(self) -> ScrubStatus:
        await self.scrubber.run_once()
        await asyncio.sleep(0)
        return await self.told()

    async def told(self) -> ScrubStatus:
        """After one turn."""
        await self.scrubber.run_once()
        return msgspec.json.decode(
            self.control.cached_entries(STATUS_TOPIC)[f"{STATUS_TOPIC}/n1"].value, type=ScrubStatus
        )

    async def ask(self, number: int) -> None:
        await self.control.put(f"{REQUEST_TOPIC}/n1", msgspec.json.encode(ScrubRequest(number)))

    def damage(self, key: str) -> None:
        record = self.store.get("b", key)
        assert record is not None
        extent = record.extents[0]
        with open(self.store._disks.path(extent.disk, extent.file), "r+b") as file:
            file.seek(extent.offset)
            file.write(b"?")
        report_damage(extent)


def test_a_pass_begins_in_its_time_and_when_it_is_asked_for(tmp_path: Path) -> None:
    async def run() -> None:
        with closing(Node(tmp_path)) as node:
            await put_object(node.store, "k", b"k" * 5000)
            told = await node.turn()
            assert (told.began, told.ended, node.compared) == (0, 0, 0)  # a new store has time
            node.clock.advance(1001)
            told = await node.turn()
            assert (told.running, told.bytes, told.total, told.compared) == (False, 5000, 5000, True)
            assert told.ended >= told.began > 0
            assert node.compared == 1
            assert (await node.turn()).began == told.began
            await node.ask(1)
            node.clock.advance(1)
            again = await node.turn()
            assert (again.asked, again.began > told.began, node.compared) == (1, True, 2)
            node.clock.advance(2)
            assert (await node.turn()).began == again.began

    asyncio.run(run())


def test_in_a_large_mesh_amounts_are_reported_at_intervals_and_damage_at_once(tmp_path: Path) -> None:
    """Every process of every node gets each report."""

    async def run() -> None:
        with closing(Node(tmp_path, publish_interval=100.0)) as node:
            first = await node.turn()
            await put_object(node.store, "k", b"k" * 5000)
            node.clock.advance(61)  # bytes in use are counted once a minute
            assert (await node.turn()).total == first.total
            node.clock.advance(60)
            assert (await node.turn()).total == first.total + 5000
            node.damage("k")
            assert await node.store.quarantine.process_damage_reports() == 1
            assert (await node.turn()).quarantined == 1

    asyncio.run(run())


def test_what_it_cannot_tell_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It looks twice a second, and a control store may be away for hours."""

    async def run() -> None:
        with closing(Node(tmp_path)) as node:
            tried = asyncio.Semaphore(0)

            async def away(*_: object, **__: object) -> int:
                tried.release()
                raise ControlError("no etcd member answers")

            node.control.put = away  # type: ignore[method-assign]
            running = asyncio.ensure_future(node.scrubber.run())
            for _ in range(3):
                await tried.acquire()
            running.cancel()

    asyncio.run(run())
    assert caplog.text.count("the scrub is blocked") == 1


def test_it_goes_on_after_a_repair_that_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As with an answer that no release of a peer gives, or one that was cancelled with something else."""

    async def run() -> None:
        with closing(Node(tmp_path)) as node:
            await put_object(node.store, "k", b"k" * 5000)
            node.damage("k")
            assert await node.store.quarantine.process_damage_reports() == 1
            tried, failures = (
                asyncio.Semaphore(0),
                [OSError(24, "Too many open files"), asyncio.CancelledError()],
            )

            async def fail(_: object) -> None:
                tried.release()
                if failures:
                    raise failures.pop()

            node.scrubber._repair = fail
            running = asyncio.ensure_future(node.scrubber.run())
            for _ in range(3):
                await asyncio.wait_for(tried.acquire(), 30)
                node.clock.advance(31)
            running.cancel()

    asyncio.run(run())
    assert caplog.text.count("Traceback") == 1


def test_a_loss_is_remembered_until_the_comparison_has_ended(tmp_path: Path) -> None:
    """A node that is killed while it compares compares again."""

    async def run() -> None:
        with closing(Node(tmp_path)) as node:
            disks, may_end = node.store.disk_health, asyncio.Event()
            with node.store._index.write_transaction() as txn:
                node.store._index.put_meta(txn, SET_BACK_KEY, True)
            disks._data_lost = True

            async def compare() -> None:
                await may_end.wait()

            node.scrubber._compare = compare
            await node.turn()
            assert node.store._index.get_meta(SET_BACK_KEY)
            may_end.set()
            assert node.scrubber._disk_loss_comparison is not None
            await node.scrubber._disk_loss_comparison
            assert not node.store._index.get_meta(SET_BACK_KEY)

    asyncio.run(run())


def test_the_last_word_of_a_node_stays(tmp_path: Path) -> None:
    """What was seen before the index's device failed is on its way when the node says why it ends."""

    async def run() -> None:
        with closing(Node(tmp_path)) as node:
            await node.turn()
            disks, write = node.store.disk_health, node.control.put
            disks.index_failed = "Read-only file system"
            failed = disks.index_state()

            async def slow(key: str, value: bytes, *, expect: int | None = None) -> int:
                node.control.put = write  # type: ignore[method-assign]
                await publish_disks(node.control, "n1", (failed,))
                return await write(key, value, expect=expect)

            disks.index_failed = ""
            node.control.put = slow  # type: ignore[method-assign]
            await put_object(node.store, "k", b"k")
            node.damage("k")
            assert await node.store.quarantine.process_damage_reports() == 1
            assert failed in (await node.told()).disks
            disks.index_failed = "Read-only file system"
            told = await node.turn()
            assert failed in told.disks
            assert told.quarantined == 1

    asyncio.run(run())


def test_a_pass_that_ends_tells_what_is_in_quarantine_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the look before took, and so however long the next one is put off."""

    async def run() -> None:
        with closing(Node(tmp_path)) as node:
            await put_object(node.store, "a", b"a" * 5000)
            await node.turn()
            look = node.store.quarantine.damaged_bytes

            async def long_look() -> int:
                node.clock.advance(10)
                return await look()

            monkeypatch.setattr(node.store.quarantine, "damaged_bytes", long_look)
            node.damage("a")
            assert await node.store.quarantine.process_damage_reports() == 1
            assert (await node.turn()).quarantined == 1
            await put_object(node.store, "a", b"again")
            assert (await node.turn()).quarantined == 1  # nobody has looked since
            await node.ask(1)
            told = await node.turn()
            assert (told.asked, told.compared, told.quarantined) == (1, True, 0)

    asyncio.run(run())


def test_what_is_new_in_quarantine_is_mended_at_once_and_the_rest_now_and_then(tmp_path: Path) -> None:
    async def run() -> None:
        with closing(Node(tmp_path)) as node:
            for key in ("a", "b"):
                await put_object(node.store, key, key.encode() * 5000)
            await node.turn()
            node.damage("a")
            assert await node.store.quarantine.process_damage_reports() == 1
            assert (await node.turn()).quarantined == 1
            assert node.mended == 1
            node.damage("b")
            assert await node.store.quarantine.process_damage_reports() == 1
            assert (await node.turn()).quarantined == 2
            assert node.mended == 2
            node.clock.advance(31)
            await node.turn()
            assert node.mended == 3
            await node.store.delete("b", "a")
            await put_object(node.store, "b", b"again")
            assert (await node.turn()).quarantined == 0
            node.clock.advance(31)
            await node.turn()
            assert node.mended == 3

    asyncio.run(run())


def test_what_was_restored_before_a_pass_is_not_counted_by_it(tmp_path: Path) -> None:
    """Nor is it when the try that restored it has not been looked at since."""

    async def run() -> None:
        with closing(Node(tmp_path)) as node:
            for key in ("a", "b"):
                await put_object(node.store, key, key.encode() * 5000)
            node.damage("a")
            assert await node.store.quarantine.process_damage_reports() == 1
            assert (await node.turn()).quarantined == 1
            node.count(1)
            await node.ask(1)
            assert (await node.turn()).mended == 0
            node.count(1)
            assert (await node.turn()).mended == 1

    asyncio.run(run())


def test_a_pace_is_kept() -> None:
    async def run() -> None:
        clock, rested = ManualClock(), list[int]()

        async def rest(size: int) -> None:
            rested.append(size)

        pace = RateLimiter(clock, rest, 1e9)
        for _ in range(3):
            await pace.throttle(1000)
        assert rested == [1000] * 3
        assert pace._free > clock.monotonic() - 1

    asyncio.run(run())
