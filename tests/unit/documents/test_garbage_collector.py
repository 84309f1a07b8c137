"""Which plans, snapshots and assets go: what nothing names and nobody has used for long, on any node."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from meshd.control.deleted_documents import DeletedDocumentTable
from meshd.core.api_errors import BatchError
from meshd.core.document_store import RESERVED_BUCKET, DocumentStore
from meshd.documents.garbage_collector import DocumentCollector
from meshd.documents.gc_policy import DEFAULT_UNUSED_DAYS, DocumentUsage, merge_usage, unused_documents
from meshd.documents.inventory import MINUTE_MS, DocumentInventory, UsageFile
from meshd.util.clock_jumps import ClockWatch
from tests.support.manual_clock import ManualClock
from tests.support.reference_control import MemoryControl
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from meshd.documents.inventory import PeerInventories

DAY = 86_400.0


def digest(number: int) -> str:
    return f"{number:064x}"


def plan(snapshot: int, within: int = 0, *assets: int) -> bytes:
    document = {"snapshot": digest(snapshot), "assets": [digest(each) for each in assets]}
    return json.dumps({**document, "within": digest(within) if within else ""}).encode()


class One:
    """A node with a keeper, and what the others say: tables by prefix, and who is silent."""

    def __init__(self, place: Path) -> None:
        self.clock = ManualClock()
        self.store, self.uses = MemoryStore(self.clock), UsageFile(place / "uses", self.clock)
        self.removals = DeletedDocumentTable(MemoryControl(self.clock))
        self.catalog = DocumentStore(self.store, uses=self.uses, removals=self.removals)
        self.roots: list[str] = []
        self.far: dict[str, DocumentUsage] = {}
        self.silent: list[str] = []
        self.leading = True
        self.census = DocumentInventory(self.store, self.uses, self._others)
        self.keeper = DocumentCollector(
            self.store, self.catalog, self.census, self.removals, lambda: self.roots, self.clock,
            lambda: self.leading,
        )  # fmt: skip

    async def _others(self, prefix: str) -> PeerInventories:
        return [{key: held for key, held in self.far.items() if key.startswith(prefix)}], self.silent

    def left(self) -> set[str]:
        return {key for key, _ in self.store.list(RESERVED_BUCKET).entries}


@pytest.fixture
def one(tmp_path: Path) -> Iterator[One]:
    made = One(tmp_path)
    yield made
    made.uses.close()


def test_what_nothing_names_and_nobody_uses_goes(one: One) -> None:
    async def run() -> None:
        for number in (10, 11, 12, 13):
            await one.catalog.write_document(f"snapshots/{digest(number)}", b"s")
        await one.catalog.write_document(f"assets/{digest(20)}", b"tokens")
        await one.catalog.write_document(f"assets/{digest(21)}", b"unused")
        await one.catalog.write_document(
            f"plans/{digest(1)}", plan(10, 2, 20)
        )  # named by a view, packs plan 2
        await one.catalog.write_document(f"plans/{digest(2)}", plan(11))
        await one.catalog.write_document(f"packs/{digest(1)}", b"table")
        await one.catalog.write_document(f"plans/{digest(3)}", plan(12))  # read now and then
        await one.catalog.write_document(f"plans/{digest(4)}", plan(13))  # nobody's
        await one.catalog.write_document(f"bad/{digest(3)}", b"[]")
        await one.catalog.write_document(f"bad/{digest(4)}", b"[]")
        await one.catalog.write_document(f"lengths/{digest(4)}/text/000000", b"")
        one.roots.append(f'{{"plan": "{digest(1)}"}}')
        one.clock.advance((DEFAULT_UNUSED_DAYS - 1) * DAY)
        assert await one.keeper.sweep() == 0
        one.uses.note(f"plans/{digest(3)}")
        one.clock.advance(2 * DAY)
        assert await one.keeper.sweep() == 3
        assert await one.keeper.sweep() == 0

    asyncio.run(run())
    kept = {f"snapshots/{digest(number)}" for number in (10, 11, 12)}
    kept |= {f"plans/{digest(number)}" for number in (1, 2, 3)}
    assert one.left() == kept | {f"assets/{digest(20)}", f"packs/{digest(1)}", f"bad/{digest(3)}"}


def test_what_another_node_used_until_it_heard_of_the_decision_stays(one: One) -> None:
    """It took the document for present; after it has heard, it makes it again instead."""
    key = f"snapshots/{digest(10)}"

    async def hear() -> None:
        now = one.clock.now_ms() // MINUTE_MS
        one.far[key] = DocumentUsage(1, now, now)

    async def run() -> None:
        await one.catalog.write_document(key, b"s")
        about = one.store, one.catalog, one.census, one.removals, lambda: one.roots, one.clock
        keeper = DocumentCollector(*about, announce=hear)
        one.clock.advance((DEFAULT_UNUSED_DAYS + 1) * DAY)
        assert await keeper.sweep() == 0
        assert not one.removals.deletion_notice(key)

    asyncio.run(run())
    assert one.left() == {key}


def test_a_clock_that_jumps_ahead_makes_nothing_old_unless_it_stays_there(one: One, tmp_path: Path) -> None:
    census = DocumentInventory(one.store, one.uses)

    def restarted() -> DocumentCollector:
        about = one.store, one.catalog, census, one.removals, lambda: one.roots, one.clock
        return DocumentCollector(*about, settle_seconds=3600.0)

    async def run() -> None:
        await one.catalog.write_document(f"snapshots/{digest(10)}", b"s")
        keeper = restarted()
        assert await keeper.sweep() == 0
        one.clock.jump(200 * DAY)
        assert await keeper.sweep() == 0
        one.clock.advance(1800)
        assert await keeper.sweep() == 0
        keeper = restarted()
        assert await keeper.sweep() == 0, "nor does a node that starts with such a clock"
        assert one.left() == {f"snapshots/{digest(10)}"}
        one.clock.advance(3600)
        assert await keeper.sweep() == 1
        await one.catalog.write_document(f"snapshots/{digest(11)}", b"s")
        for _ in range(DEFAULT_UNUSED_DAYS + 1):
            one.clock.advance(DAY)
            assert one.left() == {f"snapshots/{digest(11)}"}, "nor is it removed early"
            await keeper.sweep()
        assert one.left() == set(), "days that pass while it runs are no jump"

    asyncio.run(run())


def test_a_restart_after_a_jump_makes_nothing_old(one: One, tmp_path: Path) -> None:
    """Although a document was made since, which has the time of the clock."""

    def restarted() -> DocumentCollector:
        about = one.store, one.catalog, DocumentInventory(one.store, one.uses), one.removals
        watch = ClockWatch(one.clock, tmp_path / "clock")
        return DocumentCollector(*about, lambda: one.roots, one.clock, settle_seconds=3600.0, watch=watch)

    async def run() -> None:
        await one.catalog.write_document(f"snapshots/{digest(10)}", b"s")
        assert await restarted().sweep() == 0
        one.clock.jump(200 * DAY)
        await one.catalog.write_document(f"snapshots/{digest(11)}", b"s")
        for _ in range(2):
            assert await restarted().sweep() == 0
            one.clock.advance(1700)
        assert one.left() == {f"snapshots/{digest(10)}", f"snapshots/{digest(11)}"}
        one.clock.advance(300)
        assert await restarted().sweep() == 1
        assert one.left() == {f"snapshots/{digest(11)}"}

    asyncio.run(run())


def test_a_clock_that_jumps_while_other_nodes_are_asked_removes_nothing(one: One) -> None:
    async def others(prefix: str) -> PeerInventories:
        if prefix == "plans/":
            one.clock.jump(200 * DAY)
        return [], []

    async def run() -> None:
        await one.catalog.write_document(f"snapshots/{digest(10)}", b"s")
        await one.catalog.write_document(f"bad/{digest(4)}", b"[]")
        about = one.store, one.catalog, DocumentInventory(one.store, one.uses, others), one.removals
        keeper = DocumentCollector(*about, lambda: one.roots, one.clock, settle_seconds=3600.0)
        assert await keeper.sweep() == 0
        one.clock.advance(600)
        assert await keeper.sweep() == 0
        assert one.left() == {f"snapshots/{digest(10)}", f"bad/{digest(4)}"}

    asyncio.run(run())


def test_a_clock_that_is_set_right_as_a_sweep_begins_removes_nothing(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is removed is decided by the very time of day that was trusted."""
    census = DocumentInventory(one.store, one.uses)
    about = one.store, one.catalog, census, one.removals, lambda: one.roots, one.clock
    keeper, list_local = DocumentCollector(*about, settle_seconds=3600.0), census.list_local

    def slowly(prefix: str) -> dict[str, DocumentUsage]:
        if one.clock.now_ms() > right + 100 * DAY * 1e3:
            one.clock.jump(-200 * DAY)
        return list_local(prefix)

    async def run() -> None:
        await one.catalog.write_document(f"snapshots/{digest(10)}", b"s")
        assert await keeper.sweep() == 0
        one.clock.jump(200 * DAY)
        monkeypatch.setattr(census, "list_local", slowly)
        assert await keeper.sweep() == 0

    right = one.clock.now_ms()
    asyncio.run(run())
    assert one.left() == {f"snapshots/{digest(10)}"}


