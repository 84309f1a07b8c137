"""The decoded cache's decisions: what is kept, how much of it, and what gives way."""

from __future__ import annotations

import io
import os
import random
import resource
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from meshd.batches.warm_up.node_task import RANDOM_FIRST, why_nothing
from meshd.telemetry import metrics
from meshd.transform.decoded_cache import policy, segment_files
from meshd.transform.decoded_cache.entry_format import (
    EntryError,
    can_keep,
    check_blocks,
    decode_header,
    decode_value,
    encode_entry,
)
from meshd.transform.decoded_cache.messages import KEPT, REFUSED, STORED, TableUse
from meshd.transform.decoded_cache.policy import Candidate
from meshd.transform.decoded_cache.segment_files import SegmentFiles
from meshd.transform.decoded_cache.segment_store import MAX_SEGMENT_BYTES
from meshd.transform.decoded_cache.slice_order import BUCKET_QUOTA, NO_ROOM
from meshd.transform.decoded_cache.tables import JUDGED_READS, Table
from meshd.transform.renderer import program_digest
from meshd.util.disk_space import reserve_space
from tests.support.decoded_cache_node import DecodedCacheNode
from tests.support.transform_processes import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SAMPLES, HEIGHT, WIDTH = 80, 200, 300
BYTES = HEIGHT * WIDTH * 3
MIB = 1 << 20
CROPS: list[dict[str, Any]] = [
    {"op": "decode", "field": "image"},
    {"op": "random_resized_crop", "field": "image", "args": {"size": 160}},
]
TEXT = text_of(CROPS, ["image"])


