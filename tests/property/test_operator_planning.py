"""Laws of the placement planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshoperator.inventory import Dataset, Demand, Inventory, StorageNode
from meshoperator.planning import plan
from meshoperator.settings import OperatorSettings

if TYPE_CHECKING:
    import random

GIB = 1 << 30
NODES = tuple(
    StorageNode(f"n{i}", f"z{i % 2}", f"r{i % 4}", capacity=100 * GIB, used=(i * 7 % 50) * GIB)
    for i in range(6)
)


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    names = [f"n{i}" for i in range(draw(st.integers(1, 6)))]
    nodes = tuple(
        StorageNode(
            name,
            draw(st.sampled_from(["za", "zb"])),
            draw(st.sampled_from(["r1", "r2", "r3"])),
            capacity=draw(st.integers(0, 100)),
            used=draw(st.integers(0, 100)),
            accepting=draw(st.booleans()),
        )
        for name in names
    )
    datasets = tuple(
        Dataset(f"d{i}", draw(st.integers(1, 60)), draw(st.integers(1, 3)), draw(st.integers(0, 2)))
        for i in range(draw(st.integers(0, 4)))
    )
    where = (st.sampled_from(["za", "zb"]), st.just("r1"), st.sampled_from(names), st.integers(0, 9))
    demand = tuple(
        Demand(each.name, *(draw(part) for part in where))  # type: ignore[arg-type]  # in the order of the fields
        for each in datasets
        if draw(st.booleans())
    )
    current = {each.name: tuple(draw(st.sets(st.sampled_from(names), max_size=3))) for each in datasets}
    return Inventory(nodes, datasets, demand, current)


@given(inventories())
def test_the_invariants_of_a_placement(inventory: Inventory) -> None:
    settings = OperatorSettings()
    placement = plan(inventory, settings)
    nodes = {node.name: node for node in inventory.nodes}
    places = [(each.dataset, each.node) for each in placement.assignments]
    assert len(places) == len(set(places))
    assert all(nodes[node].accepting for _, node in places)
    for name, node in nodes.items():
        added = sum(move.size for move in placement.moves if move.target == name)
        assert not added or node.used + added <= node.capacity * settings.high_watermark
    for dataset in inventory.datasets:
        placed = [node for name, node in places if name == dataset.name]
        assert len(placed) == dataset.copies or dataset.name in placement.unplaced
        held = set(inventory.current[dataset.name])
        targets = {move.target for move in placement.moves if move.dataset == dataset.name}
        assert targets == set(placed) - held
    assert all(each.reason for each in placement.assignments)


@given(inventories(), st.randoms(use_true_random=False))
def test_the_order_of_the_inventory_does_not_matter(inventory: Inventory, chance: random.Random) -> None:
    def mixed(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(chance.sample(items, len(items)))

    other = Inventory(
        mixed(inventory.nodes), mixed(inventory.datasets), mixed(inventory.demand), inventory.current
    )
    assert plan(inventory, OperatorSettings()) == plan(other, OperatorSettings())


@given(inventories())
def test_a_settled_cluster_stays_as_it_is(inventory: Inventory) -> None:
    """Planning again after the moves were done moves nothing, as long as free space alone changed little."""
    first = plan(inventory, OperatorSettings(move_gain=1.0))
    reached = {
        each.name: tuple(a.node for a in first.assignments if a.dataset == each.name)
        for each in inventory.datasets
    }
    again = plan(
        Inventory(inventory.nodes, inventory.datasets, inventory.demand, reached),
        OperatorSettings(move_gain=10.0),
    )
    for dataset in inventory.datasets:
        if dataset.copies == 1 and dataset.name not in first.unplaced:
            assert not [move for move in again.moves if move.dataset == dataset.name]


def test_copies_go_near_the_gpus_and_apart_from_each_other() -> None:
    demand = (Demand("photos", "z1", "r1", "n1", gpus=8),)
    placement = plan(Inventory(NODES, (Dataset("photos", GIB, copies=2),), demand), OperatorSettings())
    first, second = placement.assignments
    assert first.node == "n1"
    assert first.reason == "new copy: 8 GPUs in the same host"
    zones = {node.name: node.zone for node in NODES}
    assert zones[first.node] != zones[second.node]


def test_a_small_gain_moves_nothing_and_a_large_one_does() -> None:
    photos = (Dataset("photos", GIB),)
    held = {"photos": ("n3",)}
    assert plan(Inventory(NODES, photos, current=held), OperatorSettings()).moves == ()
    demand = (Demand("photos", "z0", "r0", "n0", gpus=8),)
    (move,) = plan(Inventory(NODES, photos, demand, held), OperatorSettings()).moves
    assert (move.source, move.target) == ("n3", "n0")


def test_what_does_not_fit_is_said() -> None:
    placement = plan(Inventory(NODES, (Dataset("huge", 90 * GIB),)), OperatorSettings())
    assert placement.assignments == ()
    assert "0 of 1 copies placed" in placement.unplaced["huge"]


@pytest.mark.parametrize(
    "wrong", [{"high_watermark": 0}, {"resync_seconds": 0}, {"moves_at_once": 0}, {"move_gain": -1}]
)
def test_contradictory_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        OperatorSettings(**wrong)  # type: ignore[arg-type]  # each value fits its field