def test_what_says_whose_a_snapshot_is_goes_with_it(one: One) -> None:
    async def run() -> None:
        for number in (10, 11):
            await one.catalog.write_document(f"snapshots/{digest(number)}", b"s")
            await one.catalog.write_document(
                f"births/{digest(number + 90)}", json.dumps(digest(number)).encode()
            )
        one.roots.append(digest(10))
        one.clock.advance((DEFAULT_UNUSED_DAYS + 1) * DAY)
        assert await one.keeper.sweep() == 2

    asyncio.run(run())
    assert one.left() == {f"snapshots/{digest(10)}", f"births/{digest(100)}"}


def test_whoever_comes_back_in_time_keeps_it(one: One) -> None:
    async def run() -> None:
        await one.catalog.write_document(f"plans/{digest(1)}", plan(2), once=True)
        one.clock.advance(2 * DEFAULT_UNUSED_DAYS * DAY)
        await one.catalog.write_document(
            f"plans/{digest(1)}", plan(2), once=True
        )  # registered again: it is there
        assert await one.keeper.sweep() == 0
        one.clock.advance(2 * DEFAULT_UNUSED_DAYS * DAY)
        assert await one.keeper.sweep() == 1

    asyncio.run(run())


def test_a_use_on_another_node_keeps_it_and_a_silent_node_keeps_all(one: One) -> None:
    async def run() -> None:
        for number in (1, 2):
            await one.catalog.write_document(f"plans/{digest(number)}", plan(9))
        one.clock.advance(2 * DEFAULT_UNUSED_DAYS * DAY)
        now = one.clock.now_ms() // MINUTE_MS
        one.far = {
            f"plans/{digest(1)}": DocumentUsage(1, 5, now - 60),
            f"plans/{digest(2)}": DocumentUsage(1, 5, 0),
        }
        one.silent = ["n3"]
        assert await one.keeper.sweep() == 0
        one.silent, one.leading = [], False
        assert await one.keeper.sweep() == 0  # another node says what goes
        one.leading = True
        assert await one.keeper.sweep() == 1

    asyncio.run(run())
    assert one.left() == {f"plans/{digest(1)}"}


