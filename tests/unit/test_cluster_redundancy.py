"""How many copies the map says that there are."""

from __future__ import annotations

from meshd.cluster.redundancy import redundancy
from meshwire.cluster import ClusterMap, Node
from meshwire.cluster import transitions as turn


def mesh(*node_ids: str) -> ClusterMap:
    first, *others = node_ids
    cluster = turn.founded(Node(first, f"http://{first}:1"), 64)
    for node_id in others:
        cluster = turn.joined(cluster, Node(node_id, f"http://{node_id}:1"))
    return settled(cluster)


def settled(cluster: ClusterMap) -> ClusterMap:
    for node in cluster.nodes:
        if cluster.owes(node.node_id):
            cluster = turn.settled(cluster, node.node_id)
    return cluster


def test_all_is_well_where_everybody_is_up() -> None:
    assert redundancy(mesh("a", "b", "c"), 2) == (0, 0)
    assert redundancy(mesh("a"), 2) == (0, 0)
    assert redundancy(ClusterMap(0, ()), 2) == (0, 0)


def test_a_node_that_is_away_is_a_copy_less_until_others_have_its_share() -> None:
    away = turn.missed(mesh("a", "b", "c"), "b")
    short, lost = redundancy(away, 2)
    assert 0 < short < 64
    assert lost == 0
    given_up = turn.lost(away, "b")
    assert redundancy(given_up, 2) == (short, 0)
    assert redundancy(settled(given_up), 2) == (0, 0)


def test_of_two_nodes_the_lost_one_is_missed_until_it_is_removed() -> None:
    cluster = settled(turn.lost(turn.missed(mesh("a", "b"), "b"), "b"))
    assert redundancy(cluster, 2) == (64, 0)
    assert redundancy(turn.left(cluster, "b"), 2) == (0, 0)


def test_where_all_owners_are_away_nobody_reads_until_the_last_that_went_is_back() -> None:
    both = turn.missed(turn.missed(mesh("a", "b"), "a"), "b")
    assert redundancy(both, 2) == (64, 64)
    first = turn.joined(both, Node("a", "http://a:1"))
    assert redundancy(first, 2) == (64, 64)
    assert redundancy(turn.joined(first, Node("b", "http://b:1")), 2) == (64, 0)


def test_one_copy_is_all_there_is() -> None:
    short, lost = redundancy(turn.missed(mesh("a", "b", "c"), "b"), 1)
    assert short == lost > 0
