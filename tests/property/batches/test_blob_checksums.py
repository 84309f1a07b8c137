"""The checksum of bytes that are whole extents follows from theirs, and of no others is one claimed."""

from __future__ import annotations

from itertools import accumulate

from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from meshd.batches.blob_reader import stored_crc32c
from meshd.store.records import Extent


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.data())
def test_checksums_of_whole_extents(parts: list[bytes], data: st.DataObject) -> None:
    extents = tuple(Extent(0, number, 0, len(part), crc32c(part)) for number, part in enumerate(parts))
    whole, edges = b"".join(parts), {0, *accumulate(map(len, parts))}
    offset = data.draw(st.integers(0, len(whole) - 1))
    length = data.draw(st.integers(1, len(whole) - offset))
    expected = crc32c(whole[offset : offset + length]) if {offset, offset + length} <= edges else None
    assert stored_crc32c(extents, offset, length) == expected
