"""How many copies the map says that there are."""

from __future__ import annotations

from meshd.cluster.replica_counts import replica_shortfall
from meshwire.cluster import ClusterMap, Node
from meshwire.cluster import transitions as turn


def mesh(*node_ids: str) -> ClusterMap:
    first, *others = node_ids
    cluster = turn.bootstrap_map(Node(first, f"http://{first}:1"), 64)
    for node_id in others:
        cluster = turn.join_node(cluster, Node(node_id, f"http://{node_id}:1"))
    return settled(cluster)


def settled(cluster: ClusterMap) -> ClusterMap:
    for node in cluster.nodes:
        if cluster.must_sync(node.node_id):
            cluster = turn.mark_complete(cluster, node.node_id)
    return cluster


def test_all_is_well_where_everybody_is_up() -> None:
    assert replica_shortfall(mesh("a", "b", "c"), 2) == (0, 0)
    assert replica_shortfall(mesh("a"), 2) == (0, 0)
    assert replica_shortfall(ClusterMap(0, ()), 2) == (0, 0)


def test_a_node_that_is_away_is_a_copy_less_until_others_have_its_share() -> None:
    away = turn.mark_node_away(mesh("a", "b", "c"), "b")
    short, lost = replica_shortfall(away, 2)
    assert 0 < short < 64
    assert lost == 0
    given_up = turn.mark_node_down(away, "b")
    assert replica_shortfall(given_up, 2) == (short, 0)
    assert replica_shortfall(settled(given_up), 2) == (0, 0)


def test_of_two_nodes_the_lost_one_is_missed_until_it_is_removed() -> None:
    cluster = settled(turn.mark_node_down(turn.mark_node_away(mesh("a", "b"), "b"), "b"))
    assert replica_shortfall(cluster, 2) == (64, 0)
    assert replica_shortfall(turn.remove_node(cluster, "b"), 2) == (0, 0)


def test_where_all_owners_are_away_nobody_reads_until_the_last_that_went_is_back() -> None:
    both = turn.mark_node_away(turn.mark_node_away(mesh("a", "b"), "a"), "b")
    assert replica_shortfall(both, 2) == (64, 64)
    first = turn.join_node(both, Node("a", "http://a:1"))
    assert replica_shortfall(first, 2) == (64, 64)
    assert replica_shortfall(turn.join_node(first, Node("b", "http://b:1")), 2) == (64, 0)


def test_one_copy_is_all_there_is() -> None:
    short, lost = replica_shortfall(turn.mark_node_away(mesh("a", "b", "c"), "b"), 1)
    assert short == lost > 0
