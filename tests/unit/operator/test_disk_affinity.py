"""Which Kubernetes nodes are told to have the disks of a pool's daemons, and where each daemon belongs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from meshoperator.controllers.storage import disk_labels
from meshoperator.planners.cluster_state import ClusterState, Pod
from meshoperator.planners.disk_affinity import (
    MACHINE,
    lost_machines,
    machine_patch,
    misplaced_pods,
    needs_directory,
    recorded_machine,
    usable_machines,
)
from meshoperator.planners.rollout_planner import plan_rollout
from meshwire.cluster import Node
from meshwire.cluster.transitions import (
    bootstrap_map,
    drain_node,
    join_node,
    mark_complete,
    mark_node_away,
    mark_node_down,
)
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


def test_a_node_with_a_directory_is_preferred_although_its_daemon_came_up_elsewhere() -> None:
    """As when a MeshCluster was made again: no MeshNode says where its daemons were."""
    of = cluster()
    pods = (_pod(0, "k2"), _pod(1, "k1", ready=True))
    assert disk_labels(of, _seen(pods), ())[of.disks_label("s")] == {"k0", "k1"}
    given_up = mark_node_down(_settled(), "m-s-0")
    assert disk_labels(of, _seen(pods, given_up), ())[of.disks_label("s")] == {"k2", "k1"}


WHOLE = {"k0": True, "k1": True, "k2": True}
HOMES = {"m-s-0": "k0", "m-s-1": "k1"}


def _settled(found: ClusterMap | None = None) -> ClusterMap:
    found = found or _map()
    for node in found.nodes:
        if found.must_sync(node.node_id):
            found = mark_complete(found, node.node_id)
    return found


def _seen(pods: tuple[Pod, ...], known: ClusterMap | None = None, **more: Any) -> ClusterState:
    found: dict[str, Any] = {"hosts": WHOLE, "machines": HOMES} | more
    counts = {"s": 2}
    return ClusterState("m", cluster().spec, counts, {"s": "new"}, counts, pods, known or _settled(), **found)


def _pod(number: int, node: str, *, ready: bool = False, machine: str = "") -> Pod:
    return Pod(f"m-s-{number}", "s", "new", ready, bool(node), node, uid=f"u{number}", machine=machine)


def _moved(*pods: Pod, known: ClusterMap | None = None, **more: Any) -> list[str]:
    seen = _seen(pods, known, **more)
    found = [name for name, _ in misplaced_pods(seen)]
    assert found == [name for name, _ in plan_rollout(seen).displaced]
    return found


def test_daemons_that_came_up_on_each_others_nodes_are_moved_back_together() -> None:
    assert _moved(_pod(0, "k1"), _pod(1, "k0")) == ["m-s-0", "m-s-1"]
    (reason,) = (said for name, said in misplaced_pods(_seen((_pod(0, "k1"),))) if name == "m-s-0")
    assert reason == "its directory is on Kubernetes node k0, not on k1"


@pytest.mark.parametrize("seed", range(20))
def test_three_that_have_each_others_places_come_home(seed: int) -> None:
    """A pod has its place until the second pass after it was deleted, and then gets a free one. If they are
    moved one by one, each finds only its old place, and the next one is moved meanwhile.
    """
    chance, passes = random.Random(seed), 0
    known = _settled(join_node(_settled(), Node("m-s-2", "http://c:1")))
    homes = {f"m-s-{number}": f"k{number}" for number in range(3)}
    places = {"m-s-0": "k1", "m-s-1": "k2", "m-s-2": "k0"}
    ends = {"m-s-0": 2}  # by pod that was deleted, the pass before which it gets a place
    while places != homes or ends:
        passes += 1
        assert passes < 200, f"still {places}"
        starting = [name for name, due in ends.items() if due == passes]
        for name in starting:
            del places[name], ends[name]
        for name in starting:
            places[name] = chance.choice(sorted({*homes.values()} - {*places.values()}))
        pods = tuple(replace(_pod(int(name[-1]), places[name]), leaving=name in ends) for name in homes)
        moved = [name for name, _ in misplaced_pods(_seen(pods, known, machines=homes))]
        ends |= dict.fromkeys(moved, passes + 2)


def test_one_of_two_that_have_each_others_places_waits_for_the_other() -> None:
    """Alone it would come back to where it was: the other has its place, or is about to get it."""
    here, there = _pod(0, "k1"), _pod(1, "k0")
    assert _moved(here, replace(there, leaving=True)) == []
    assert _moved(here, _pod(1, "")) == []
    assert _moved(here, replace(there, leaving=True, overdue=True)) == ["m-s-0"]
    assert _moved(here, replace(_pod(1, ""), trouble="is unschedulable: 0/3 nodes are available")) == [
        "m-s-0"
    ]
    assert _moved(here, _pod(1, "", machine="k1")) == ["m-s-0"]  # it is tied to that place, and waits for it
    assert _moved(_pod(0, "k2"), replace(there, node="k1", leaving=True)) == [
        "m-s-0"
    ]  # nobody wants its place


def test_a_daemon_that_runs_or_is_where_it_belongs_is_left_alone() -> None:
    assert _moved(_pod(0, "k0"), _pod(1, "k2", ready=True)) == []
    assert _moved(_pod(0, "k2"), machines={}) == []  # as those of an earlier release
    assert _moved(_pod(0, "k2"), machines={"m-s-0": ""}) == []


def test_a_daemon_is_not_moved_to_a_node_that_cannot_take_it_now() -> None:
    for hosts in ({"k1": True, "k2": True}, WHOLE | {"k0": False}):
        assert _moved(_pod(0, "k2"), hosts=hosts) == []
    assert _moved(_pod(0, "k2"), cordoned=frozenset({"k0"})) == []
    assert _moved(_pod(0, "k2"), _pod(1, "k0", ready=True)) == []  # that one began anew there


def test_a_daemon_that_was_given_up_or_drained_begins_wherever_it_is() -> None:
    down = mark_node_down(_settled(), "m-s-0")
    assert _moved(_pod(0, "k2"), known=down) == []
    drained = drain_node(_settled(), "m-s-0")
    assert needs_directory(drained, "m-s-0")
    for node in drained.nodes:
        if drained.must_sync(node.node_id):
            drained = mark_complete(drained, node.node_id)
    assert not needs_directory(drained, "m-s-0")
    assert _moved(_pod(0, "k2"), known=drained) == []


def test_a_pod_waits_for_its_node_as_long_as_that_exists_and_the_mesh_needs_it() -> None:
    waiting = _pod(0, "", machine="k0")
    assert _moved(waiting) == []
    assert _moved(waiting, hosts=WHOLE | {"k0": False}) == []
    assert _moved(waiting, hosts=None) == []
    assert _moved(waiting, hosts={"k1": True}) == ["m-s-0"]
    assert _moved(waiting, known=mark_node_down(_settled(), "m-s-0")) == ["m-s-0"]
    assert _moved(waiting, machines={"m-s-0": "k2"}) == ["m-s-0"]


def test_records_of_nodes_that_are_gone_are_forgotten() -> None:
    pods = (_pod(0, "k0"),)
    assert lost_machines(_seen(pods, hosts={"k1": True})) == {"m-s-0": "k0"}
    assert lost_machines(_seen(pods)) == {}
    assert lost_machines(_seen(pods, hosts=None)) == {}  # whether they are is not known


def test_what_is_recorded_holds_for_pools_that_use_that_node() -> None:
    recorded = {"m-gpu-0": "k0", "m-gpu-1": "k2", "m-gpu-2": "k7", "m-s-0": "k2", "m-other-0": "k0"}
    found = {"m-gpu-0": "k0", "m-gpu-1": "", "m-gpu-2": "k7", "m-s-0": "k2"}
    assert usable_machines(cluster(), recorded) == found  # k2 has no GPU, or no longer
    assert recorded_machine('{"machine": "k0"}') == "k0"
    for odd in ("", "[]", "{}", '{"machine": 5}'):
        assert recorded_machine(odd) == ""


def test_a_pod_is_tied_to_its_node_beside_what_else_is_asked_of_nodes() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    required = {"nodeSelectorTerms": [zone, {"matchExpressions": []}]}
    affinity = {
        "podAntiAffinity": {"x": 1},
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required},
    }
    pod: dict[str, Any] = {"metadata": {"annotations": {"a": "b"}}, "spec": {"affinity": affinity}}
    annotations, spec = machine_patch(pod, "k0")
    assert annotations["value"] == {"a": "b", MACHINE: "k0"}
    here = {"key": "metadata.name", "operator": "In", "values": ["k0"]}
    terms = [zone | {"matchFields": [here]}, {"matchExpressions": [], "matchFields": [here]}]
    assert spec["value"]["podAntiAffinity"] == {"x": 1}
    node = spec["value"]["nodeAffinity"]
    assert node == {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    assert machine_patch({"metadata": {"annotations": annotations["value"]}}, "k0") == ()
    assert machine_patch({"metadata": {"name": "m-s-0"}}, "k0")[1]["path"] == "/spec/affinity"
