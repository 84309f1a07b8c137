"""What conditions of a MeshCluster say when something is not as it should be, over an emulated API."""

from __future__ import annotations

import asyncio
import copy

import pytest
from lightkube import ApiError

from meshoperator.settings import OperatorSettings
from meshwire.cluster import transitions
from tests.kubernetes.emulated import Api, Fault
from tests.kubernetes.playing import (
    CLAIMED,
    SCENES,
    Operator,
    change,
    on_claims,
    play,
    pool,
    settled,
    told,
    void,
)
from tests.kubernetes.world import NAME, NAMESPACE, World, mesh_cluster


def test_it_says_why_a_daemon_is_not_ready_and_what_becomes_of_one_that_is_away() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    ended = {"exitCode": 78, "message": "refuses to start: the disk is empty"}
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 40s"}
    pods = world.pods()
    pods["mesh-s-0"]["status"] = {
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [{"state": {"waiting": waiting}, "lastState": {"terminated": ended}}],
    }
    unfit = {"type": "PodScheduled", "status": "False", "message": "0/6 nodes are available"}
    pods["mesh-s-1"]["status"] = {"conditions": [unfit]}
    cluster = world.map()
    assert cluster is not None
    world.set_map(transitions.mark_node_away(cluster, "mesh-s-0"))
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    found = api.find("meshclusters", NAME)
    assert found is not None
    told = {each["type"]: each["message"] for each in found["status"]["conditions"]}
    assert told["Available"] == (
        "0 of 2 daemons are ready: mesh-s-0 CrashLoopBackOff: back-off 40s; exited with 78: refuses to "
        "start: the disk is empty; mesh-s-1 is unschedulable: 0/6 nodes are available; to do: follow its "
        "last log lines; for all of them: kubectl -n ns logs mesh-s-0 --previous; add a machine with the "
        "pool's labels and enough resources, or lower the pool's replicas"
    )
    assert told["Degraded"].startswith("mesh-s-0 away: its pod is being restarted; after 900 s")
    node = api.find("meshnodes", "mesh-s-1")
    assert node is not None
    assert node["status"]["conditions"][0]["message"] == (
        "its pod is unschedulable: 0/6 nodes are available; to do: add a machine with the pool's labels and "
        "enough resources, or lower the pool's replicas"
    )


def test_a_store_that_cannot_join_is_no_settled_mesh() -> None:
    """The others are well, and the map does not know it: its directory belongs to another mesh."""
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    change(world, nodePools=pool(3))
    third = copy.deepcopy(world.pods()["mesh-s-1"])
    third["metadata"] |= {"name": "mesh-s-2", "uid": "third"}
    third["status"] = {"conditions": [{"type": "Ready", "status": "False"}]}
    api.put("pods", third)
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert told(api, "Settled")["status"] == "False"
    assert told(api, "Settled")["message"] == "not in the mesh yet, so without a share of its data: mesh-s-2"
    assert told(api, "Degraded")["status"] == "False"  # it may be about to join
    ended = {"exitCode": 78, "message": "/var/lib/meshd/disk belongs to mesh a, not to mesh b"}
    third["status"]["containerStatuses"] = [
        {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended}}
    ]
    api.put("pods", third)
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert told(api, "Settled")["reason"] == "NotJoined"
    assert told(api, "Degraded")["status"] == "True"
    assert told(api, "Degraded")["message"].startswith("mesh-s-2 cannot join: the condition Available")
    assert "belongs to mesh a" in told(api, "Available")["message"]
    found = api.find("meshclusters", NAME)
    assert found is not None
    assert found["status"]["phase"] == "Degraded"


