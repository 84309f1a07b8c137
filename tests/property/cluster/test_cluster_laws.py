"""Laws of the cluster map, of placement and of what a change moves."""

from __future__ import annotations

import json
import zlib
from base64 import b85encode
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.cluster.rebalance.sync_plan import plan_sync
from meshwire.cluster import ClusterMap, Node, compute_placement, parse_map, routes, slot_of
from meshwire.cluster import transitions as turn
from meshwire.cluster.cluster_map import MAX_NODES, ROLES, STATES
from meshwire.strict_json import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwire.cluster import Placement
    from meshwire.cluster.cluster_map import State
    from meshwire.cluster.placement import OwnershipView

SLOTS = 1 << 9


@st.composite
def clusters(draw: st.DrawFn, *, states: tuple[State, ...] = STATES, least: int = 1) -> ClusterMap:
    count = draw(st.integers(least, 9))
    zones = draw(st.integers(0, 4))
    roles = st.sampled_from([ROLES, ("store",), ("cache",), ("compute",)]) if least == 1 else st.just(ROLES)
    nodes = tuple(
        Node(
            f"n{number}",
            f"http://10.0.0.{number}:9000",
            zone=f"z{number % zones}" if zones else "",
            weight=draw(st.integers(1, 12)),
            roles=draw(roles),
            state=draw(st.sampled_from(states)),
        )
        for number in range(count)
    )
    return ClusterMap(draw(st.integers(1, 1000)), nodes, SLOTS)


def even(count: int, zones: int = 0, slots: int = 1 << 14) -> ClusterMap:
    nodes = tuple(
        Node(f"n{i:03d}", f"http://10.0.0.{i}:9000", zone=f"z{i % zones}" if zones else "")
        for i in range(count)
    )
    return ClusterMap(1, nodes, slots)


@given(clusters())
def test_a_map_is_its_document(cluster: ClusterMap) -> None:
    assert parse_map(cluster.to_json()) == parse_map(cluster.to_json(short=True)) == cluster
    assert parse_map(cluster.to_json()).to_json() == cluster.to_json()


def test_the_largest_map_fits_a_value_of_etcd_while_nodes_join() -> None:
    nodes = [Node(f"node-{i:05}", f"http://node-{i:05}:9000", zone=f"zone-{i % 9}") for i in range(MAX_NODES)]
    cluster = ClusterMap(10**5, tuple(replace(each, weight=99, complete=10**5) for each in nodes[:-500]))
    cluster = turn.join_new_nodes(cluster, nodes[-500:])
    assert cluster.base is None  # of states alone
    cluster = turn.mark_all_complete(
        cluster, dict.fromkeys((each.node_id for each in nodes[-500:-1]), 100_001)
    )
    assert len(cluster.nodes) == MAX_NODES
    assert len(cluster.to_json(short=True)) < 1.5 * 2**20
    assert parse_map(cluster.to_json(short=True)) == cluster
    done = turn.mark_all_complete(cluster, {each.node_id: 100_001 for each in nodes})
    assert not done.is_rebalancing
    assert done.version == cluster.version + 1


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_text_is_a_map_or_an_error_that_says_where(source: bytes | str) -> None:
    with pytest.raises(PlanError):
        parse_map(source)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"slots": 3}, "slots"),
        ({"nodes": [{"id": "a", "endpoint": "http://h:1"}] * 2}, "nodes"),
        ({"nodes": [{"id": "../a", "endpoint": "http://h:1"}]}, "nodes[0].id"),
        ({"nodes": [{"id": "a", "endpoint": "file:///etc"}]}, "nodes[0].endpoint"),
        ({"nodes": [{"id": "a", "endpoint": "http://h:1", "weight": -1}]}, "nodes[0].weight"),
        ({"nodes": [{"id": "a", "endpoint": "http://h:1", "roles": ["boss"]}]}, "nodes[0].roles"),
        ({"nodes": [{"id": "a", "endpoint": "http://h:1", "state": "well"}]}, "nodes[0].state"),
        ({"nodes": [{"id": "a", "endpoint": "http://h:1", "wieght": 1}]}, "nodes[0].wieght"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], path: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_map({"version": 1, "nodes": [], **change})
    assert caught.value.path == path


@settings(deadline=None, max_examples=30)
@given(clusters(), st.integers(1, 4))
def test_placement_is_a_function_of_the_map(cluster: ClusterMap, copies: int) -> None:
    table = compute_placement(cluster, copies)
    compute_placement.cache_clear()
    again = compute_placement(parse_map(cluster.to_json()), copies)
    assert (table.table == again.table).all()
    fewer = compute_placement(cluster, 1)
    assert (fewer.table[:, 0] == table.table[:, 0]).all(), "the first owner does not depend on the copies"


