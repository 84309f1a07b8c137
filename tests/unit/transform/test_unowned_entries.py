"""Entries of samples that went to other nodes of a mesh: they make room, and only where room is short."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from meshd.telemetry import metrics
from meshd.transform.decoded_cache import unowned_entries
from meshd.transform.decoded_cache.entry_format import EntryError
from meshd.transform.decoded_cache.messages import StoredEntry
from meshd.transform.decoded_cache.sample_set import OwnRows, SampleSet
from meshd.transform.decoded_cache.segment_files import SegmentFiles
from meshd.transform.decoded_cache.segment_store import SegmentStore, free_spans
from meshd.transform.decoded_cache.tables import Table
from meshd.transform.decoded_cache.unowned_entries import AT_ONCE, UnownedEntries
from tests.support.decoded_cache_node import DecodedCacheNode
from tests.unit.transform.test_decoded_cache import BYTES, MIB, SAMPLES, TEXT, kept, picture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from meshd.transform.decoded_cache.tables import Segment

    Integers = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

ROOM = 3 * MIB
BEFORE, AFTER = list(range(0, SAMPLES, 2)), list(range(0, SAMPLES, 4))
"""The samples that the node is asked for; both are more than there is room for."""


@pytest.fixture(scope="module")
def pictures() -> list[tuple[bytes]]:
    return [(picture(number),) for number in range(SAMPLES)]


def epochs(node: DecodedCacheNode, first: int, samples: Sequence[int]) -> None:
    """Three of them, with what the node does in between."""
    for epoch in range(first, first + 3):
        assert node.epoch(TEXT, epoch, samples) == node.epoch(TEXT, epoch, samples, cached=False)
        node.find_moved()


def disk_bytes(node: DecodedCacheNode) -> int:
    return sum(path.stat().st_blocks * 512 for path in (node.folder / "decoded").iterdir())


@pytest.mark.parametrize("bound", ["quota", "budget"])
def test_they_make_room_for_the_samples_that_are_left(
    tmp_path: Path, pictures: list[tuple[bytes]], bound: str
) -> None:
    budget = ROOM if bound == "budget" else 1 << 30
    node = DecodedCacheNode(tmp_path, pictures, budget, quota=ROOM if bound == "quota" else None)
    try:
        node.ask_for(BEFORE)
        epochs(node, 0, BEFORE)
        first, evicted = kept(node), metrics.decoded_cache_evicted._value.get()
        assert first <= set(BEFORE)
        assert len(first) >= 0.7 * ROOM / BYTES
        before = len(first & set(AFTER))
        node.ask_for(AFTER)
        epochs(node, 3, AFTER)
        later = kept(node)
        assert first & set(AFTER) <= later, "an entry that is still asked for was dropped"
        assert len(later & set(AFTER)) >= max(0.7 * ROOM / BYTES, before + 3)
        assert node.cache.bytes <= ROOM
        assert node.store.bytes == node.cache.bytes == sum(table.bytes for table in node.cache.tables)
        assert metrics.decoded_cache_evicted._value.get() > evicted
        assert disk_bytes(node) <= ROOM + 2 * MIB, "the space was not given back"
        damaged = node.damaged
        epochs(node, 6, AFTER)
        assert node.damaged == damaged
    finally:
        node.close()


@pytest.fixture
def roomy(tmp_path: Path, pictures: list[tuple[bytes]]) -> Iterator[DecodedCacheNode]:
    """A node with room for all that it was asked for, of which half has moved."""
    node = DecodedCacheNode(tmp_path, pictures, 1 << 30)
    try:
        node.ask_for(BEFORE)
        epochs(node, 0, BEFORE)
        assert kept(node) == set(BEFORE)
        node.ask_for(AFTER)
        yield node
    finally:
        node.close()


def test_without_need_they_stay_and_nobody_looks_for_them(roomy: DecodedCacheNode) -> None:
    epochs(roomy, 3, AFTER)
    assert kept(roomy) == set(BEFORE)
    assert roomy.looked_at == 0


def test_a_caller_that_allows_far_less_than_others_drops_none(roomy: DecodedCacheNode) -> None:
    for epoch in range(3, 6):
        roomy.epoch(TEXT, epoch, AFTER, limit=BYTES)
        roomy.find_moved()
    assert kept(roomy) == set(BEFORE)


def test_they_are_looked_for_once_a_map(tmp_path: Path, pictures: list[tuple[bytes]]) -> None:
    node = DecodedCacheNode(tmp_path, pictures, 1 << 30, quota=ROOM)
    try:
        node.ask_for(BEFORE)
        epochs(node, 0, BEFORE)
        assert 0 < node.looked_at <= SAMPLES
        looked_at = node.looked_at
        epochs(node, 3, BEFORE)
        assert node.looked_at == looked_at
    finally:
        node.close()


def test_a_node_that_is_lately_asked_for_any_sample_drops_none(
    tmp_path: Path, pictures: list[tuple[bytes]]
) -> None:
    node = DecodedCacheNode(tmp_path, pictures, 1 << 30, quota=ROOM)
    try:
        epochs(node, 0, range(SAMPLES))
        first = kept(node)
        for epoch in range(3, 9):  # parts and whole batches in turns
            node.ask_for(AFTER)
            epochs(node, epoch, AFTER[:8])
            node.own = None
            epochs(node, epoch, range(8))
            assert first <= kept(node), "whole batches may need them again"
        node.ask_for(AFTER)
        for epoch in range(9, 40, 3):
            epochs(node, epoch, AFTER)
        assert not first <= kept(node)
        assert kept(node) & set(AFTER) >= first & set(AFTER)
    finally:
        node.close()


def test_when_a_quota_is_lowered_they_go_first(tmp_path: Path, pictures: list[tuple[bytes]]) -> None:
    node = DecodedCacheNode(tmp_path, pictures, 1 << 30, quota=ROOM)
    try:
        node.ask_for(BEFORE)
        epochs(node, 0, BEFORE)
        mine = sorted(kept(node))[: len(kept(node)) // 2]
        node.ask_for(mine)
        node.epoch(TEXT, 3, mine)
        node.fit(1 << 40, 1 << 39)
        node.quota = node.cache.bytes - 2 * BYTES
        for _ in range(2):  # the first look finds out which they are
            node.find_moved()
            node.epoch(TEXT, 4, mine)
        node.fit(1 << 40, 1 << 39)
        assert node.cache.bytes <= node.quota
        assert set(mine) <= kept(node)
    finally:
        node.close()


def test_the_space_of_an_entry_is_given_back_and_reading_it_is_a_miss(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "decoded", 1 << 30)
    store.clear()
    table, files, values = Table(7, 8, 0, 0.0), SegmentFiles(), dict[int, bytes]()
    segment = store.create("writer", table, 64 * MIB)
    for sample, length in enumerate([100_000, 2_000, 100_000, 50_000]):
        values[sample] = bytes([sample + 1]) * length
        entry = StoredEntry(7, sample, *files.append(str(segment.path), 7, sample, values[sample]))
        assert table.add(segment, entry)
        store.grow(segment, entry.offset + entry.length)
    places = {sample: table.find(sample) for sample in values}
    used = segment.used
    given = store.give_back(table, [1, 0, 2], 1)
    assert table.find(1) is not None, "too small to give anything back"
    assert table.find(0) is None
    assert table.find(2) is not None, "enough was given back"
    assert 100_000 - 2 * 4096 < given <= 100_000
    assert segment.used == store.used == store.bytes == table.bytes == used - given
    for sample in (1, 2, 3):
        found = places[sample]
        assert found is not None
        assert files.read_value(str(segment.path), 7, sample, *found[1:]) == values[sample]
    gone = places[0]
    assert gone is not None
    with pytest.raises(EntryError):
        files.read_value(str(segment.path), 7, 0, *gone[1:])
    entry = StoredEntry(7, 0, *files.append(str(segment.path), 7, 0, values[0]))
    assert entry.offset > segment.end - 64, "space that was given back is not used again"
    store.seal(segment)
    assert store.give_back(table, [2, 3], 1 << 30) > 0
    assert segment.path.exists()
    files.close()


def test_a_file_whose_entries_are_all_gone_is_removed(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "decoded", 1 << 30)
    store.clear()
    table, files = Table(7, 4, 0, 0.0), SegmentFiles()
    segment = store.create("writer", table, MIB)
    for sample in range(4):
        entry = StoredEntry(7, sample, *files.append(str(segment.path), 7, sample, bytes(20_000)))
        table.add(segment, entry)
        store.grow(segment, entry.offset + entry.length)
    store.seal(segment)
    store.give_back(table, range(4), 1 << 30)
    assert not segment.path.exists()
    assert store.bytes == store.used == table.bytes == table.entries == 0
    assert not table.segments
    free_spans({segment.path: [(0, 4096)]})  # of a file that is gone: nothing happens
    files.close()


def filled(store: SegmentStore, lengths: Sequence[int], include: Callable[[Integers], Flags]) -> Segment:
    """A sealed segment with entries of these lengths, of a table whose samples are asked for by `include`."""
    table, at = Table(7, len(lengths), 0, 0.0), 0
    table.note_request(SampleSet("s", len(lengths), own=OwnRows(1, include)), 0.0)
    segment = store.create("writer", table, 64 * MIB)
    for sample, length in enumerate(lengths):
        table.add(segment, StoredEntry(7, sample, at, length))
        at += length
        store.grow(segment, at)
    store.seal(segment)
    return segment


def none_of(samples: Integers) -> Flags:
    return np.zeros(samples.size, np.bool_)


def test_entries_that_fill_no_block_are_not_looked_at_again(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "decoded", 1 << 30)
    store.clear()
    moved, table = UnownedEntries(store), filled(store, [4096, 3000, 5000, 9000, 64], none_of).table
    assert moved.give_back([table], 1) is None
    asyncio.run(moved.find())
    assert repr(moved) == "<UnownedEntries, 2 found>"
    assert moved.give_back([table], 1 << 30) == 4096 + 2 * 4096
    assert [table.find(sample) is None for sample in range(5)] == [True, False, False, True, False]
    assert moved.give_back([table], 1 << 30) is None


def test_many_are_dropped_in_steps_between_which_others_are_served(tmp_path: Path) -> None:
    """A quota lowered by hundreds of gigabytes gives back millions of entries."""
    freed: list[int] = []
    store = SegmentStore(
        tmp_path / "decoded",
        1 << 30,
        free=lambda spans: freed.append(sum(len(places) for places in spans.values())),
    )
    store.clear()
    count = 3 * AT_ONCE + 1
    moved, table = UnownedEntries(store), filled(store, [4096] * count, none_of).table
    moved.give_back([table], 1)
    asyncio.run(moved.find())
    steps = 0
    while moved.give_back([table], 1 << 40) is not None:
        steps += 1
        assert freed[-1] <= AT_ONCE
    assert steps == 4
    assert sum(freed) == count
    assert store.bytes == table.bytes == table.entries == 0


def test_a_quota_is_kept_in_steps_and_slices_that_come_meanwhile_do_not_wait(
    tmp_path: Path, pictures: list[tuple[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unowned_entries, "AT_ONCE", 2)
    node = DecodedCacheNode(tmp_path, pictures, 1 << 30)
    try:
        node.ask_for(BEFORE)
        epochs(node, 0, BEFORE)
        mine = BEFORE[:8]
        node.ask_for(mine)
        node.epoch(TEXT, 3, mine)
        node.quota = 12 * BYTES
        node.epoch(TEXT, 4, mine)
        node.find_moved()
        steps = 0
        for _ in node.cache.fit(1 << 40, 1 << 39):
            steps += 1
            before = len(kept(node))
            node.epoch(TEXT, 4 + steps, mine)
            assert before - len(kept(node)) <= 2
        assert steps > 4
        assert node.cache.bytes <= node.quota
        assert node.cache.bytes > node.quota - 4 * BYTES, "more was dropped than the quota demands"
        assert set(mine) <= kept(node)
    finally:
        node.close()


def test_a_table_that_is_dropped_while_it_is_searched_is_forgotten(tmp_path: Path) -> None:
    store = SegmentStore(tmp_path / "decoded", 1 << 30)
    store.clear()
    searching, dropped = threading.Event(), threading.Event()

    def slowly(samples: Integers) -> Flags:
        searching.set()
        assert dropped.wait(20)
        return none_of(samples)

    async def run() -> None:
        moved, segment = UnownedEntries(store), filled(store, [10_000] * 4, slowly)
        moved.give_back([segment.table], 1)
        finding = asyncio.create_task(moved.find())
        assert await asyncio.to_thread(searching.wait, 20)
        store.drop(segment)
        moved.forget(segment.table)
        dropped.set()
        await finding
        assert repr(moved) == "<UnownedEntries, 0 found>"

    asyncio.run(run())