def test_it_names_the_disks_that_are_out_of_service_or_full() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))

    def state_of(*disks: dict[str, object]) -> dict[str, str]:
        world.set_document("scrubs/mesh-s-1", {"disks": disks, "quarantined": 0})
        asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
        return told(api, "DisksHealthy")

    def column() -> object:
        found = api.find("meshclusters", NAME)
        return None if found is None else found["status"].get("trouble")

    fine = {"path": "/var/lib/meshd/fast/data", "serves": True, "full": 40}
    assert state_of(fine)["status"] == "True"
    assert column() is None
    lost = {
        "path": "/var/lib/meshd/slow/data",
        "serves": False,
        "why": "failed: put an empty disk in its place",
    }
    found = state_of(fine, lost)
    assert (found["status"], found["reason"]) == ("False", "Failed")
    assert found["message"] == (
        "/var/lib/meshd/slow/data of mesh-s-1: failed: put an empty disk in its place"
    )
    assert column() == "Disk: mesh-s-1"
    found = state_of(fine | {"full": 100, "refuses_writes": True})
    assert (found["status"], found["reason"]) == ("False", "Full")
    assert found["message"] == "/var/lib/meshd/fast/data of mesh-s-1: full, so it takes no new data"
    assert state_of(fine)["status"] == "True"
    assert column() is None
    assert told(api, "Degraded")["status"] == "False"


def test_what_a_mesh_says_of_its_nodes_can_be_read_at_the_nodes() -> None:
    """Who waits for a condition of the mesh looks at its nodes next: their statuses are written first."""
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    world.pods()["mesh-s-0"]["status"] = {"conditions": [{"type": "Ready", "status": "False"}]}
    api.changed.clear()
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    told = [plural for plural in api.changed if plural in ("meshclusters", "meshnodes")]
    assert told == ["meshnodes", "meshclusters"]


def test_it_says_what_kubernetes_says_of_pods_that_are_not_made_or_do_not_start() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, CLAIMED))
    pods = world.pods()
    for name in ("mesh-s-0", "mesh-s-1"):
        pods[name]["status"] = {"conditions": [{"type": "Ready", "status": "False"}]}
    unbound = "0/6 nodes are available: pod has unbound immediate PersistentVolumeClaims."
    unfit = {"type": "PodScheduled", "status": "False", "message": unbound}
    pods["mesh-s-1"]["status"]["conditions"].append(unfit)
    del pods["mesh-s-1"]["spec"]["nodeName"]
    uid, (made,) = pods["mesh-s-0"]["metadata"]["uid"], api.of("statefulsets")
    refused = ("StatefulSet", "mesh-s", made["metadata"]["uid"], "FailedCreate")
    about(api, "Pod", "mesh-s-0", uid, "Unhealthy", "Readiness probe failed", "2030-01-01T00:00:09Z")
    about(api, "Pod", "mesh-s-0", uid, "FailedMount", 'secret "t" not found', "2030-01-01T00:00:08Z")
    about(api, "Pod", "mesh-s-0", "another", "FailedMount", "before", "2030-01-01T00:00:09Z")
    about(api, "PersistentVolumeClaim", "a-mesh-s-1", "", "FailedBinding", "no storage class is set")
    about(api, *refused, "exceeded quota: q")
    about(api, *refused, "exceeded another one, long ago", "2029-12-31T12:00:00Z")
    change(world, nodePools=[on_claims("1Ti")[0] | {"replicas": 3}])
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert told(api, "Available")["message"] == (
        '0 of 3 daemons are ready: mesh-s-0 FailedMount: secret "t" not found; mesh-s-1 is unschedulable: '
        "its volume a-mesh-s-1: FailedBinding: no storage class is set; to do: create what is missing; the "
        "pod then starts by itself; kubectl -n ns describe pvc; set volumeClaim.storageClass to a class that "
        "exists and has space"
    )
    assert told(api, "Progressing")["status"] == "True"
    assert told(api, "Progressing")["message"] == (
        "2 of 3 pods exist; pool s: FailedCreate: exceeded quota: q"
    )


def about(
    api: Api, kind: str, name: str, uid: str, reason: str, message: str, when: str = "2030-01-01T00:00:00Z"
) -> None:
    """An event, as Kubernetes writes it."""
    metadata = {"name": f"{name}.{len(api.objects)}", "namespace": NAMESPACE}
    involved = {"kind": kind, "name": name, "uid": uid}
    found = {"metadata": metadata, "involvedObject": involved, "reason": reason, "message": message}
    api.put("events", found | {"kind": "Event", "lastTimestamp": when})