@settings(deadline=None, max_examples=30)
@given(clusters(), st.integers(1, 4))
def test_owners_are_distinct_stores_that_are_there_in_as_many_zones_as_can_be(
    cluster: ClusterMap, copies: int
) -> None:
    tenses: dict[OwnershipView, set[State]] = {
        "future": {"joining", "up", "away", "returning"},
        "present": {"up", "draining", "away", "returning"},
    }
    for tense, allowed in tenses.items():
        placement = compute_placement(cluster, copies, tense)
        able = [node for node in cluster.nodes if node.stores and node.state in allowed]
        zones = {node.zone or node.node_id for node in able}
        for slot in range(SLOTS):
            owners = placement.owners_of_slot(slot)
            assert len(owners) == len(set(owners)) == min(copies, len(able))
            assert set(owners) <= set(able)
            assert len({node.zone or node.node_id for node in owners}) == min(copies, len(zones))


@settings(deadline=None, max_examples=25)
@given(clusters(), st.integers(1, 4))
def test_the_slots_of_all_routes_are_every_slot_once(cluster: ClusterMap, copies: int) -> None:
    table, placed = routes(cluster, copies), compute_placement(cluster, copies, "present")
    by_slot = {int(slot): route for route, slots in table.slots_by_route() for slot in slots}
    assert by_slot == {slot: table.route_of_slot(slot) for slot in range(SLOTS)}
    owners = {int(slot): each for each, slots in placed.slots_by_owners() for slot in slots}
    assert owners == {slot: placed.owners_of_slot(slot) for slot in range(SLOTS)}
    for groups in (table.slots_by_route(), placed.slots_by_owners()):
        assert sum(slots.size for _, slots in groups) == SLOTS


@given(clusters())
def test_a_node_compares_with_all_who_are_complete(cluster: ClusterMap) -> None:
    plan, table = plan_sync(cluster, "n0", [2]), routes(cluster, 2)
    wanted: dict[str, set[int]] = {}
    for slot in range(SLOTS):
        route = table.route_of_slot(slot)
        if "n0" in (node.node_id for node in route.write_set):
            for node in route.read_set:
                wanted.setdefault(node.node_id, set()).add(slot)
    wanted.pop("n0", None)
    found = {peer: set(np.flatnonzero(scope.masks()[2]).tolist()) for peer, scope in plan.peers.items()}
    assert found == wanted
    once = np.sum([scope.masks()[2] for scope in plan.first_peers.values()], axis=0) if found else 0
    assert np.max(once) <= 1
    assert np.sum(once) == len(set().union(*wanted.values()))


@pytest.mark.parametrize("copies", [1, 2])
def test_slots_whose_owners_were_all_given_up_are_waited_for_no_longer(copies: int) -> None:
    cluster, lost = even(4, slots=SLOTS), ["n000", "n001"][:copies]
    for node_id in lost:
        cluster = turn.mark_node_away(cluster, node_id)
    for node_id in lost:
        assert node_id == "n000" or plan_sync(cluster, "n002", [copies]).blocked_slots
        cluster = turn.mark_node_down(cluster, node_id)
    assert not plan_sync(cluster, "n002", [copies]).blocked_slots

    back = turn.set_node_weight(turn.join_node(cluster, even(1).nodes[0]), "n002", 2)
    placed, wanted = compute_placement(back, copies, "present"), compute_placement(back, copies)
    mine = [
        slot
        for slot in range(SLOTS)
        if {node.node_id for node in placed.owners_of_slot(slot)} == set(lost)
        and "n002" in {node.node_id for node in wanted.owners_of_slot(slot)}
    ]
    assert mine
    assert plan_sync(back, "n002", [copies]).peers["n000"].masks()[copies][mine].all()  # what it still has

    for share in cluster.target_shares:
        cluster = turn.mark_complete(cluster, share.node_id)
    assert not cluster.is_rebalancing
    assert all(routes(cluster, copies).route_of_slot(slot).primary for slot in range(SLOTS))


@given(clusters(states=("up",), least=2))
def test_no_node_has_much_more_than_its_share_of_first_copies(cluster: ClusterMap) -> None:
    loads = compute_placement(cluster, 1).slots_per_node()
    weights = sum(node.weight for node in cluster.nodes)
    for node in cluster.nodes:
        assert loads[node.node_id] <= 1.1 * SLOTS * node.weight / weights + 1


