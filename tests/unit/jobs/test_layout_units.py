"""Layout units: what scattered objects cost, when they are worth moving, and that moved ones are no more."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meshd.batches.read_ahead.read_cost import MEDIA_RATE, SEEK_SECONDS, SHORT_SEEK_SECONDS
from meshd.jobs.relayout.messages import LayoutCost
from meshd.jobs.relayout.node_task import (
    MAX_OBJECTS,
    UNIT_BYTES,
    UNIT_OBJECTS,
    UnitBuilder,
    cost_in_order,
    is_scattered,
    present_cost,
)
from meshd.store.engine.key_order_rewrite import PlacedObject
from meshd.store.engine.member_header import PAGE
from meshd.store.records import Extent, Record

SEGMENT = 256 << 20
HEADER = 2 << 10


def laid_out(sizes: list[int], gap: int = HEADER, file: int = 1) -> list[Extent]:
    """Extents one behind the other in data files of SEGMENT bytes, with `gap` bytes before each."""
    found, at = [], 0
    for size in sizes:
        at += gap
        found.append(Extent(0, file, at, size))
        at += size + -size % PAGE
        if at > SEGMENT:
            file, at = file + 1, 0
    return found


def objects(sizes: list[int]) -> list[PlacedObject]:
    return [
        PlacedObject(f"{number:06}", Record(each.length, "", 1, 1, (each,)), "")
        for number, each in enumerate(laid_out(sizes))
    ]


@pytest.mark.parametrize(
    ("size", "disks", "count"),
    [(70_000, 1, 1024), (1000, 1, 33_555), (70_000, 12, 5753), (10, 1, MAX_OBJECTS)],
)
def test_units_have_a_shard_and_32_mib_for_each_disk_unless_objects_are_tiny(
    size: int, disks: int, count: int
) -> None:
    all_of_them = objects([size] * (2 * count + 7))
    builder = UnitBuilder(disks)
    units = [*builder.add(all_of_them[:1000]), *builder.add(all_of_them[1000:]), *builder.rest()]
    assert [len(unit) for unit in units] == [count, count, 7]
    assert [each for unit in units for each in unit] == all_of_them
    assert count == MAX_OBJECTS or (count >= UNIT_OBJECTS and count * size >= disks * UNIT_BYTES)


def test_a_scattered_unit_costs_a_seek_for_each_object() -> None:
    sizes = [64 << 10] * 600
    random.Random(3).shuffle(extents := laid_out(sizes, gap=2 << 20))
    cost = present_cost(extents)
    files = len({extent.file for extent in extents})
    assert cost.seeks == 600
    assert cost.media_seconds == pytest.approx(sum(sizes) / MEDIA_RATE)
    seconds = files * SEEK_SECONDS + (600 - files) * SHORT_SEEK_SECONDS + cost.bytes / MEDIA_RATE
    assert cost.disk_seconds == pytest.approx(seconds)
    assert is_scattered(cost, cost_in_order(extents, SEGMENT))
    assert present_cost(extents[:5] + extents[5:]) == present_cost(sorted(extents, key=lambda e: e.offset))


@pytest.mark.parametrize("size", [0, 100, 4 << 10, 70_000, 1 << 20])
def test_a_unit_that_was_moved_is_not_moved_again(size: int) -> None:
    builder = UnitBuilder(1)
    for unit in [*builder.add(objects([size] * 3000)), *builder.rest()]:
        extents = [each.extent for each in unit]
        assert not is_scattered(present_cost(extents), cost_in_order(extents, SEGMENT))


def test_gaps_that_are_read_through_count_and_a_few_pieces_do_not() -> None:
    thin = laid_out([64 << 10] * 600, gap=500 << 10)  # 8 times the bytes, no seek
    assert present_cost(thin).seeks < 10
    assert is_scattered(present_cost(thin), cost_in_order(thin, SEGMENT))
    few = [*laid_out([70_000] * 600), *laid_out([70_000] * 600, file=9)]
    assert not is_scattered(present_cost(few), cost_in_order(few, SEGMENT))
    three = [Extent(0, file, 0, 1000) for file in range(3)]  # saves too little
    assert not is_scattered(present_cost(three), cost_in_order(three, SEGMENT))
    assert present_cost([]) == cost_in_order([], SEGMENT) == LayoutCost()


def test_disks_are_read_each_in_its_own_order() -> None:
    one: Any = laid_out([70_000] * 1000)
    two = [Extent(number % 2, extent.file, extent.offset, extent.length) for number, extent in enumerate(one)]
    assert present_cost(two).seeks == 2
    assert cost_in_order(two, SEGMENT).seeks == 2
