"""Laws of preference lists, of assignment and of splits of slots."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.cluster.rebalance.sync_plan import plan_sync
from meshwire.cluster import ClusterMap, Node, compute_placement, parse_map, routes
from meshwire.cluster import transitions as turn
from meshwire.cluster.cluster_map import MAX_SLOTS, Share
from meshwire.cluster.placement import LISTS, SLACK, assign_slots
from meshwire.cluster.preferences import preference_lists, slot_costs, updated_lists
from meshwire.cluster.transitions import TransitionError

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.cluster.cluster_map import State

SLOTS = 1 << 7


@st.composite
def members(draw: st.DrawFn, least: int = 1, most: int = 90) -> tuple[Share, ...]:
    count, zones = draw(st.integers(least, most)), draw(st.integers(0, 6))
    weights = draw(st.sampled_from([(1, 1), (1, 12), (1, 1000)]))
    skewed = draw(st.booleans())
    return tuple(
        Share(
            f"n{number:03}",
            f"z{(0 if skewed and number % 3 else number) % zones}" if zones else "",
            draw(st.integers(*weights)),
        )
        for number in range(count)
    )


def in_turn(shares: tuple[Share, ...], slots: int, copies: int) -> npt.NDArray[np.int16]:
    """Slot by slot, as the law of `assignment` says it: every node sorted, nothing left out."""
    table = np.full((slots, copies), -1, np.int16)
    order = np.argsort(slot_costs(shares, np.arange(slots, dtype=np.uint64)), axis=1, kind="stable")
    zones = [share.zone or f"\0{share.node_id}" for share in shares]
    total = sum(share.weight for share in shares)
    room = [-int(-(1 + SLACK) * slots * share.weight // total) for share in shares]
    for rank in range(min(copies, len(shares))):
        loads = [0] * len(shares)
        for slot in range(slots):
            own = table[slot, :rank].tolist()
            free = [place for place in order[slot].tolist() if place not in own]
            crowd = {place: sum(zones[place] == zones[other] for other in own) for place in free}
            free = [place for place in free if crowd[place] == min(crowd.values())]
            open_ = [place for place in free if loads[place] < room[place]]
            chosen = open_[0] if open_ else min(free, key=lambda place: loads[place] / shares[place].weight)
            loads[chosen] += 1
            table[slot, rank] = chosen
    return table


@settings(deadline=None, max_examples=60)
@given(members(), st.integers(1, 4))
def test_slots_that_choose_at_once_get_what_they_get_in_turn(shares: tuple[Share, ...], copies: int) -> None:
    table = np.full((SLOTS, copies), -1, np.int16)
    assign_slots(shares, preference_lists(shares, SLOTS), table)
    assert (table == in_turn(shares, SLOTS, copies)).all()


@settings(deadline=None, max_examples=30)
@given(members(70, 90), st.data())
def test_updated_lists_give_the_placement_that_new_ones_give(
    shares: tuple[Share, ...], data: st.DataObject
) -> None:
    gone = data.draw(st.sets(st.sampled_from(shares), max_size=5))
    heavier = data.draw(st.sampled_from(shares))
    other = [share for share in shares if share not in gone and share != heavier]
    other += [heavier._replace(weight=heavier.weight + 1), Share("x", "z9", heavier.weight)]
    wanted = tuple(sorted(other))
    lists = updated_lists(preference_lists(shares, SLOTS), wanted)
    if lists is None:  # the sum of the weights has changed too much
        return
    one, two = (np.full((SLOTS, 3), -1, np.int16) for _ in range(2))
    assign_slots(wanted, lists, one)
    assign_slots(wanted, preference_lists(wanted, SLOTS), two)
    assert (one == two).all()


def even(count: int, slots: int, states: tuple[State, ...] = ("up",)) -> ClusterMap:
    nodes = tuple(
        Node(
            f"n{number:03}",
            f"http://h{number}:1",
            zone=f"z{number // 5}",
            state=states[number % len(states)],
            since=number % 3,
        )
        for number in range(count)
    )
    return ClusterMap(5, nodes, slots)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 12),
    st.lists(
        st.sampled_from(["up", "draining", "away", "returning", "joining", "down"]), min_size=1, max_size=5
    ),
    st.booleans(),
    st.integers(1, 3),
)
def test_masks_and_counts_are_those_of_the_single_routes(
    count: int, states: list[State], split: bool, copies: int
) -> None:
    cluster = even(count, SLOTS, tuple(states))
    cluster = replace(cluster, base_slots=SLOTS // 4) if split else cluster
    table = routes(cluster, copies)
    every = [table.route_of_slot(slot) for slot in range(SLOTS)]
    for node in cluster.nodes:
        reads = [any(each.node_id == node.node_id for each in route.read_set) for route in every]
        first = [route.primary is not None and route.primary.node_id == node.node_id for route in every]
        assert table.reader_slots(node.node_id).tolist() == reads
        assert table.primary_slots(node.node_id).tolist() == first
        assert table.primary_counts.get(node.node_id, 0) == sum(first)
        involved = {int(slot) for _, slots in table.slots_by_route(node.node_id) for slot in slots}
        assert involved >= {slot for slot, route in enumerate(every) if node in route.write_set}
    for route, slots in table.slots_by_route():
        assert all(every[slot] == route for slot in slots.tolist())


@pytest.mark.parametrize("count", [3, 20, 100])
def test_a_split_moves_nothing_at_once_and_little_later(count: int) -> None:
    before = even(count, 1 << 10)
    split = turn.split_slots(before, 1 << 12)
    assert parse_map(split.to_json()) == parse_map(split.to_json(short=True)) == split
    assert split.is_rebalancing
    assert all(split.must_sync(node.node_id) for node in split.nodes)
    old, new = routes(before, 2), routes(split, 2)
    for slot in range(1 << 12):
        was, now = old.route_of_slot(slot % (1 << 10)), new.route_of_slot(slot)
        assert (was.primary, was.read_set) == (now.primary, now.read_set)
        assert set(was.write_set) <= set(now.write_set)
    done = turn.mark_all_complete(split, {node.node_id: split.version for node in split.nodes})
    assert (done.slots, done.base_slots, done.is_rebalancing) == (1 << 12, None, False)
    assert not any(done.must_sync(node.node_id) for node in done.nodes)
    assert not plan_sync(before, "n000", [2]).blocked_slots


def test_the_parts_of_a_slot_prefer_the_same_nodes() -> None:
    before = even(40, LISTS)
    after = turn.split_slots(before, 4 * LISTS)
    was, will = (compute_placement(after, 2, tense).table for tense in ("present", "future"))
    moved = np.mean([(will[:, rank, None] != was).all(axis=1) for rank in range(2)])
    assert moved < 0.02


def test_a_split_ends_when_every_node_has_its_part_and_not_before() -> None:
    split = turn.split_slots(even(6, SLOTS), 2 * SLOTS)
    some = turn.mark_all_complete(split, {node.node_id: split.version for node in split.nodes[1:]})
    assert (some.base_slots, some.is_rebalancing) == (SLOTS, True)
    away = turn.mark_node_away(some, "n000")
    assert away.base_slots == SLOTS
    joined = turn.join_node(some, Node("x", "http://x:1"))
    assert joined.base_slots == SLOTS
    ended = turn.mark_all_complete(joined, {node.node_id: joined.version for node in joined.nodes})
    assert (ended.base_slots, ended.is_rebalancing) == (None, False)


def test_splits_that_are_refused() -> None:
    cluster = even(4, SLOTS)
    for slots in (SLOTS, SLOTS // 2, 3 * SLOTS, 2 * MAX_SLOTS):
        with pytest.raises(TransitionError, match="a greater power of two"):
            turn.split_slots(cluster, slots)
    with pytest.raises(TransitionError, match="data is moving"):
        turn.split_slots(turn.split_slots(cluster, 2 * SLOTS), 4 * SLOTS)


def test_an_earlier_release_reads_the_map_again_when_a_split_has_ended() -> None:
    split = turn.split_slots(even(4, SLOTS), 2 * SLOTS)
    done = turn.mark_all_complete(split, {node.node_id: split.version for node in split.nodes})
    assert b"base_slots" in split.to_json()
    assert b"base_slots" not in done.to_json()


@pytest.mark.parametrize("nodes", [300, 1000])
def test_no_node_has_much_more_than_its_share_after_a_split(nodes: int) -> None:
    shares = tuple(Share(f"n{number:04}", f"r{number // 40}", 1) for number in range(nodes))
    table = np.full((LISTS, 2), -1, np.int16)
    assign_slots(shares, preference_lists(shares, LISTS // 4), table)
    loads = np.bincount(table.ravel(), minlength=nodes)
    assert loads.max() <= 2 * np.ceil((1 + SLACK) * LISTS / nodes)


def test_the_repair_of_a_lost_rack_is_spread_over_all_others() -> None:
    shares = tuple(Share(f"n{number:04}", f"r{number // 40:02}", 1) for number in range(800))
    left = shares[:40] + shares[80:]
    was, will = (np.full((LISTS, 2), -1, np.int16) for _ in range(2))
    assign_slots(shares, preference_lists(shares, LISTS), was)
    assign_slots(left, preference_lists(left, LISTS), will)
    before = np.where(
        was >= 80, was - 40, np.where(was >= 40, -1, was)
    )  # as places among those that are left
    assert not (before < 0).all(axis=1).any(), "a rack never has both copies"
    new = will[(will[:, :, None] != before[:, None, :]).all(axis=2)]
    lost = int((before < 0).sum())
    racks = np.bincount(np.where(new >= 40, new + 40, new) // 40, minlength=20)
    assert new.size < 3 * lost
    assert (racks > 0).sum() == 19
    assert racks.max() < 3 * racks.sum() / 19
