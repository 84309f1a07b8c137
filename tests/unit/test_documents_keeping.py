"""Which plans, snapshots and assets go: those that nothing names and nobody has used for long."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from meshd.assembly.catalog import RESERVED_BUCKET, Catalog
from meshd.kit.clock import ManualClock
from meshd.service.documents import SAFE_DAYS, DocumentKeeper
from meshd.service.views.uses import UseFile
from meshd.store.memory import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

DAY = 86_400.0


def digest(number: int) -> str:
    return f"{number:064x}"


def plan(snapshot: int, within: int = 0, *assets: int) -> bytes:
    document = {"snapshot": digest(snapshot), "assets": [digest(each) for each in assets]}
    return json.dumps({**document, "within": digest(within) if within else ""}).encode()


def test_what_nothing_names_and_nobody_uses_goes(tmp_path: Path) -> None:
    clock = ManualClock()
    store, uses = MemoryStore(clock), UseFile(tmp_path / "uses", clock)
    catalog = Catalog(store, uses=uses)
    alone, roots = [True], list[str]()
    keeper = DocumentKeeper(store, uses, lambda: roots, clock, lambda: alone[0])

    async def run() -> None:
        for number in (10, 11, 12, 13):
            await catalog.write(f"snapshots/{digest(number)}", b"s")
        await catalog.write(f"assets/{digest(20)}", b"tokens")
        await catalog.write(f"assets/{digest(21)}", b"unused")
        await catalog.write(f"plans/{digest(1)}", plan(10, 2, 20))  # named by a view, packs plan 2
        await catalog.write(f"plans/{digest(2)}", plan(11))
        await catalog.write(f"packs/{digest(1)}", b"table")
        await catalog.write(f"plans/{digest(3)}", plan(12))  # read now and then
        await catalog.write(f"plans/{digest(4)}", plan(13))  # nobody's
        await catalog.write("bad/x", b"not shared")
        roots.append(f'{{"plan": "{digest(1)}"}}')
        clock.advance((SAFE_DAYS - 1) * DAY)
        assert await keeper.sweep() == 0
        uses.note(f"plans/{digest(3)}")
        clock.advance(2 * DAY)
        alone[0] = False
        assert await keeper.sweep() == 0
        alone[0] = True
        assert await keeper.sweep() == 3
        assert await keeper.sweep() == 0

    asyncio.run(run())
    left = {key for key, _ in store.list(RESERVED_BUCKET).entries}
    kept = {f"snapshots/{digest(number)}" for number in (10, 11, 12)}
    kept |= {f"plans/{digest(number)}" for number in (1, 2, 3)}
    assert left == kept | {f"assets/{digest(20)}", f"packs/{digest(1)}", "bad/x"}
    uses.close()


def test_whoever_comes_back_in_time_keeps_it(tmp_path: Path) -> None:
    clock = ManualClock()
    store, uses = MemoryStore(clock), UseFile(tmp_path / "uses", clock)
    catalog = Catalog(store, uses=uses)
    keeper = DocumentKeeper(store, uses, tuple, clock, lambda: True)

    async def run() -> None:
        await catalog.write(f"plans/{digest(1)}", plan(2), once=True)
        clock.advance(2 * SAFE_DAYS * DAY)
        await catalog.write(f"plans/{digest(1)}", plan(2), once=True)  # registered again: it is there
        assert await keeper.sweep() == 0
        clock.advance(2 * SAFE_DAYS * DAY)
        assert await keeper.sweep() == 1

    asyncio.run(run())
    uses.close()
