"""Laws of the placement planner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshoperator.planners.placement_model import Dataset, Demand, FreeGpus, Inventory, StorageNode
from meshoperator.planners.placement_planner import plan_placement
from meshoperator.settings import OperatorSettings

if TYPE_CHECKING:
    import random

    from meshoperator.planners.placement_model import Placement

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
    placement = plan_placement(inventory, settings)
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
    assert plan_placement(inventory, OperatorSettings()) == plan_placement(other, OperatorSettings())


def applied(inventory: Inventory, placement: Placement) -> Inventory:
    """The world after all moves were made."""
    current = {name: set(held) for name, held in inventory.current.items()}
    used = {node.name: node.used for node in inventory.nodes}
    sizes = {dataset.name: dataset.size for dataset in inventory.datasets}
    for move in placement.moves:
        current[move.dataset].add(move.target)
        used[move.target] += move.size
    leaving = {(move.dataset, move.source) for move in placement.moves if move.source} | set(
        placement.released
    )
    for name, node in leaving:
        current[name].discard(node)
        used[node] = max(0, used[node] - sizes[name])
    nodes = tuple(replace(node, used=used[node.name]) for node in inventory.nodes)
    held = {name: tuple(sorted(names)) for name, names in current.items()}
    return replace(inventory, nodes=nodes, current=held)


@given(inventories())
def test_what_was_planned_stays_as_it_is(inventory: Inventory) -> None:
    """With room for everything, planning again after the moves were made moves nothing."""
    inventory = replace(inventory, nodes=tuple(replace(node, capacity=1 << 20) for node in inventory.nodes))
    settings = OperatorSettings(moves_at_once=1000)
    after = applied(inventory, plan_placement(inventory, settings))
    again = plan_placement(after, settings)
    assert (again.moves, again.released) == ((), ())


@given(inventories())
def test_plans_come_to_rest(inventory: Inventory) -> None:
    """However scarce the room is: what is moved is worth it, and so there is an end to it."""
    settings = OperatorSettings(moves_at_once=1)
    for _ in range(40):
        placement = plan_placement(inventory, settings)
        if not placement.moves and not placement.released:
            return
        inventory = applied(inventory, placement)
    raise AssertionError("it goes on moving")


@given(inventories())
def test_nodes_that_do_not_accept_are_emptied(inventory: Inventory) -> None:
    placement = plan_placement(inventory, OperatorSettings())
    after = applied(inventory, placement)
    closed = {node.name for node in inventory.nodes if not node.accepting}
    for dataset in inventory.datasets:
        if dataset.name not in placement.unplaced:
            assert not closed & set(after.current[dataset.name])


@given(inventories())
def test_copies_stand_in_different_racks_where_there_are_such(inventory: Inventory) -> None:
    nodes = {node.name: node for node in inventory.nodes}
    roomy = tuple(replace(node, capacity=1 << 20) for node in inventory.nodes)
    placement = plan_placement(replace(inventory, nodes=roomy, current={}), OperatorSettings())
    racks = {(node.zone, node.rack) for node in inventory.nodes if node.accepting}
    for dataset in inventory.datasets:
        placed = [nodes[each.node] for each in placement.assignments if each.dataset == dataset.name]
        assert len({(node.zone, node.rack) for node in placed}) == min(len(placed), len(racks))


@given(inventories(), st.integers(0, 200), st.integers(1, 3))
def test_moves_for_the_better_keep_to_the_bandwidth(inventory: Inventory, rate: int, at_once: int) -> None:
    settings = OperatorSettings(move_bytes_per_second=rate, plan_seconds=1, moves_at_once=at_once)
    placement = plan_placement(inventory, settings)
    forced = plan_placement(inventory, replace(settings, move_bytes_per_second=0))
    better = [move for move in placement.moves if not move.reason.startswith(("new copy", "keeps"))]
    assert len({move.dataset for move in better}) <= at_once
    assert sum(move.size for move in better) <= rate or len(better) == 1
    assert not [move for move in forced.moves if not move.reason.startswith("new copy")]


def test_many_gpus_far_away_get_a_copy_of_their_own() -> None:
    demand = (Demand("photos", "z0", "r0", "n0", gpus=8), Demand("photos", "z1", "r1", "n1", gpus=8))
    one = plan_placement(Inventory(NODES, (Dataset("photos", GIB),), demand), OperatorSettings())
    assert len(one.assignments) == 1
    two = plan_placement(Inventory(NODES, (Dataset("photos", GIB, more=3),), demand), OperatorSettings())
    assert {each.node for each in two.assignments} == {"n0", "n1"}
    assert two.assignments[1].reason.startswith("one more copy: 8 GPUs in the same host")
    calm = Inventory(NODES, (Dataset("photos", GIB, more=3),), (), {"photos": ("n0", "n1")})
    assert plan_placement(calm, OperatorSettings()).released == (("photos", "n1"),)


def test_pending_pods_draw_copies_to_where_gpus_are_free() -> None:
    demand = (Demand("photos", "", "", "", gpus=8),)
    free = (FreeGpus("z1", "r3", "n3", 8),)
    inventory = Inventory(NODES, (Dataset("photos", GIB),), demand, free_gpus=free)
    assert plan_placement(inventory, OperatorSettings()).assignments[0].node == "n3"


def test_labels_disks_and_full() -> None:
    nodes = tuple(
        replace(node, tier="nvme" if node.name == "n4" else "hdd", labels={"pool": "a" if n < 3 else "b"})
        for n, node in enumerate(NODES)
    )
    fast = Dataset("fast", GIB, tiers=("nvme", "ssd"))
    full = Dataset("full", GIB, full=True, selector={"pool": "b"})
    placement = plan_placement(Inventory(nodes, (fast, full)), OperatorSettings())
    assert [each.node for each in placement.assignments] == ["n4", "n3", "n4", "n5"]
    assert placement.considered["full"] == "of 6 nodes 3 have other labels"


def test_copies_go_near_the_gpus_and_apart_from_each_other() -> None:
    demand = (Demand("photos", "z1", "r1", "n1", gpus=8),)
    placement = plan_placement(
        Inventory(NODES, (Dataset("photos", GIB, copies=2),), demand), OperatorSettings()
    )
    first, second = placement.assignments
    assert first.node == "n1"
    assert first.reason == "new copy: 8 GPUs in the same host"
    zones = {node.name: node.zone for node in NODES}
    assert zones[first.node] != zones[second.node]


def test_a_small_gain_moves_nothing_and_a_large_one_does() -> None:
    photos = (Dataset("photos", GIB),)
    held = {"photos": ("n3",)}
    assert plan_placement(Inventory(NODES, photos, current=held), OperatorSettings()).moves == ()
    demand = (Demand("photos", "z0", "r0", "n0", gpus=8),)
    (move,) = plan_placement(Inventory(NODES, photos, demand, held), OperatorSettings()).moves
    assert (move.source, move.target) == ("n3", "n0")


def test_what_does_not_fit_is_said() -> None:
    placement = plan_placement(Inventory(NODES, (Dataset("huge", 90 * GIB),)), OperatorSettings())
    assert placement.assignments == ()
    assert "0 of 1 copies placed" in placement.unplaced["huge"]


@pytest.mark.parametrize(
    "wrong", [{"high_watermark": 0}, {"resync_seconds": 0}, {"moves_at_once": 0}, {"move_gain": -1}]
)
def test_contradictory_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must"):
        OperatorSettings(**wrong)  # type: ignore[arg-type]  # each value fits its field