class SlotMove(NamedTuple):
    """A slot whose owners change, in node ids: the new owners, the current holders of the data, and the
    former owners."""

    slot: int
    gains: tuple[str, ...]
    holders: tuple[str, ...]
    losses: tuple[str, ...]


def slot_moves(old: Placement, new: Placement) -> Iterator[SlotMove]:
    """Yield the slots that must move for `old` to become `new`; both have the same number of slots."""
    before = np.array([node.node_id for node in old.nodes] + [""])
    after = np.array([node.node_id for node in new.nodes] + [""])
    had, gets = before[old.table], after[new.table]
    for slot in range(len(had)):
        was = [node for node in had[slot].tolist() if node]
        will = [node for node in gets[slot].tolist() if node]
        gains = tuple(node for node in will if node not in was)
        losses = tuple(node for node in was if node not in will)
        if gains or losses:
            yield SlotMove(slot, gains, tuple(was), losses)


@pytest.mark.parametrize(("count", "zones"), [(2, 0), (3, 3), (5, 0), (10, 3), (40, 4)])
def test_a_node_that_joins_takes_about_its_share_and_little_else_moves(count: int, zones: int) -> None:
    smaller, larger = compute_placement(even(count, zones), 2), compute_placement(even(count + 1, zones), 2)
    carried = [move for move in slot_moves(smaller, larger) if move.gains]
    to_it = sum(f"n{count:03d}" in move.gains for move in carried)
    everything = sum(len(move.gains) for move in carried)
    share = 2 * (1 << 14) / (count + 1)
    assert 0.8 * share <= to_it <= 1.15 * share
    assert everything <= 1.35 * share
    back = [move for move in slot_moves(larger, smaller) if move.gains]
    assert sum(len(move.gains) for move in back) == everything


def test_a_move_says_who_has_it() -> None:
    before, after = compute_placement(even(4, 2), 2), compute_placement(even(5, 2), 2)
    for move in slot_moves(before, after):
        old = [node.node_id for node in before.owners_of_slot(move.slot)]
        new = [node.node_id for node in after.owners_of_slot(move.slot)]
        assert move.holders == tuple(old)
        assert set(move.gains) == set(new) - set(old)
        assert set(move.losses) == set(old) - set(new)


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_slot_is_one_of_them(bucket: str, key: str) -> None:
    assert 0 <= slot_of(bucket, key, SLOTS) < SLOTS
    assert slot_of(bucket, key, 1) == 0


# --- changes ------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "join_node",
                "mark_complete",
                "drain_node",
                "cancel_drain",
                "mark_node_away",
                "mark_node_down",
                "remove_node",
                "set_node_weight",
            ]
        ),
        st.integers(0, 5),
        st.integers(0, 9),
    ),
    max_size=40,
)


@given(STEPS)
def test_whatever_happens_versions_grow_and_the_document_is_the_map(
    steps: list[tuple[str, int, int]],
) -> None:
    cluster = turn.bootstrap_map(Node("n0", "http://10.0.0.0:9000", zone="z0"), SLOTS)
    for name, number, weight in steps:
        zone = f"z{number % 3}"
        node = Node(f"n{number}", f"http://10.0.0.{number}:9000", zone=zone, weight=max(1, weight))
        changed = cluster
        with suppress(turn.TransitionError):
            if name == "join_node":
                changed = turn.join_node(cluster, node)
            elif name == "set_node_weight":
                changed = turn.set_node_weight(cluster, node.node_id, weight)
            else:
                changed = getattr(turn, name)(cluster, node.node_id)
        assert changed.version == cluster.version + (changed.nodes != cluster.nodes)
        assert [n.node_id for n in changed.nodes] == sorted(n.node_id for n in changed.nodes)
        cluster = parse_map(changed.to_json())
        assert cluster == changed


def state(cluster: ClusterMap, node_id: str) -> str:
    node = cluster.node(node_id)
    assert node is not None
    return node.state


@settings(deadline=None, max_examples=60)
@given(clusters(least=2), st.data())
def test_changes_of_several_nodes_are_those_of_one_after_the_other(
    cluster: ClusterMap, data: st.DataObject
) -> None:
    new = [Node(f"x{number}", f"http://x{number}:1") for number in range(data.draw(st.integers(0, 3)))]
    for node in new if cluster.current_shares else ():
        cluster = turn.join_node(cluster, node)
    reports = {node.node_id: cluster.version for node in cluster.nodes if data.draw(st.booleans())}
    singly = cluster
    for node_id in reports:
        with suppress(turn.TransitionError):
            singly = turn.mark_complete(singly, node_id, cluster.version)
    together = turn.mark_all_complete(cluster, reports)
    assert [(node.node_id, node.state, node.complete) for node in together.nodes] == [
        (node.node_id, node.state, node.complete) for node in singly.nodes
    ]
    assert (together.current_shares, together.target_shares) == (singly.current_shares, singly.target_shares)
    assert together.version <= cluster.version + 1


