"""Which items a comparison requests together, and in which order the other node reads them."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from meshd.cluster.rebalance.disk_order import CHUNK_ITEMS, chunks_in_disk_order
from meshd.cluster.rebalance.fetch_windows import LARGE, STREAMS, FetchWindows
from meshd.cluster.rebalance.sync_plan import Item
from meshd.store.disks.page_loader import CHUNK_BYTES, READ_BYTES, merged_reads, places_by_disk
from meshd.store.records import Extent, Location, Record

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_chunks_hold_each_item_once_and_rise_on_each_disk() -> None:
    order = random.Random(1)
    places = [
        Extent(order.randrange(3), order.randrange(9), order.randrange(1 << 30), 40_000) for _ in range(2000)
    ]
    items: list[Extent | None] = [*places, None, None]
    chunks = chunks_in_disk_order(items)
    assert sorted(number for chunk in chunks for number in chunk) == list(range(2002))
    for disk in range(3):
        there = [places[n] for chunk in chunks for n in chunk if n < 2000 and places[n].disk == disk]
        assert there == sorted(there, key=lambda extent: (extent.file, extent.offset))
    for chunk in chunks:
        assert len({places[number].disk for number in chunk if number < 2000}) <= 1
        assert sum(places[number].length for number in chunk if number < 2000) < CHUNK_BYTES + 40_000
        assert len(chunk) <= CHUNK_ITEMS
    assert len({places[chunk[0]].disk for chunk in chunks[1:4]}) == 3  # the disks work at the same time


def test_a_range_of_an_object_is_found_on_the_disks_of_its_extents() -> None:
    extents = (Extent(0, 7, 100, 50), Extent(1, 8, 0, 0), Extent(1, 9, 1000, 50))
    record = Record(100, "", 1, 1, extents)
    located = [Location("seven", 100, 50, 1), Location("nine", 1000, 50, 2)]
    found = places_by_disk(record, located, 40, 30)
    assert [(place.path, place.offset, place.length) for place in found[0]] == [("seven", 140, 10)]
    assert [(place.path, place.offset, place.length) for place in found[1]] == [("nine", 1000, 20)]


def test_neighbours_are_read_together_and_no_read_is_long() -> None:
    def reads(*places: tuple[int, int]) -> Sequence[tuple[int, int]]:
        return list(merged_reads(Location("file", offset, length, 0) for offset, length in places))

    assert reads() == []
    assert reads((0, 100), (612, 100)) == [(0, 712)]
    assert reads((0, 100), (1 << 20, 100)) == [(0, 100), (1 << 20, 100)]
    assert reads((0, 1000), (100, 10)) == [(0, 1000)]
    assert reads((5, 2 * READ_BYTES)) == [(5, READ_BYTES), (5 + READ_BYTES, READ_BYTES)]


def test_small_items_are_requested_in_windows_and_none_waits_for_long() -> None:
    def item(number: int, size: int = 1000) -> Item:
        return Item(b"b\0%d" % number, "version", "", 1, size)

    async def scenario() -> None:
        windows = FetchWindows(lambda: 100)
        await windows.add(item(number) for number in range(150))
        assert len(windows.small.get_nowait() or ()) == 100
        for _ in range(100):  # the pages of a comparison that finds nothing more
            await windows.add(())
        assert len(windows.small.get_nowait() or ()) == 50
        await windows.add([item(1, LARGE + 1), item(2), item(3, 5 * LARGE)])
        assert windows.large.get_nowait() == (item(1, LARGE + 1), item(3, 5 * LARGE))
        closing = asyncio.ensure_future(windows.close())
        assert await windows.small.get() == (item(2),)
        assert await windows.small.get() is None
        await closing
        assert [windows.large.get_nowait() for _ in range(STREAMS)] == [None] * STREAMS

    asyncio.run(scenario())


def test_long_names_end_a_window_before_its_request_is_too_long() -> None:
    async def scenario() -> None:
        windows = FetchWindows()
        adding = asyncio.ensure_future(
            windows.add(Item(b"b\0%01000d" % number, "version", "", 1, 10) for number in range(10_000))
        )
        first = await windows.small.get()
        assert first is not None
        assert 2 << 20 < sum(len(item.name) for item in first) < 4 << 20
        adding.cancel()

    asyncio.run(scenario())
