"""What the operator does next about a cluster: scale, drain and roll out, one look at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshoperator.planners.cluster_state import ClusterState, Pod
from meshoperator.planners.rollout_planner import apply_map_change, plan_rollout
from meshoperator.resources import MeshClusterSpec, parse
from meshwire.cluster import Node
from meshwire.cluster.transitions import (
    bootstrap_map,
    drain_node,
    join_node,
    mark_complete,
    mark_node_away,
    mark_node_down,
)

if TYPE_CHECKING:
    from meshwire.cluster import ClusterMap

TIER = {"name": "a", "class": "nvme", "hostPath": "/mnt/a"}


def spec(replicas: int = 3, **changes: Any) -> MeshClusterSpec:
    pool = {"name": "s", "replicas": replicas, "tiers": [TIER]}
    return parse(MeshClusterSpec, {"image": "i", "nodePools": [pool], **changes})


def nodes(count: int) -> ClusterMap:
    cluster = bootstrap_map(Node("m-s-0", "http://0:1"))
    for number in range(1, count):
        cluster = join_node(cluster, Node(f"m-s-{number}", f"http://{number}:1"))
    return all_settled(cluster)


def all_settled(cluster: ClusterMap) -> ClusterMap:
    for _ in range(3):
        for node in cluster.nodes:
            if cluster.must_sync(node.node_id):
                cluster = mark_complete(cluster, node.node_id)
    return cluster


def pods(count: int, template: str = "new") -> tuple[Pod, ...]:
    return tuple(Pod(f"m-s-{n}", "s", template, ready=True, node=f"k{n}") for n in range(count))


CLEAR = {f"m-s-{number}": 1 << 40 for number in range(9)}


def sight(count: int = 3, wanted: int = 3, **changes: Any) -> ClusterState:
    base = ClusterState("m", spec(), {"s": wanted}, {"s": "new"}, {"s": count}, pods(count), nodes(count))
    base = replace(base, clear=CLEAR)
    return replace(base, **changes)


def test_a_settled_cluster_is_left_alone() -> None:
    steps = plan_rollout(sight())
    assert (steps.scale, steps.changes, steps.delete, steps.waiting) == ({"s": 3}, (), (), ())
    assert steps.settled


def test_a_pod_on_its_way_out_is_not_told_to_stay() -> None:
    """It gave everything away; its StatefulSet makes it no more, and it takes a moment to end."""
    cluster = all_settled(drain_node(nodes(3), "m-s-2"))
    going = tuple(replace(pod, leaving=pod.name == "m-s-2") for pod in pods(3))
    assert plan_rollout(sight(2, 2, pods=going, map=cluster)).changes == ()


def test_it_grows_at_once() -> None:
    assert plan_rollout(sight(wanted=5)).scale == {"s": 5}
    assert plan_rollout(sight(0, 3, map=None)).scale == {"s": 3}


def test_it_shrinks_when_the_map_proves_that_nodes_are_empty() -> None:
    """The whole way from five to three, look by look."""
    now = sight(5)
    steps = plan_rollout(now)
    assert (steps.scale, steps.changes) == ({"s": 5}, (("drain", "m-s-4"), ("drain", "m-s-3")))
    assert now.map is not None
    draining = apply_map_change(apply_map_change(now.map, steps.changes[0]), steps.changes[1])
    steps = plan_rollout(replace(now, map=draining))
    assert (steps.scale, steps.changes) == ({"s": 5}, ())
    assert steps.waiting[0].startswith("m-s-4 is drained")
    empty = all_settled(draining)
    steps = plan_rollout(replace(now, map=empty))
    assert (steps.scale, steps.changes) == ({"s": 3}, ()), "while they run they would come back"
    steps = plan_rollout(replace(now, map=empty, replicas={"s": 3}, pods=pods(3)))
    assert (steps.scale, steps.changes) == ({"s": 3}, (("leave", "m-s-3"), ("leave", "m-s-4")))
    gone = apply_map_change(apply_map_change(empty, steps.changes[0]), steps.changes[1])
    after = plan_rollout(replace(now, map=gone, replicas={"s": 3}, pods=pods(3)))
    assert (after.scale, after.changes, after.settled) == ({"s": 3}, (), True)


def test_a_daemon_that_still_has_bytes_that_others_own_does_not_go() -> None:
    draining = apply_map_change(nodes(3), ("drain", "m-s-2"))
    moved = all_settled(draining)
    version = draining.nodes[2].turned
    now = sight(3, 2, map=moved, clear={"m-s-2": version - 1})
    assert plan_rollout(now).scale == {"s": 3}
    assert plan_rollout(now).waiting == ("m-s-2 is drained: the pool shrinks",)
    assert plan_rollout(replace(now, clear={"m-s-2": version})).scale == {"s": 2}
    dead = replace(pods(3)[2], ready=False)
    assert plan_rollout(replace(now, pods=(*pods(2), dead))).scale == {"s": 2}, "the map's word is enough"


def test_a_pool_that_is_no_more_in_the_spec_becomes_empty() -> None:
    now = sight(3, map=nodes(3), replicas={"s": 3, "old": 2})
    assert plan_rollout(now).scale == {"s": 3, "old": 0}


def test_daemons_of_a_pool_whose_statefulset_is_gone_leave_the_map_once_they_ended() -> None:
    cluster = nodes(3)
    for name in ("m-old-0", "by-hand-0"):
        cluster = all_settled(join_node(cluster, Node(name, f"http://{name}:1")))
        cluster = all_settled(drain_node(cluster, name))
    ended = sight(map=cluster, desired={"m-old-0": "Active", "m-s-0": "Active"})
    assert plan_rollout(ended).changes == (("leave", "m-old-0"),)
    ending = replace(ended, pods=(*pods(3), Pod("m-old-0", "old", "old", ready=True, leaving=True)))
    assert plan_rollout(ending).changes == (), "it is not told to stay, either"


def test_retained_disks_and_an_unknown_map() -> None:
    assert plan_rollout(sight(5, spec=spec(scaleDown="Retain"))).scale == {"s": 3}
    blind = plan_rollout(sight(5, map=None))
    assert blind.scale == {"s": 5}
    assert "the cluster map is unknown" in blind.waiting[0]


def test_a_node_is_drained_for_people_and_for_cordoned_hosts_and_stays_afterwards() -> None:
    for changes in ({"desired": {"m-s-1": "Drained"}}, {"cordoned": frozenset({"k1"})}):
        steps = plan_rollout(sight(**changes))
        assert steps.changes == (("drain", "m-s-1"),)
    now = sight()
    assert now.map is not None
    draining = apply_map_change(now.map, ("drain", "m-s-1"))
    assert plan_rollout(replace(now, map=draining)).changes == (("stay", "m-s-1"),)


def test_one_outdated_pod_at_a_time_and_only_of_a_settled_cluster() -> None:
    old = pods(3, "old")
    assert plan_rollout(sight(pods=old)).delete == (("m-s-0", "it is outdated"),)
    restarting = (replace(old[0], ready=False, template="new"), *old[1:])
    steps = plan_rollout(sight(pods=restarting))
    assert steps.delete == ()
    assert "waiting for 1 to be ready" in steps.waiting[0]
    assert plan_rollout(sight(pods=(pods(1)[0], *old[1:]))).delete == (("m-s-1", "it is outdated"),)
    away = mark_node_away(nodes(3), "m-s-2")
    steps = plan_rollout(sight(pods=old, map=away))
    assert (steps.delete, steps.settled) == ((), False)
    assert plan_rollout(sight(pods=old, spec=spec(update={"paused": True}))).delete == ()


def test_an_outdated_pod_that_does_not_work_blocks_nothing() -> None:
    stuck = Pod("m-s-1", "s", "old", ready=False, scheduled=False)
    steps = plan_rollout(sight(pods=(pods(1)[0], stuck, pods(3)[2])))
    assert steps.delete == (("m-s-1", "it is outdated and not working"),)


def test_a_pod_that_never_had_a_place_holds_no_roll_out_up() -> None:
    nowhere = Pod("m-s-3", "s", "new", ready=False, scheduled=False)
    steps = plan_rollout(sight(4, 4, map=nodes(3), pods=(*pods(3, "old"), nowhere)))
    assert steps.delete == (("m-s-0", "it is outdated"),)
    restarting = Pod("m-s-0", "s", "new", ready=False, scheduled=False)
    assert plan_rollout(sight(pods=(restarting, *pods(3, "old")[1:]))).delete == ()


def test_a_pod_that_was_ended_a_moment_ago_counts_as_out() -> None:
    assert plan_rollout(sight(pods=pods(3, "old")[1:])).delete == ()


def test_a_pod_that_is_slow_to_answer_and_has_data_is_not_ended() -> None:
    slow = replace(pods(1, "old")[0], ready=False)
    assert plan_rollout(sight(pods=(slow, *pods(3)[1:]))).delete == ()
    gone = mark_node_away(nodes(3), "m-s-0")
    assert plan_rollout(sight(pods=(slow, *pods(3)[1:]), map=gone)).delete == (
        ("m-s-0", "it is outdated and not working"),
    )


def test_pods_of_lost_hosts_are_ended_without_them() -> None:
    steps = plan_rollout(sight(hosts={"k0": True, "k1": True}))
    assert steps.force_delete == (("m-s-2", "its Kubernetes node k2 is gone"),)
    stuck = replace(pods(3)[2], leaving=True, overdue=True, ready=False)
    hosts = {"k0": True, "k1": True, "k2": False}
    away = mark_node_away(nodes(3), "m-s-2")
    waits = plan_rollout(sight(pods=(*pods(2), stuck), hosts=hosts, map=away))
    assert (waits.force_delete, waits.waiting) == (
        (),
        ("m-s-2 cannot be stopped: Kubernetes node k2 is silent",),
    )
    down = all_settled(mark_node_down(away, "m-s-2"))
    assert [
        name for name, _ in plan_rollout(sight(pods=(*pods(2), stuck), hosts=hosts, map=down)).force_delete
    ] == ["m-s-2"]


def test_a_decommissioned_node_goes_with_its_disks_when_it_is_empty() -> None:
    wish = {"m-s-1": "Decommissioned"}
    now = sight(desired=wish)
    assert (plan_rollout(now).changes, plan_rollout(now).discard) == ((("drain", "m-s-1"),), ())
    assert now.map is not None
    empty = all_settled(apply_map_change(now.map, ("drain", "m-s-1")))
    assert (plan_rollout(replace(now, map=empty)).changes, plan_rollout(replace(now, map=empty)).discard) == (
        (),
        ("m-s-1",),
    )


def test_an_update_by_drain_waits_for_the_proof() -> None:
    now = sight(pods=pods(3, "old"), spec=spec(update={"mode": "Drain"}))
    steps = plan_rollout(now)
    assert (steps.delete, steps.changes) == ((), (("drain", "m-s-0"),))
    assert now.map is not None
    draining = apply_map_change(now.map, ("drain", "m-s-0"))
    assert plan_rollout(replace(now, map=draining)).delete == ()
    empty = all_settled(draining)
    assert plan_rollout(replace(now, map=empty)).delete == (("m-s-0", "it is outdated"),)
    updated = (pods(1)[0], *pods(3, "old")[1:])
    assert ("stay", "m-s-0") in plan_rollout(replace(now, map=empty, pods=updated)).changes


def test_the_last_node_is_not_drained() -> None:
    steps = plan_rollout(sight(1, 0))
    assert (steps.scale, steps.changes) == ({"s": 1}, ())
    assert "the last node that stores" in steps.waiting[0]
