"""Of how many samples a node builds the rows: those of all nodes together are the samples of the snapshot."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.batches.read_ahead import own_samples
from meshd.batches.read_ahead.own_samples import OwnSampleFinder
from meshwire.cluster.routes import slot_of
from meshwire.dataset.build_snapshot import build_from_objects
from meshwire.dataset.fields import parse_fields

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.core.peer_source import PeerSource
    from meshwire.dataset.snapshot import Snapshot

SLOTS, NODES = 8, 3
FIELDS = parse_fields({"image": {"ext": "bin"}, "note": {"ext": "txt"}})


class Placement:
    """One of some nodes, each of which is asked first for its slots."""

    def __init__(self, owner: npt.NDArray[np.int64], node: int) -> None:
        self.owner, self.node = owner, node

    def slots_read_here(self, bucket: str, *, first_only: bool) -> npt.NDArray[np.bool_]:
        assert first_only
        assert bucket == "b"
        found: npt.NDArray[np.bool_] = self.owner == self.node
        return found


class Alone:
    def slots_read_here(self, bucket: str, *, first_only: bool) -> None:
        return None


def snapshot_of(sizes: list[tuple[int, int]]) -> Snapshot:
    """A snapshot of pairs of objects: an image and a note, of these sizes."""
    listing = [
        (f"{number:05d}.{ext}", "0" * 32, size)
        for number, pair in enumerate(sizes)
        for ext, size in zip(("bin", "txt"), pair, strict=True)
    ]
    return build_from_objects(listing, source="s3://b/", fields=FIELDS).snapshot


def count_rows(owner: npt.NDArray[np.int64], node: int, snapshot: Snapshot) -> int:
    found = asyncio.run(OwnSampleFinder(cast("PeerSource", Placement(owner, node))).find_rows(snapshot))
    assert found is not None
    return found.count


pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=60)
owners = st.lists(st.integers(0, NODES - 1), min_size=SLOTS, max_size=SLOTS)


@given(pairs, owners)
def test_each_sample_counts_where_most_of_its_bytes_are(
    sizes: list[tuple[int, int]], chosen: list[int]
) -> None:
    owner, snapshot = np.array(chosen), snapshot_of(sizes)
    expected = [0] * NODES
    for number, (image, note) in enumerate(sizes):
        ext = "bin" if image >= note else "txt"
        expected[chosen[slot_of("b", f"{number:05d}.{ext}", SLOTS)]] += 1
    assert [count_rows(owner, node, snapshot) for node in range(NODES)] == expected
    every = np.arange(snapshot.samples)
    finders = [OwnSampleFinder(cast("PeerSource", Placement(owner, node))) for node in range(NODES)]
    rows = [asyncio.run(finder.find_rows(snapshot)) for finder in finders]
    assert np.sum([each.include(every) for each in rows if each], axis=0).tolist() == [1] * snapshot.samples
    assert [np.count_nonzero(each.include(every)) for each in rows if each] == expected


@given(pairs, owners)
def test_of_many_objects_they_are_estimated_from_the_slots(
    sizes: list[tuple[int, int]], chosen: list[int]
) -> None:
    owner, snapshot = np.array(chosen), snapshot_of(sizes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(own_samples, "COUNTED_OBJECTS", 1)
        found = [count_rows(owner, node, snapshot) for node in range(NODES)]
    assert found == pytest.approx(
        [len(sizes) * chosen.count(node) / SLOTS for node in range(NODES)], abs=0.51
    )


def test_it_is_counted_again_when_the_slots_of_the_node_change() -> None:
    snapshot = snapshot_of([(2, 1)] * 40)
    placement = Placement(np.zeros(SLOTS, np.int64), 0)
    finder = OwnSampleFinder(cast("PeerSource", placement))

    async def run() -> list[int | None]:
        found = [await finder.find_rows(snapshot), await finder.find_rows(snapshot)]
        assert found[0] is found[1], "who compares them sees that nothing has changed"
        placement.owner = np.arange(SLOTS) % 2
        found.append(await finder.find_rows(snapshot))
        placement.owner = np.ones(SLOTS, np.int64)
        found.append(await finder.find_rows(snapshot))
        return [None if each is None else each.count for each in found]

    everything, again, half, nothing = asyncio.run(run())
    assert everything == again == 40
    assert half is not None
    assert 0 < half < 40
    assert nothing == 0


def test_who_has_no_other_nodes_builds_all_rows() -> None:
    found = asyncio.run(OwnSampleFinder(cast("PeerSource", Alone())).find_rows(snapshot_of([(1, 1)])))
    assert found is None
