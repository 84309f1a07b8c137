"""Which Kubernetes nodes are told to have the disks of a pool's daemons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshoperator.controllers.storage import disk_labels
from meshoperator.planners.rollout_planner import ClusterState, Pod
from meshwire.cluster import Node
from meshwire.cluster.transitions import bootstrap_map, join_node, mark_node_away, mark_node_down
from tests.unit.operator.test_manifests import cluster

if TYPE_CHECKING:
    from meshwire.cluster import ClusterMap

NODES = tuple({"spec": {"nodeId": f"m-s-{number}"}, "status": {"node": f"k{number}"}} for number in range(2))


def _map() -> ClusterMap:
    found = bootstrap_map(Node("m-s-0", "http://a:1"))
    return join_node(found, Node("m-s-1", "http://b:1"))


def _labelled(known: ClusterMap | None) -> set[str]:
    """While the pod of `m-s-0` is replaced, and is unschedulable yet."""
    of = cluster()
    pods = (Pod("m-s-0", "s", "new", ready=False), Pod("m-s-1", "s", "new", ready=True, node="k1"))
    seen = ClusterState("m", of.spec, {"s": 2}, {"s": "new"}, {"s": 2}, pods, known)
    return disk_labels(of, seen, NODES)[of.disks_label("s")]


def test_a_daemon_that_is_replaced_finds_its_node() -> None:
    assert _labelled(_map()) == {"k0", "k1"}
    assert _labelled(mark_node_away(_map(), "m-s-0")) == {"k0", "k1"}


def test_a_mesh_that_does_not_say_who_is_there_takes_no_label_away() -> None:
    assert _labelled(None) == {"k0", "k1"}


def test_a_daemon_that_was_given_up_is_not_expected() -> None:
    assert _labelled(mark_node_down(_map(), "m-s-0")) == {"k1"}