def test_a_life() -> None:
    one, two = (Node(f"n{i}", f"http://10.0.0.{i}:9000") for i in range(2))
    cluster = turn.bootstrap_map(one, SLOTS)
    cluster = turn.join_node(cluster, two)
    assert cluster.node("n1") == replace(two, state="joining", turned=2)
    assert compute_placement(cluster, 1, "present").slots_per_node() == {"n0": SLOTS}
    assert compute_placement(cluster, 1).slots_per_node()["n1"] > 0
    assert compute_placement(cluster, 1, "present").slots_per_node() == {"n0": SLOTS}, (
        "until everybody has what it should"
    )
    cluster = turn.mark_complete(turn.mark_complete(cluster, "n1"), "n0")
    assert not cluster.is_rebalancing
    assert [node.state for node in cluster.nodes] == ["up", "up"]
    cluster = turn.mark_node_away(cluster, "n0")
    assert compute_placement(cluster, 1).slots_per_node()["n0"] > 0, "its share waits for it"
    back = turn.join_node(cluster, one)
    assert state(back, "n0") == "returning"
    assert state(turn.mark_complete(back, "n0"), "n0") == "up"
    with pytest.raises(turn.TransitionError, match="drain it first"):
        turn.remove_node(cluster, "n1")
    cluster = turn.mark_node_down(cluster, "n0")
    assert compute_placement(cluster, 1).slots_per_node() == {"n1": SLOTS}
    assert (
        compute_placement(cluster, 1, "present").slots_per_node()
        == compute_placement(turn.mark_node_away(back, "n0"), 1, "present").slots_per_node()
    )
    with pytest.raises(turn.TransitionError, match="has not moved yet"):
        turn.remove_node(cluster, "n0")
    cluster = turn.mark_complete(cluster, "n1")
    assert not cluster.is_rebalancing
    with pytest.raises(turn.TransitionError, match="last node"):
        turn.drain_node(cluster, "n1")
    assert state(turn.join_node(cluster, one), "n0") == "joining", "what it has may be old"
    assert turn.remove_node(cluster, "n0").nodes == (cluster.node("n1"),)
    with pytest.raises(turn.TransitionError, match="did you mean 'n1'"):
        turn.drain_node(cluster, "n11")


def test_of_a_node_that_is_up_the_map_says_when_it_came_back_last() -> None:
    """It may be marked away again while it returns: what it was asked until then is given up, too."""
    cluster = turn.bootstrap_map(Node("n1", "http://n1:1"), copies=2)
    cluster = turn.mark_complete(turn.join_node(cluster, Node("n2", "http://n2:1")), "n2")
    for _ in range(2):
        cluster = turn.join_node(turn.mark_node_away(cluster, "n2"), Node("n2", "http://n2:1"))
    returned = cluster.version
    node = turn.mark_complete(turn.mark_complete(cluster, "n1"), "n2").node("n2")
    assert node is not None
    assert (node.state, node.since) == ("up", returned)


def test_a_map_of_a_large_mesh_is_deflated_in_the_control_store() -> None:
    nodes = [Node(f"node-{i:05}", f"http://node-{i:05}:9000", zone=f"zone-{i % 9}") for i in range(4097)]
    large, small = ClusterMap(9, tuple(nodes)), ClusterMap(9, tuple(nodes[:-1]))
    assert parse_map(large.to_stored()) == large
    assert len(large.to_stored()) < len(large.to_json(short=True)) / 5
    assert small.to_stored() == small.to_json(short=True), "releases that read no deflated map read this one"
    for damaged in (
        b'{"deflated": ["~"]}',
        b'{"deflated": ["000"]}',
        b'{"deflated": [1]}',
        b'{"deflated": []}',
    ):
        with pytest.raises(PlanError):
            parse_map(damaged)


def test_a_deflated_map_does_not_inflate_without_end() -> None:
    bomb = b85encode(zlib.compress(bytes(1 << 26))).decode()
    parts = [bomb[start : start + 32_768] for start in range(0, len(bomb), 32_768)]
    with pytest.raises(PlanError):
        parse_map(json.dumps({"deflated": parts}).encode())
