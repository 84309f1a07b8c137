"""Nodes of a mesh keep together what their limits allow, whichever of them is asked for which samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.transform.decoded_cache.policy import Limit, find_room, find_share, is_admitted
from meshd.transform.decoded_cache.sample_set import OwnRows, SampleSet

SAMPLES = 40_000
LEAST = 0.9

owners = st.lists(st.integers(2, 8), min_size=1, max_size=4)
"""How many samples each node is asked for, relative to the others."""


def rows(count: int) -> OwnRows:
    return OwnRows(count, lambda samples: samples < count)


def limit(size: int) -> Limit:
    return Limit(size, 0, 0, "room")


@settings(max_examples=25, deadline=None)
@given(owners, st.floats(0.3, 1.3), st.floats(60.0, 2e6), st.integers(0, 1 << 30))
def test_nodes_keep_together_what_they_have_room_for(
    weights: list[int], fits: float, size: float, seed: int
) -> None:
    chances = np.array(weights) / sum(weights)
    owner = np.random.default_rng(seed).choice(len(weights), SAMPLES, p=chances)
    kept = allowed = 0
    for node in range(len(weights)):
        asked = np.flatnonzero(owner == node).tolist()
        room = int(fits * size * SAMPLES / len(weights))
        share, _ = find_share([limit(room)], size, SampleSet("s", SAMPLES, own=rows(len(asked))).asked)
        places = int(find_room([limit(room)], size)[0] // size)
        admitted = sum(is_admitted(sample, share) for sample in asked)
        if places >= len(asked):
            assert admitted == len(asked), "there is room for all of them"
        kept += min(admitted, places)
        allowed += min(len(asked), int(room // size))
    assert kept >= LEAST * allowed


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_who_is_asked_for_fewer_keeps_the_same_and_more(room: int, size: int, some: int, more: int) -> None:
    """So whoever joins or leaves: what was kept before is what a larger share would keep."""
    fewer, rest = sorted((some, more))
    larger, smaller = (find_share([limit(room)], size, asked)[0] for asked in (fewer, rest))
    assert 0 <= smaller <= larger <= 1
    for sample in range(50):
        assert is_admitted(sample, larger) >= is_admitted(sample, smaller)


@given(st.integers(0, 10**6), st.none() | st.integers(0, 10**7))
def test_a_node_is_never_asked_for_more_than_there_are(count: int, own: int | None) -> None:
    asked = SampleSet("s", count, own=None if own is None else rows(own)).asked
    assert 0 <= asked <= count
    assert asked == (count if own is None else min(count, own))