def test_a_plan_that_only_others_have_is_read_before_anything_goes(one: One) -> None:
    async def run() -> None:
        await one.catalog.write_document(f"snapshots/{digest(5)}", b"s")
        one.clock.advance(2 * DEFAULT_UNUSED_DAYS * DAY)
        one.far = {
            f"plans/{digest(1)}": DocumentUsage(1, one.clock.now_ms() // MINUTE_MS, 0)
        }  # may name the snapshot
        assert await one.keeper.sweep() == 0

    asyncio.run(run())


def test_what_is_removed_is_nowhere_until_it_is_made_again(one: One) -> None:
    key, document = f"snapshots/{digest(7)}", b"s"

    async def run() -> None:
        await one.catalog.put_shared(key, document)
        one.clock.advance(60)
        await one.removals.add([key], one.clock.now_ms(), "asked", by="ann")
        assert one.catalog.read_document(key) is None  # its bytes are still there
        assert await one.catalog.find_shared(key) is None
        with pytest.raises(BatchError, match=r"was removed by ann on \d{4}-") as refused:
            await one.catalog.snapshot(digest(7))
        assert refused.value.code == "Gone"
        assert "create it again" in refused.value.help
        assert refused.value.detail == {"snapshot": digest(7)}
        await one.catalog.put_shared(key, document)  # before the bytes were taken away: they stay now
        assert await one.keeper.remove_local_copies() == 0
        assert one.catalog.read_document(key) == document
        one.clock.advance(60)
        await one.removals.add([key], one.clock.now_ms(), "asked", by="ann")
        assert await one.keeper.remove_local_copies() == 1
        assert one.left() == set()
        await one.catalog.put_shared(key, document)
        assert one.catalog.read_document(key) == document
        assert one.removals.names() == ()

    asyncio.run(run())


def test_made_again_while_it_is_taken_away_it_stays(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    key, delete = f"plans/{digest(1)}", one.store.delete

    async def meanwhile(bucket: str, name: str, **more: object) -> object:
        await one.catalog.put_shared(name, plan(2))
        return await delete(bucket, name, **more)  # type: ignore[arg-type]

    async def run() -> None:
        await one.catalog.put_shared(key, plan(2))
        one.clock.advance(60)
        await one.removals.add([key], one.clock.now_ms(), "asked", by="ann")
        monkeypatch.setattr(one.store, "delete", meanwhile)
        assert await one.keeper.remove_local_copies() == 0
        assert one.catalog.read_document(key) == plan(2)

    asyncio.run(run())


def test_removals_are_remembered_for_a_while(one: One) -> None:
    async def run() -> None:
        await one.removals.add(["plans/a", "plans/b"], one.clock.now_ms(), "unused", DEFAULT_UNUSED_DAYS)
        assert "after 90 days without use" in one.removals.deletion_notice("plans/a")
        assert await one.removals.restore("plans/a")
        assert not await one.removals.restore("plans/a")
        assert one.removals.names() == ("plans/b",)
        one.clock.advance(11 * DAY)
        await one.keeper.sweep()
        assert one.removals.names() == ()

    asyncio.run(run())


def test_of_several_nodes_the_latest_use_counts() -> None:
    table = {"plans/a": DocumentUsage(10, 5, 0)}
    found = merge_usage([table, {"plans/a": DocumentUsage(10, 7, 900)}, {"plans/b": DocumentUsage(1, 1, 0)}])
    assert found == {"plans/a": DocumentUsage(10, 7, 900, 2), "plans/b": DocumentUsage(1, 1, 0)}
    assert unused_documents(found, [], lambda _: set(), 900) == ["plans/b"]
    assert unused_documents(found, ["b"], lambda _: set(), 901) == ["plans/a"]