def test_a_secret_that_is_missing_is_said_before_anything_is_made_or_replaced() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    change(world, auth={"rootSecretRef": {"name": "keys"}}, s3={"tls": {"secretRef": {"name": "tls"}}})
    before, loop = {name: pod["metadata"]["uid"] for name, pod in world.pods().items()}, Operator(api).loop
    steps: list[tuple[str, str, list[str]]] = [
        ("auth.rootSecretRef: Secret keys does not exist; create it in the", "keys", []),
        (
            "auth.rootSecretRef: Secret keys has no AWS_ACCESS_KEY_ID and no",
            "keys",
            ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
        ),
        ("s3.tls.secretRef: Secret tls does not exist", "tls", ["tls.crt", "tls.key"]),
    ]
    for said, name, keys in steps:
        assert asyncio.run(loop.reconcile(NAMESPACE, NAME))
        world.tick()
        assert told(api, "Progressing")["reason"] == "SecretMissing"
        assert said in told(api, "Progressing")["message"]
        assert {name: pod["metadata"]["uid"] for name, pod in world.pods().items()} == before
        metadata, data = {"name": name, "namespace": NAMESPACE}, dict.fromkeys(keys, "eA==")
        api.put("secrets", {"kind": "Secret", "metadata": metadata, "data": data})
    asyncio.run(play(world, [("all there", void, lambda world: settled(world, 2))], begun=True))


def test_a_mesh_whose_directories_another_one_has_looks_soon_whether_that_is_gone() -> None:
    """The end of the other one is no event of this one: a namespace that is deleted marks it late."""
    api = Api()
    world = World(api)
    older = mesh_cluster(2)
    older["metadata"] |= {"namespace": "older", "creationTimestamp": "2029-01-01T00:00:00Z"}
    api.put("meshclusters", older)
    younger = mesh_cluster(2)
    younger["metadata"] |= {"creationTimestamp": "2029-01-02T00:00:00Z"}
    api.put("meshclusters", younger)
    settings, loop = OperatorSettings(), Operator(api).loop
    assert asyncio.run(loop.reconcile(NAMESPACE, NAME)) == settings.eager_seconds
    found = api.objects["meshclusters", NAMESPACE, NAME]["status"]["conditions"]
    assert [each["reason"] for each in found if each["type"] == "Progressing"] == ["DisksTaken"]
    older["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    assert asyncio.run(loop.reconcile(NAMESPACE, NAME))
    assert [each["metadata"]["name"] for each in api.of("statefulsets")] == ["mesh-s"]
    assert world.pods() == {}


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, ""), (422, ""), (500, ".spec.x: field not declared in schema")],
)
def test_what_the_api_server_refuses_is_said_where_people_look(status: int, message: str) -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    change(world, nodePools=pool(3))
    api.fault = Fault(
        lambda method, plural, _: method == "PATCH" and plural == "statefulsets", status, message
    )
    loop = Operator(api).loop
    for _ in range(2):  # said once
        with pytest.raises(ApiError):
            asyncio.run(loop.reconcile(NAMESPACE, NAME))
    found = api.find("meshclusters", NAME)
    assert found is not None
    told = {each["type"]: (each["status"], each["reason"]) for each in found["status"]["conditions"]}
    assert told["Progressing"] == ("False", "ApiRefused")
    assert told["Available"][0] == "True"
    events = [each["type"] for each in api.of("events") if each["reason"] == "Refused"]
    assert events == ["Warning"]
    api.fault = None
    asyncio.run(play(world, [SCENES[1]], begun=True))


def test_a_spec_that_no_operator_understands_is_said() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    change(world, nodePools=[{"name": "s", "replicas": "many"}])
    assert asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    found = api.find("meshclusters", NAME)
    assert found is not None
    (told,) = (each for each in found["status"]["conditions"] if each["type"] == "Progressing")
    assert told["reason"] == "SpecRefused"
    assert "replicas" in told["message"]


def test_a_roll_out_that_is_paused_says_so() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    change(world, update={"paused": True}, podTemplate={"metadata": {"labels": {"release": "2"}}})
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    found = api.find("meshclusters", NAME)
    assert found is not None
    (told,) = (each for each in found["status"]["conditions"] if each["type"] == "Progressing")
    assert (told["status"], told["message"]) == (
        "True",
        "2 pods are outdated and not replaced: update.paused is set",
    )
