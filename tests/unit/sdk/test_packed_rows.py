"""Masks, bounds and labels of packed rows: as counted by hand, and the same for numpy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from meshsdk import packed_rows

torch = pytest.importorskip("torch")

SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 2, 2, 2, 2, 2]], np.int32)
TOKENS = np.arange(14, dtype=np.uint16).reshape(2, 7)


@pytest.fixture(params=["numpy", "torch"])
def arrays(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    if request.param == "numpy":
        return TOKENS, SEGMENTS
    return torch.from_numpy(TOKENS), torch.from_numpy(SEGMENTS)


def test_an_element_sees_its_own_piece_alone(arrays: tuple[Any, Any]) -> None:
    _, segments = arrays
    causal = np.asarray(packed_rows.attention_mask(segments))
    both = np.asarray(packed_rows.attention_mask(segments, causal=False))
    mask_mod = packed_rows.same_piece(segments)
    assert causal.shape == (2, 1, 7, 7)
    for row in range(2):
        for query in range(7):
            for key in range(7):
                same = SEGMENTS[row, query] == SEGMENTS[row, key]
                assert both[row, 0, query, key] == same
                assert (
                    causal[row, 0, query, key]
                    == (same and key <= query)
                    == bool(mask_mod(row, 0, query, key))
                )


def test_bounds_are_those_of_the_pieces(arrays: tuple[Any, Any]) -> None:
    bounds, longest = packed_rows.sequence_bounds(arrays[1])
    assert np.asarray(bounds).tolist() == [0, 3, 5, 7, 8, 14]
    assert str(bounds.dtype).endswith("int32")
    assert longest == 6


def test_labels_do_not_cross_pieces(arrays: tuple[Any, Any]) -> None:
    before = TOKENS.copy(), SEGMENTS.copy()
    found = np.asarray(packed_rows.next_token_labels(*arrays))
    assert found.dtype == np.int64
    assert found.tolist() == [[1, 2, -100, 4, -100, -100, -100], [-100, 9, 10, 11, 12, 13, -100]]
    found = np.asarray(packed_rows.piece_labels(*arrays, ignore=-1))
    assert found.tolist() == [[-1, 1, 2, -1, 4, -1, -1], [-1, -1, 9, 10, 11, 12, 13]]
    assert np.array_equal(before[0], TOKENS)
    assert np.array_equal(before[1], SEGMENTS)
