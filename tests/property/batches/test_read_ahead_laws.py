"""Laws of reads ahead: reads cover every extent, in order and once; windows respect the budget."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshd.batches.read_ahead.extents import merge_ranges, plan_reads
from meshd.batches.read_ahead.own_samples import OwnSampleFinder
from meshd.batches.read_ahead.windows import MIN_WINDOW_BYTES, cut_window, window_between, window_end
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields
from meshwire.plan.shuffle import ShuffleSpec, shuffle_order

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.core.peer_source import PeerSource

    Slots = npt.NDArray[np.bool_]

FIELDS = parse_fields({"image": {"ext": "bin"}})
extents = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 1 << 22), st.integers(1, 200_000)), min_size=0, max_size=60
)


@given(extents, st.integers(0, 1 << 20), st.integers(1, 64).map(lambda pages: pages * 4096))
def test_reads_cover_every_extent_once_and_in_order(
    found: list[tuple[int, int, int]], gap: int, read: int
) -> None:
    table = np.array(found, np.int64).reshape(-1, 3)
    reads = plan_reads(table[:, 0], table[:, 1], table[:, 2], gap=gap, read=read)
    issued = list(zip(reads.files.tolist(), reads.offsets.tolist(), reads.lengths.tolist(), strict=True))
    assert all(0 < length <= read and offset % 4096 == 0 for _, offset, length in issued)
    for (file, offset, length), (after, place, _) in itertools.pairwise(issued):
        assert file < after or (file == after and offset + length <= place)
    for file, offset, length in found:
        covered = sum(
            max(0, min(offset + length, start + size) - max(offset, start))
            for number, start, size in issued
            if number == file
        )
        assert covered == length


@given(extents, st.integers(0, 1 << 20))
def test_only_gaps_up_to_the_limit_are_read(found: list[tuple[int, int, int]], gap: int) -> None:
    table = np.array(found, np.int64).reshape(-1, 3)
    reads = plan_reads(table[:, 0], table[:, 1], table[:, 2], gap=gap, read=1 << 30)
    assert reads.seeks == len(reads)
    pages = sum(length + 2 * 4096 for _, _, length in found)
    assert reads.bytes <= pages + gap * max(0, len(found) - len(reads))
    for first, second in zip(range(len(reads)), range(1, len(reads)), strict=False):
        if reads.files[first] == reads.files[second]:
            assert reads.offsets[second] - reads.offsets[first] - reads.lengths[first] > gap


@given(extents, st.integers(0, 1 << 20))
def test_merged_ranges_cover_all_and_no_gap_that_is_not_read_through(
    found: list[tuple[int, int, int]], gap: int
) -> None:
    table = np.array([*found, (9, 5, 0)], np.int64)
    merged = merge_ranges(table[:, 0], table[:, 1], table[:, 2], gap=gap)
    for (one, offset, length), (other, place, _) in itertools.pairwise(merged):
        assert one < other or (one == other and offset + length + gap < place)
    for number, offset, length in found:
        assert any(
            number == one and place <= offset and offset + length <= place + size
            for one, place, size in merged
        )
    assert sum(size for *_, size in merged) <= sum(length for *_, length in found) + gap * len(found)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), min_size=1, max_size=80),
    st.integers(1, 20_000),
    st.integers(0, 1000),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_a_window_has_a_sample_and_respects_its_budget(
    found: list[tuple[bool, int]], most: int, first: int, blocks: list[int]
) -> None:
    own = np.array([each for each, _ in found])
    sizes, ends = np.array([size for _, size in found]) * own, np.cumsum(blocks).astype(np.int64)
    positions, last = np.flatnonzero(own) + first, first + len(found)
    for boundaries in (None, ends):
        end = window_end(positions, sizes[own], most // 4, most, first, last, boundaries)
        assert first < end <= last
        assert own[: end - first].sum() <= 1 or sizes[: end - first].sum() <= most
    inside = [int(end) for end in ends if first < end <= last]
    if inside and sizes[: inside[0] - first].sum() <= most:
        assert end in inside
        smaller = [each for each in inside if each < end]
        assert all(sizes[: each - first].sum() < most // 4 for each in smaller)


class Other:
    """A node of a mesh that is asked first for the slots of `first`, and second for those of `second`."""

    def __init__(self, first: Slots, second: Slots) -> None:
        self._first, self._all = first, first | second

    def slots_read_here(self, bucket: str, *, first_only: bool) -> Slots:
        return self._first if first_only else self._all


@given(st.data(), st.sampled_from([ShuffleSpec(), ShuffleSpec("none"), ShuffleSpec("blocks", 2)]))
def test_windows_of_all_nodes_have_each_sample_once_and_are_as_large_as_those_of_one(
    data: st.DataObject, shuffle: ShuffleSpec
) -> None:
    sizes = data.draw(st.lists(st.integers(1 << 20, 24 << 20), min_size=1, max_size=60))
    listing = [(f"{number:05d}.bin", "0" * 32, size) for number, size in enumerate(sizes)]
    snapshot = build_from_objects(listing, source="s3://b/", fields=FIELDS).snapshot
    order = shuffle_order(shuffle, snapshot.shard_starts, 1, 0)
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=8, max_size=8)))
    size = data.draw(st.integers(MIN_WINDOW_BYTES, 4 * MIN_WINDOW_BYTES))
    read = []
    for node in range(3):
        finder = OwnSampleFinder(cast("PeerSource", Other(owner == node, owner == (node + 1) % 3)))
        own, first = finder.find(snapshot, in_parts=True), 0
        assert own is not None
        with_copies = finder.find(snapshot, in_parts=False)
        everything = np.arange(snapshot.samples)
        assert with_copies is not None
        assert with_copies.includes(everything)[own.includes(everything)].all()
        while first < order.n:
            window = cut_window(snapshot, order, first, size, own)
            assert (window.first, window.bytes) == (first, sum(sizes[sample] for sample in window.samples))
            assert window.bytes <= size or window.samples.size == 1
            assert np.array_equal(
                window.samples, window_between(snapshot, order, first, window.end, own).samples
            )
            if shuffle.kind != "blocks" and window.end < order.n:  # no more fits
                assert own.includes(order.samples_at(np.array([window.end])))[0]
                assert window.bytes + sizes[int(order.samples_at(np.array([window.end]))[0])] > size
            read += window.samples.tolist()
            first = window.end
    assert sorted(read) == list(range(len(sizes)))
    everyone = OwnSampleFinder(cast("PeerSource", Other(owner < 3, owner < 3))).find(snapshot, in_parts=True)
    whole, alone = cut_window(snapshot, order, 0, size, everyone), cut_window(snapshot, order, 0, size)
    assert (whole.end, whole.samples.tolist()) == (alone.end, alone.samples.tolist())
