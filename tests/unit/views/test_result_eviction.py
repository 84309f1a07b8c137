"""What of a view's results stays when they exceed their room."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from meshd.core.document_store import RESERVED_BUCKET
from meshd.documents.inventory import UsageFile
from meshd.store.records import Meta
from meshd.views.transform_results import ResultEvictor, eviction_cutoff
from tests.support.manual_clock import ManualClock
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 100)), st.integers(0, 2000))
def test_the_newest_stay_and_fit(made: dict[int, int], limit: int) -> None:
    first = eviction_cutoff(made, limit)
    kept = {minute: size for minute, size in made.items() if minute >= first}
    newest = max(made, default=0)
    assert sum(kept.values()) <= limit or set(kept) == {newest}
    older = [minute for minute in made if minute < first]
    if older:
        assert sum(kept.values()) + made[max(older)] > limit  # no more would have fitted


def test_what_was_read_long_ago_goes_and_nothing_else_does(tmp_path: Path) -> None:
    clock = ManualClock()
    store, uses = MemoryStore(clock), UsageFile(tmp_path / "uses", clock)

    async def put(key: str, size: int) -> None:
        writer = store.writer(RESERVED_BUCKET, key, size=size)
        await writer.write(bytes(size))
        await writer.commit(Meta("e"))

    async def run() -> None:
        await put("plans/p", 5000)
        for number in range(10):
            await put(f"views/a/{9 - number}", 100)
            clock.advance(120.0)
        uses.note("views/a/9")  # the oldest of them
        keeper = ResultEvictor(store, uses, 500)
        assert await keeper.evict_results() == 6
        assert await keeper.evict_results() == 0

    asyncio.run(run())
    left = [key for key, _ in store.list(RESERVED_BUCKET).entries]
    assert left == ["plans/p", "views/a/0", "views/a/1", "views/a/2", "views/a/9"]
    uses.close()


def test_uses_are_seen_by_other_processes_and_kept(tmp_path: Path) -> None:
    clock = ManualClock()
    first, second = UsageFile(tmp_path / "uses", clock), UsageFile(tmp_path / "uses", clock)
    first.note("views/a")
    clock.advance(600)
    second.note("views/b")
    table = first.last_uses()
    assert table.last_used_minute("views/b") - table.last_used_minute("views/a") == 10
    assert table.last_used_minute("views/c") == 0
    first.close()
    second.close()