def picture(seed: int) -> bytes:
    small = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((WIDTH, HEIGHT)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def pictures() -> list[tuple[bytes]]:
    return [(picture(number),) for number in range(SAMPLES)]


@pytest.fixture
def node(tmp_path: Path, pictures: list[tuple[bytes]]) -> Iterator[DecodedCacheNode]:
    made = DecodedCacheNode(tmp_path, pictures, 1 << 30)
    yield made
    made.close()


def hits(node: DecodedCacheNode, epoch: int, text: str = TEXT, limit: int | None = None) -> int:
    """How many samples of an epoch came from the cache."""
    before = node.hits
    node.epoch(text, epoch, random.Random(epoch).sample(range(SAMPLES), SAMPLES), limit=limit)
    return node.hits - before


def kept(node: DecodedCacheNode) -> set[int]:
    return {
        sample for table in node.cache.tables for sample in range(SAMPLES) if table.find(sample) is not None
    }


def test_with_room_for_all_everything_is_kept_once(node: DecodedCacheNode) -> None:
    assert hits(node, 0) == 0
    hits(node, 1)
    assert kept(node) == set(range(SAMPLES))
    stored = node.stored
    assert hits(node, 2) == hits(node, 3) == SAMPLES
    assert node.stored == stored == SAMPLES


def test_a_warm_up_keeps_what_the_epoch_would_have_kept(node: DecodedCacheNode) -> None:
    order = random.Random(0).sample(range(SAMPLES), SAMPLES)
    found = node.warm(TEXT, 0, order)
    assert set(found.values()) == {STORED}
    assert kept(node) == set(range(SAMPLES))
    assert hits(node, 0) == SAMPLES
    assert node.stored == node.made == 0
    assert set(node.warm(TEXT, 1, order).values()) == {KEPT}


def test_a_warm_up_says_what_there_is_no_room_for(tmp_path: Path, pictures: list[tuple[bytes]]) -> None:
    node = DecodedCacheNode(tmp_path, pictures, 5 * MIB)
    try:
        found = node.warm(TEXT, 0, range(SAMPLES))
        assert kept(node) == {sample for sample, verdict in found.items() if verdict == STORED}
        assert 0 < len(kept(node)) < SAMPLES
        assert {verdict for sample, verdict in found.items() if sample not in kept(node)} == {REFUSED}
        program, every = program_digest(TEXT), np.arange(SAMPLES)
        assert not node.cache.find_missing(program, "snapshot", every).all()
        assert node.cache.bound_of(program, "snapshot") == NO_ROOM
    finally:
        node.close()


def test_a_refusal_says_what_was_measured(node: DecodedCacheNode) -> None:
    program = program_digest(TEXT)
    assert node.cache.plan_status(program, "snapshot") is None
    node.cache.disk_rate = 50e6
    node.warm(TEXT, 0, range(SAMPLES))
    found = node.cache.plan_status(program, "snapshot")
    assert found is not None
    assert [field.kept for field in found] == [False]
    said = why_nothing(["image"], found, rotational=True)
    assert said.startswith("nothing is kept, because reading results back from a rotational disk")
    assert "to read 180 kB back" in said
    assert said.endswith("set decoded-cache-dir to a faster disk")
    assert kept(node) == set()

    node.warm(text_of([], ["image"]), 0, range(SAMPLES))
    nothing = node.cache.plan_status(program_digest(text_of([], ["image"])), "snapshot")
    assert nothing is not None
    assert why_nothing(["image"], nothing, rotational=False) == RANDOM_FIRST


def test_results_of_a_bucket_stay_within_its_quota(tmp_path: Path, pictures: list[tuple[bytes]]) -> None:
    node = DecodedCacheNode(tmp_path, pictures, 1 << 30, quota=6 * MIB)
    try:
        node.store.segment_bytes = MIB
        node.warm(TEXT, 0, range(SAMPLES))
        assert MIB < node.cache.bytes <= 6 * MIB
        assert node.cache.bytes_by_bucket()["photos"] <= 6 * MIB
        assert node.cache.bound_of(program_digest(TEXT), "snapshot") == BUCKET_QUOTA
        node.quota = 2 * MIB
        node.fit(100 << 30, 50 << 30)
        assert node.cache.bytes <= 2 * MIB
        node.quota = None
        node.warm(TEXT, 0, range(SAMPLES))
        assert kept(node) == set(range(SAMPLES))
    finally:
        node.close()


def test_it_knows_which_samples_need_not_be_read(node: DecodedCacheNode) -> None:
    samples, program = np.arange(SAMPLES), program_digest(TEXT)
    assert not node.cache.find_all(program, "snapshot", samples).any()
    hits(node, 0)
    assert set(np.flatnonzero(node.cache.find_all(program, "snapshot", samples))) == kept(node) != set()
    assert not node.cache.find_all(program, "another", samples).any()
    assert not node.cache.find_all("another", "snapshot", samples).any()


def test_with_room_for_a_third_a_fixed_third_stays(tmp_path: Path, pictures: list[tuple[bytes]]) -> None:
    room = 5 * MIB
    share = room / (SAMPLES * BYTES)
    node = DecodedCacheNode(tmp_path, pictures, room)
    try:
        hits(node, 0), hits(node, 1), hits(node, 2)
        first = kept(node)
        assert 0.5 * share < len(first) / SAMPLES <= 1.1 * share
        for epoch in range(3, 8):
            assert hits(node, epoch) >= len(first)
            assert first <= kept(node), "an entry was replaced by another of the same value"
        assert node.cache.bytes <= room + MIB
        assert sum(path.stat().st_size for path in (tmp_path / "decoded").iterdir()) <= room + MIB
    finally:
        node.close()


def test_a_share_is_a_fixed_random_part_and_grows_by_more_samples() -> None:
    parts = [
        {sample for sample in range(20_000) if policy.is_admitted(sample, share)}
        for share in (0.0, 0.1, 0.3, 1.0)
    ]
    assert [len(part) / 20_000 for part in parts] == pytest.approx([0, 0.1, 0.3, 1], abs=0.02)
    assert parts[0] <= parts[1] <= parts[2] <= parts[3]
    halves = [sum(1 for sample in parts[2] if sample // 10_000 == half) for half in range(2)]
    assert halves[0] == pytest.approx(halves[1], rel=0.1)


def test_a_node_of_a_mesh_keeps_what_there_is_room_for_of_its_own_samples(
    tmp_path: Path, pictures: list[tuple[bytes]]
) -> None:
    """Whoever joins or leaves: what is kept stays, and no more is kept than there is room for."""
    own, room = [list(range(number, SAMPLES, 4)) for number in range(4)], 2 * MIB
    node = DecodedCacheNode(tmp_path, pictures, 1 << 30, quota=room)
    try:
        for epoch in range(3):
            node.epoch(TEXT, epoch, own[0])
        unaware = kept(node)
        node.ask_for(own[0])
        for epoch in range(3, 6):
            node.epoch(TEXT, epoch, own[0])
        first = kept(node)
        assert unaware < first <= set(own[0])
        assert len(first) >= 0.7 * room / BYTES > 2 * len(unaware)
        for others in ([], own[1], own[1] + own[2] + own[3]):  # one joins, one leaves, all leave
            mine = (own[0] + others) if others else own[0][::2]
            node.ask_for(mine)
            for epoch in range(6, 9):
                node.epoch(TEXT, epoch, mine)
                assert first <= kept(node), "an entry was dropped without need"
                assert node.cache.bytes <= room
        node.quota = None
        for epoch in range(9, 12):
            node.epoch(TEXT, epoch, range(SAMPLES))
        assert kept(node) == set(range(SAMPLES))
    finally:
        node.close()


def test_a_quota_that_has_room_for_the_samples_of_the_node_leaves_nothing_out(
    tmp_path: Path, pictures: list[tuple[bytes]]
) -> None:
    own = list(range(0, SAMPLES, 4))
    node = DecodedCacheNode(tmp_path, pictures, 100 << 30, quota=6 * MIB)
    try:
        node.ask_for(own)
        for epoch in range(6):
            node.epoch(TEXT, epoch, own)
        assert kept(node) == set(own)
        node.fit(1 << 40, 1 << 39)
        assert metrics.decoded_cache_at_quota._value.get() == 0
    finally:
        node.close()


def test_a_caller_bounds_what_is_kept_for_its_plan(node: DecodedCacheNode) -> None:
    node.store.segment_bytes = MIB
    for epoch in range(3):
        assert hits(node, epoch, limit=0) == 0
    assert list((node.folder / "decoded").iterdir()) == []
    for epoch in range(3):
        hits(node, epoch, limit=4 * MIB)
    assert MIB < node.cache.bytes <= 5 * MIB


def test_a_bound_that_is_less_than_a_file_keeps_a_share(node: DecodedCacheNode) -> None:
    bound = SAMPLES * BYTES * 3 // 10
    assert node.store.segment_bytes > bound
    hits(node, 0, limit=bound), hits(node, 1, limit=bound)
    first = kept(node)
    assert 0.2 * SAMPLES <= len(first) <= 0.3 * SAMPLES
    for epoch in range(2, 5):
        assert hits(node, epoch, limit=bound) >= len(first)
        assert first <= kept(node), "an entry was replaced by another of the same value"
    assert len(kept(node)) >= 0.25 * SAMPLES
    assert node.cache.bytes <= bound


def test_open_files_of_several_processes_count_by_what_is_in_them(node: DecodedCacheNode) -> None:
    bound, writers = SAMPLES * BYTES * 3 // 10, ["first", "second", "third"]
    for epoch in range(3):
        for start in range(0, SAMPLES, 8):
            node.writer = writers[start // 8 % len(writers)]
            node.epoch(TEXT, epoch, range(start, start + 8), limit=bound)
    files = {segment.path for table in node.cache.tables for segment in table.segments.values()}
    assert len(files) >= len(writers)
    assert sum(path.stat().st_size for path in files) <= bound
    assert 0.2 * SAMPLES <= len(kept(node)) <= 0.3 * SAMPLES
    assert sum(table.bytes for table in node.cache.tables) == node.store.bytes == node.cache.bytes


def test_a_quota_smaller_than_a_file_is_used_and_lowering_it_drops_little(
    tmp_path: Path, pictures: list[tuple[bytes]]
) -> None:
    quota = 12 * MIB
    node = DecodedCacheNode(tmp_path, pictures, 100 << 30, quota=quota)
    try:
        assert node.store.segment_bytes == MAX_SEGMENT_BYTES > quota
        for epoch in range(3):
            hits(node, epoch)
        assert 0.9 * quota <= node.cache.bytes_by_bucket()["photos"] <= quota
        first = kept(node)
        node.fit(1 << 40, 1 << 39)
        assert kept(node) == first, "what is within its quota stays"
        assert metrics.decoded_cache_at_quota._value.get() == 1, "the quota leaves results out"
        node.quota = 1 << 30
        node.fit(1 << 40, 1 << 39)
        assert metrics.decoded_cache_at_quota._value.get() == 0
        node.quota = 11 * MIB
        node.fit(1 << 40, 1 << 39)
        assert 9 * MIB <= node.cache.bytes <= 11 * MIB
    finally:
        node.close()


def test_disk_space_is_reserved_for_many_entries_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[tuple[int, int]] = []

    def reserve(fd: int, offset: int, length: int) -> None:
        reserved.append((offset, length))
        reserve_space(fd, offset, length)

    monkeypatch.setattr(segment_files, "reserve_space", reserve)
    files, path, value = SegmentFiles(), tmp_path / "segment", bytes(200_000)
    path.touch()
    places = [files.append(str(path), 1, sample, value, capacity=20 * MIB) for sample in range(100)]
    assert [length for _, length in reserved] == [8 * MIB, 8 * MIB, 20 * MIB - reserved[2][0]]
    assert path.stat().st_size == sum(places[-1])
    for sample, place in enumerate(places):
        assert files.read_value(str(path), 1, sample, *place) == value
    files.close()


def test_an_entry_is_one_write_and_no_sync(
    node: DecodedCacheNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be made again is not worth a sync; nor are copies, or a transaction for each sample."""
    writes, synced, pwritev = list[tuple[int, int]](), list[int](), os.pwritev

    def counted(fd: int, buffers: Any, offset: int) -> int:
        writes.append((sum(map(len, buffers)), len(buffers)))
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", counted)
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, lambda *_: synced.append(1))
    for epoch in range(3):
        hits(node, epoch)
    assert len(writes) == len(kept(node)) == SAMPLES
    assert {parts for _, parts in writes} == {2}, "the header, and the pixels from where they were decoded to"
    assert sum(size for size, _ in writes) <= SAMPLES * (BYTES + 4 * 64)
    assert node.cache.bytes <= SAMPLES * (BYTES + 5 * 64)
    assert not synced


def test_what_is_in_memory_is_not_read_ahead(node: DecodedCacheNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for epoch in range(2):
        hits(node, epoch)
    advised, disk_reads = list[int](), [0]
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: advised.append(fd))
    usage = resource.getrusage(resource.RUSAGE_THREAD)

    def getrusage(who: int) -> Any:
        return SimpleNamespace(ru_inblock=disk_reads[0], ru_nvcsw=usage.ru_nvcsw)

    monkeypatch.setattr(resource, "getrusage", getrusage)
    segments = {fd for path, fd in node.segments._open.items() if path.endswith(".seg")}
    node.epoch(TEXT, 2, range(8))
    advised.clear()
    node.epoch(TEXT, 2, range(8))
    assert not segments & set(advised)
    disk_reads[0] += 8
    node.epoch(TEXT, 2, range(8))
    assert len([fd for fd in advised if fd in segments]) == 8, "a read came from the disk: those after it may"


def test_space_that_others_need_is_given_back(node: DecodedCacheNode) -> None:
    hits(node, 0), hits(node, 1)
    total = 100 << 30
    node.fit(total, total // 2)
    assert hits(node, 2) == SAMPLES
    node.fit(total, total // 20)
    assert node.cache.bytes == 0
    assert [path for path in (node.folder / "decoded").iterdir() if path.stat().st_size] == []
    assert hits(node, 3) == 0
    node.fit(total, total // 2)
    hits(node, 4), hits(node, 5)
    assert hits(node, 6) == SAMPLES


def test_what_is_worth_more_a_byte_takes_the_place_of_what_is_not_read(
    tmp_path: Path, pictures: list[tuple[bytes]]
) -> None:
    node = DecodedCacheNode(tmp_path, pictures, 20 * MIB)
    small: list[dict[str, Any]] = [
        CROPS[0],
        {"op": "resize", "field": "image", "args": {"size": [40, 40]}},
        *crops(32),
    ]
    try:
        for epoch in range(3):
            hits(node, epoch)
        large = kept(node)
        text = text_of(small, ["image"])
        for epoch in range(3):
            hits(node, epoch, text)
        assert hits(node, 3, text) == SAMPLES  # results of 5 KB, each worth as much as one of 180 KB
        assert 0 < hits(node, 4) <= len(large)
    finally:
        node.close()


def crops(size: int) -> list[dict[str, Any]]:
    return [{"op": "random_crop", "field": "image", "args": {"size": size}}]


def table() -> Table:
    made = Table(7, SAMPLES, 0, 0.0)
    made.cost.add(0.1, 100)
    made.size.add(100 * BYTES, 100)
    return made


def test_a_table_that_is_read_as_slowly_as_it_is_computed_is_found_out() -> None:
    fast, slow = table(), table()
    fast.record_use(TableUse(7, hits=JUDGED_READS, hit_seconds=0.0002 * JUDGED_READS), 1.0)
    slow.record_use(TableUse(7, hits=JUDGED_READS, hit_seconds=0.0009 * JUDGED_READS), 1.0)
    assert not fast.is_slow(1.0)
    assert slow.is_slow(1.0)
    assert not slow.is_slow(1.0), "it is judged by new reads only"
    slow.set_limit(5, 1.0)
    slow.is_slow(10.0)
    assert slow.limit == 5
    slow.is_slow(1e5)
    assert slow.limit is None


def test_entries_that_take_longer_to_write_than_to_compute_are_not_written_for_a_while() -> None:
    slow = table()
    slow.record_use(TableUse(7, stores=10, store_seconds=0.005), 1.0)
    assert slow.paused_until == 0
    slow.record_use(TableUse(7, stores=10, store_seconds=0.5), 2.0, in_advance=True)
    assert slow.paused_until == 0, "nobody waited for these writes"
    slow.record_use(TableUse(7, stores=10, store_seconds=0.5), 2.0)
    assert slow.paused_until > 2.0


def test_a_warm_up_stores_everything_while_batches_do_not_write(node: DecodedCacheNode) -> None:
    node.store.segment_bytes = MIB
    hits(node, 0)
    for each in node.cache.tables:
        each.paused_until = 1e9
    before = len(kept(node))
    hits(node, 1)
    assert len(kept(node)) < SAMPLES, "a batch begins no segment during the pause"
    assert len(kept(node)) - before <= MIB // BYTES + 1
    node.warm(TEXT, 0, range(SAMPLES))
    assert len(kept(node)) == SAMPLES


def test_the_prefix_that_saves_most_in_an_epoch_is_chosen() -> None:
    decoded = Candidate(1, 0, "a", 10, 0.010, 10 * 600_000)  # 1 ms, 600 KB
    resized = Candidate(2, 0, "b", 10, 0.012, 10 * 200_000)
    floats = Candidate(3, 0, "c", 10, 0.0121, 10 * 800_000)  # 0.01 ms more for four times the bytes
    larger = Candidate(2, 0, "f", 10, 0.0105, 10 * 800_000)
    ample, tight = 1 << 40, 1_000 * 100_000
    assert policy.choose_prefix([decoded, resized, floats], 1_000, ample) == 2
    assert policy.choose_prefix([decoded, larger], 1_000, ample) == 1
    assert policy.choose_prefix([decoded, resized], 1_000, tight) == 2
    assert policy.choose_prefix([Candidate(1, 0, "d", 10, 0.0002, 10_000)], 1_000, ample) is None  # 20 µs
    assert policy.choose_prefix([Candidate(1, 0, "e", 10, 0.001, 10 * 400_000)], 1_000, ample) is None
    assert policy.choose_prefix([], 1_000, ample) is None


def test_on_a_rotational_disk_results_much_larger_than_their_files_are_not_kept() -> None:
    ample, rate, files = 1 << 40, 150e6, 10 * 70_000
    pixels = Candidate(1, 0, "a", 10, 0.008, 10 * 560_000, files)
    small = Candidate(2, 0, "b", 10, 0.010, 10 * 60_000, files)
    tokens = Candidate(1, 0, "c", 10, 0.002, 10 * 4_000, 10 * 4_000)
    assert policy.choose_prefix([pixels], 1_000, ample) == 1
    assert policy.choose_prefix([pixels], 1_000, ample, rate) is None
    assert policy.choose_prefix([pixels, small], 1_000, ample, rate) == 2
    assert policy.choose_prefix([tokens], 1_000, ample, rate) == 1


@pytest.mark.parametrize(
    "value",
    [
        b"some bytes",
        bytes(200_000),
        np.arange(100_000, dtype=np.float32).reshape(50, 40, 50),
        np.arange(300, dtype=np.int64)[::-3],
        np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4)),
        np.array([[1.5]], ">f8"),
    ],
)
def test_an_entry_gives_its_value_back_or_an_error(value: Any) -> None:
    head, body = encode_entry(3, 5, value)
    data = np.frombuffer(head + bytes(body), np.uint8)
    header = decode_header(data.data, 3, 5, len(data))
    rest = data[header.size :].copy()
    check_blocks(header, 0, rest.data)
    got: Any = decode_value(header, rest)
    assert type(got) is type(value)
    if isinstance(value, np.ndarray):
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
    else:
        assert got == value
    rng = random.Random(1)
    for _ in range(200):
        at = rng.randrange(len(data))
        wrong = data.copy()
        wrong[at] ^= 1 << rng.randrange(8)
        try:
            header = decode_header(wrong.data, 3, 5, len(data))
            check_blocks(header, 0, wrong[header.size :].data)
            assert _is_padding(at, header.size, len(body)), f"byte {at} was changed unnoticed"
        except EntryError:
            pass
    for other in ((4, 5), (3, 6)):
        with pytest.raises(EntryError, match="another sample"):
            decode_header(data.data, *other, len(data))
    with pytest.raises(EntryError):
        decode_header(data.data[:50], 3, 5, len(data))


def _is_padding(at: int, header: int, body: int) -> bool:
    """The bytes that mean nothing: beside the checksum, and after the last block's."""
    return 12 <= at < 16 or header - 64 < at < header


def test_what_cannot_be_an_entry() -> None:
    assert not can_keep(b"")
    assert not can_keep(np.zeros((1,) * 5, np.uint8))
    assert not can_keep(np.array(["text"]))
    assert not can_keep(7)
    assert not can_keep(np.zeros(65 << 20, np.uint8))
