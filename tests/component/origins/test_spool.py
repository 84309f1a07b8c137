"""Flights into the cache's files: what was cut short goes on where it was, byte by byte."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshd.config import StoreSettings
from meshd.origins.cache import in_flight
from meshd.origins.cache.in_flight import FetchSpool, InFlightPiece
from meshd.origins.client.origin_api import ObjectFacts, OriginDownError, OriginResponse
from meshd.store.records import Meta
from meshd.store.store import Store
from meshd.util.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from meshd.origins.cache.cache_store import CacheStore
    from meshd.store.engine.writer import DiskObjectWriter

SIZE, PIECE = 5 << 20, 300_000


class OneShelf:
    """Writes to a store; its writers are slow to settle, for once."""

    def __init__(self, store: Store, slow: int) -> None:
        self._store, self._slow = store, slow

    def open_writer(self, *_: object) -> DiskObjectWriter:
        writer = self._store.writer("b", "k", size=SIZE)
        settled, calls = writer.flushed_bytes, 0

        async def slowly() -> int:
            nonlocal calls
            calls += 1
            if calls == self._slow:
                await asyncio.sleep(60)
            return await settled()

        writer.flushed_bytes = slowly  # type: ignore[method-assign]  # an instance's own
        return writer


async def _bytes(data: bytes, start: int, end: int) -> AsyncGenerator[bytes, None]:
    for at in range(start, end, PIECE):
        yield data[at : min(at + PIECE, end)]
    if end < len(data):
        raise OriginDownError("cut")


@pytest.mark.parametrize("slow", [0, 2], ids=["cut", "a-write-that-takes-too-long"])
def test_what_was_cut_short_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    data, facts = os.urandom(SIZE), ObjectFacts(SIZE, "e", 0)

    async def run() -> None:
        clock = SystemClock()
        store = Store.open(StoreSettings.at(tmp_path, durability="relaxed"), writer="w0", clock=clock)
        flight = InFlightPiece()
        draft, shelf = FetchSpool(flight), cast("CacheStore", OneShelf(store, slow))
        first = OriginResponse(facts, 0, SIZE, _bytes(data, 0, SIZE if slow else 3 << 20))
        await draft.begin_spool(shelf, cast("Any", None), "k", 0, first)
        monkeypatch.setattr(in_flight, "_STILL", 0.2 if slow else 60.0)
        with pytest.raises(OriginDownError):
            await draft.receive(first)
        monkeypatch.setattr(in_flight, "_STILL", 60.0)
        assert 0 < flight.have < SIZE
        assert os.pread(flight.fd, flight.have, flight.base) == data[: flight.have]
        await draft.receive(
            OriginResponse(facts, flight.have, SIZE - flight.have, _bytes(data, flight.have, SIZE))
        )
        flight.check()
        record = await (await draft.finished_writer(shelf, cast("Any", None), "k", 0)).commit(Meta("e"))
        assert store.read_range(record, 0, SIZE) == data
        await draft.aclose()
        flight.release()
        store.close()

    asyncio.run(run())


def test_what_is_not_kept_is_gone_with_its_last_reader(tmp_path: Path) -> None:
    data, facts = os.urandom(SIZE), ObjectFacts(SIZE, "e", 0)

    async def run() -> None:
        settings = StoreSettings.at(tmp_path, durability="relaxed")
        store = Store.open(settings, writer="w0", clock=SystemClock())
        flight = InFlightPiece()
        draft, reply = FetchSpool(flight), OriginResponse(facts, 0, SIZE, _bytes(data, 0, SIZE))
        await draft.begin_spool(cast("CacheStore", OneShelf(store, 0)), cast("Any", None), "k", 0, reply)
        await draft.receive(reply)
        await draft.aclose()
        assert os.pread(flight.fd, SIZE, flight.base) == data  # whoever reads it goes on
        assert store.get("b", "k") is None
        flight.release()
        store.close()

    asyncio.run(run())
    kept = [path.name for path in (tmp_path / "extents").rglob("*") if path.is_file()]
    assert kept == ["DISK"]
