"""Pieces of an origin's answer: as large as comes quickly."""

from __future__ import annotations

import sys

import pytest

from meshd.origins.client.obstore_origin import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES, ChunkSizer
from meshd.util.malloc_tuning import keep_freed_pages


def test_a_quick_origin_is_told_in_larger_pieces_than_a_slow_one() -> None:
    pace, pieces = ChunkSizer(), list[int]()
    for rate in (1e6, 30e6, 100e6, 1e9):
        pace.record_transfer(8 << 20, (8 << 20) / rate)
        pieces.append(pace.chunk_bytes())
    assert pieces[0] == MIN_CHUNK_BYTES
    assert pieces[-1] == MAX_CHUNK_BYTES
    assert MIN_CHUNK_BYTES < pieces[1] == int(30e6 * 0.005) < pieces[2] < MAX_CHUNK_BYTES


def test_small_answers_say_nothing_of_an_origin() -> None:
    pace = ChunkSizer()
    before = pace.chunk_bytes()
    pace.record_transfer(100 << 10, 10.0)
    pace.record_transfer(0, 0.0)
    assert pace.chunk_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_the_c_library_is_told_once_what_to_keep() -> None:
    assert keep_freed_pages()
    assert keep_freed_pages.cache_info().misses == 1
