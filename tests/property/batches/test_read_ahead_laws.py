"""Laws of reads ahead: reads cover every extent, in order and once; windows respect the budget."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshd.batches.read_ahead.extents import plan_reads, window_end

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


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=80),
    st.integers(1, 20_000),
    st.integers(0, 1000),
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_a_window_has_a_sample_and_respects_its_budget(
    lengths: list[int], most: int, first: int, blocks: list[int]
) -> None:
    sizes, ends = np.array(lengths, np.int64), np.cumsum(blocks).astype(np.int64)
    for boundaries in (None, ends):
        end = window_end(sizes, most // 4, most, first, boundaries)
        assert first < end <= first + len(lengths)
        assert end == first + 1 or sum(lengths[: end - first]) <= most
    inside = [int(end) for end in ends if first < end <= first + len(lengths)]
    if inside and sum(lengths[: inside[0] - first]) <= most:
        assert end in inside
        smaller = [each for each in inside if each < end]
        assert all(sum(lengths[: each - first]) < most // 4 for each in smaller)
