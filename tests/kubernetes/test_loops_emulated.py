"""The loop of a MeshCluster over an emulated API: killed at every call that changes something, refused,
raced; watches that break; who leads."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from lightkube import ApiError

from meshoperator.clusters import ClusterLoop
from meshoperator.kube import Kube
from meshoperator.leading import TTL, Leading
from meshoperator.looping import Loops
from meshoperator.program import watch
from meshoperator.recording import Recorder
from meshoperator.settings import OperatorSettings
from meshwire.cluster import transitions
from tests.kubernetes.emulated import Api, Fault, KilledError
from tests.kubernetes.world import NAME, NAMESPACE, World, mesh_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kubernetes.emulated import Document

NOW = "2030-01-01T00:00:10Z"
Scene = tuple[str, "Callable[[World], None]", "Callable[[World], bool]"]


def change(world: World, **spec: Any) -> None:
    """As somebody does with kubectl."""
    found = world.api.find("meshclusters", NAME)
    assert found is not None
    found = copy.deepcopy(found)
    found["spec"] |= spec
    found["metadata"]["generation"] += 1
    world.api.put("meshclusters", found)


def settled(world: World, count: int) -> bool:
    found = world.api.find("meshclusters", NAME) or {"metadata": {"generation": 0}}
    status = found.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    cluster = world.map()
    return bool(
        status.get("observedGeneration") == found["metadata"]["generation"]
        and conditions.get("Settled") == "True"
        and conditions.get("Progressing") == "False"
        and (status["ready"], status["desired"]) == (count, count)
        and cluster
        and [node.state for node in cluster.nodes] == ["up"] * count
        and sorted(world.pods()) == [f"mesh-s-{number}" for number in range(count)]
        and len(world.api.of("meshnodes")) == count
    )


def pool(replicas: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mesh_cluster(replicas)["spec"]["nodePools"]
    return found


def rolled(world: World) -> bool:
    labels = [pod["metadata"]["labels"].get("release") for pod in world.pods().values()]
    return settled(world, 2) and labels == ["2"] * 2


def delete(world: World) -> None:
    found = world.api.find("meshclusters", NAME)
    assert found is not None
    found["metadata"].setdefault("deletionTimestamp", "2030-01-01T00:00:00Z")
    world.api.put("meshclusters", found)


def gone(world: World) -> bool:
    return not world.api.of("meshclusters") and not world.pods() and not world.api.of("statefulsets")


def void(_: object) -> None: ...


SCENES: list[Scene] = [
    (
        "install",
        lambda world: void(world.api.put("meshclusters", mesh_cluster(2))),
        lambda world: settled(world, 2),
    ),
    ("grow", lambda world: change(world, nodePools=pool(3)), lambda world: settled(world, 3)),
    ("shrink", lambda world: change(world, nodePools=pool(2)), lambda world: settled(world, 2)),
    (
        "roll out",
        lambda world: change(world, podTemplate={"metadata": {"labels": {"release": "2"}}}),
        rolled,
    ),
    ("delete", delete, gone),
]


class Operator:
    """One life of an operator."""

    def __init__(self, api: Api) -> None:
        kube = Kube(api.client())
        self.loop = ClusterLoop(kube, OperatorSettings(), Recorder(kube, lambda: NOW), lambda: NOW)


async def play(world: World, scenes: list[Scene], *, begun: bool = False) -> None:
    """Every scene, until it is over; an operator that is killed is followed by another."""
    operator = Operator(world.api)
    for name, begin, over in scenes:
        if not begun:
            begin(world)
        begun = False
        for _ in range(120):
            try:
                await operator.loop.run(NAMESPACE, NAME)
            except KilledError:
                operator = Operator(world.api)
                continue
            except ApiError:
                continue
            if over(world):
                break
            world.tick()
        else:
            raise AssertionError(f"{name} never ends: {world.api.of('meshclusters')} {world.map()}")


@pytest.mark.parametrize("number", range(len(SCENES)), ids=[name for name, *_ in SCENES])
def test_an_operator_killed_at_any_call_is_followed_by_one_that_goes_on(number: int) -> None:
    """Before each call that changes something: what it had done until then is what the next one finds. Nobody
    reads events: to die after one is to die before it."""
    killed_everywhere(SCENES[:number], SCENES[number])


def killed_everywhere(scenes: list[Scene], scene: Scene) -> None:
    start = Api()
    world = World(start)
    asyncio.run(play(world, scenes))
    start.effects, start.changed = 0, []
    before = copy.deepcopy(start.objects), start.version
    asyncio.run(play(world, [scene]))
    assert start.effects > 3
    points = [point for point in range(start.effects) if not point or start.changed[point - 1] != "events"]
    for point in points:
        api = Api(copy.deepcopy(before[0]), before[1])
        api.fault = Fault(lambda method, _, effects, point=point: effects == point and method != "GET")  # type: ignore[misc]
        again = World.__new__(World)
        again.api = api
        asyncio.run(play(again, [scene]))
        assert api.fault is None, f"{scene[0]} was not killed at {point}"


def labelled(world: World) -> set[str]:
    """Kubernetes nodes that say that a daemon of the mesh has its disk there."""
    every = ((each["metadata"]["name"], each["metadata"]["labels"]) for each in world.api.of("nodes"))
    return {name for name, labels in every if any(key.startswith("disks.shardmesh.io/") for key in labels)}


def test_kubernetes_nodes_say_whose_disks_they_have_while_a_daemon_is_expected_back() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert labelled(world) == {"k0", "k1"}
    away = world.pods()["mesh-s-1"]  # it is being made anew
    del away["spec"]["nodeName"], away["status"]
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert labelled(world) == {"k0", "k1"}
    away["spec"]["nodeName"] = "k3"  # its own was not to be had
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert labelled(world) == {"k0", "k3"}
    change(world, deletionPolicy="Delete")
    asyncio.run(play(world, [SCENES[-1]]))
    assert labelled(world) == set()


# volumes ----------------------------------------------------------------------------------------------------


def on_claims(size: str, **claim: str) -> list[dict[str, Any]]:
    tier = {"name": "a", "class": "nvme", "volumeClaim": {"size": size} | claim}
    return [pool(2)[0] | {"tiers": [tier]}]


def claims(world: World) -> dict[str, str]:
    """What each asks for, once it has it."""
    every = world.api.of("persistentvolumeclaims")
    return {
        each["metadata"]["name"]: each["spec"]["resources"]["requests"]["storage"]
        for each in every
        if (each.get("status") or {}).get("capacity") == each["spec"]["resources"]["requests"]
    }


CLAIMED: list[Scene] = [
    (
        "install on claims",
        lambda world: void(world.api.put("meshclusters", mesh_cluster(2, nodePools=on_claims("1Ti")))),
        lambda world: settled(world, 2) and len(claims(world)) == 2,
    )
]
EXPANDED: Scene = (
    "expand",
    lambda world: change(world, nodePools=on_claims("2Ti")),
    lambda world: settled(world, 2) and set(claims(world).values()) == {"2Ti"},
)


def test_volumes_grow_under_their_pods_wherever_the_operator_is_killed() -> None:
    killed_everywhere(CLAIMED, EXPANDED)


def test_an_expansion_ends_no_pod_and_reaches_daemons_to_come() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, CLAIMED))
    before = {name: pod["metadata"]["uid"] for name, pod in world.pods().items()}
    asyncio.run(play(world, [EXPANDED]))
    assert {name: pod["metadata"]["uid"] for name, pod in world.pods().items()} == before
    (made,) = api.of("statefulsets")
    (template,) = made["spec"]["volumeClaimTemplates"]
    assert template["spec"]["resources"]["requests"]["storage"] == "2Ti"
    assert "pool s: tier a: 1Ti → 2Ti" in [each["message"] for each in api.of("events")]


def test_the_statefulset_of_a_pool_that_shrinks_is_made_anew_with_all_its_pods() -> None:
    """Its pods are still being drained: made with fewer, it would end them with their data."""
    api = Api()
    world = World(api)
    asyncio.run(play(world, CLAIMED))
    grown = on_claims("1Ti")
    change(world, nodePools=[grown[0] | {"replicas": 3}])
    asyncio.run(play(world, [("three", void, lambda world: settled(world, 3))], begun=True))
    change(world, nodePools=on_claims("2Ti"))  # one fewer, and larger
    asyncio.run(play(world, [EXPANDED], begun=True))  # `World.tick` asserts that nothing needed goes


def test_what_a_volume_is_refused_is_said_and_holds_nothing_else_up() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, CLAIMED))
    api.fault = Fault(lambda method, plural, _: method == "PATCH" and plural == "persistentvolumeclaims", 403)
    change(world, nodePools=[on_claims("2Ti")[0] | {"replicas": 3}])
    loop = Operator(api).loop
    for _ in range(12):
        asyncio.run(loop.run(NAMESPACE, NAME))
        world.tick()
    assert len(world.pods()) == 3
    assert told(api, "Progressing")["message"].startswith("a-mesh-s-0 cannot grow to 2Ti: ")
    said = [each["message"] for each in api.of("events") if each["reason"] == "Refused"]
    names = sorted(message.partition(" ")[0] for message in said)
    assert names == ["a-mesh-s-0", "a-mesh-s-1"]  # once each


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        (on_claims("500Gi")[0]["tiers"], "do not become smaller"),
        (
            [*on_claims("1Ti")[0]["tiers"], {"name": "b", "class": "hdd", "volumeClaim": {"size": "1Ti"}}],
            "pods do not take up further volumes",
        ),
    ],
)
def test_volumes_that_cannot_be_are_refused_with_what_to_do(tiers: list[Any], why: str) -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, CLAIMED))
    change(world, nodePools=[on_claims("1Ti")[0] | {"tiers": tiers}])
    assert asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    found = told(api, "Progressing")
    assert found["reason"] == "SpecRefused"
    assert why in found["message"]
    assert "take this one out of the spec" in found["message"]
    assert set(claims(world).values()) == {"1Ti"}


def told(api: Api, kind: str) -> dict[str, Any]:
    """A condition of the MeshCluster."""
    found = api.find("meshclusters", NAME)
    assert found is not None
    return dict(next(each for each in found["status"]["conditions"] if each["type"] == kind))


def test_what_a_changed_spec_asks_for_no_more_goes_and_nothing_of_others() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    api.put("networkpolicies", {"kind": "NetworkPolicy", "metadata": {"name": "own", "namespace": NAMESPACE}})
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert [each["metadata"]["name"] for each in api.of("networkpolicies")] == [NAME, "own"]
    change(world, networkPolicy={"enabled": False}, metrics={"serviceMonitor": True})
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert [each["metadata"]["name"] for each in api.of("networkpolicies")] == ["own"]
    assert api.of("servicemonitors") == []  # no such API
    api.monitors = True
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert [each["metadata"]["name"] for each in api.of("servicemonitors")] == [NAME]
    change(world, metrics={"serviceMonitor": False})
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert api.of("servicemonitors") == []


@pytest.mark.parametrize("status", [409, 500])
def test_refusals_hold_nothing_up_for_ever(status: int) -> None:
    """One call in eight that changes something is refused."""
    for seed in range(3):
        choose, api = random.Random(seed), Api()
        api.fault = Fault(lambda method, *_: method != "GET" and choose.random() < 0.125, status)  # noqa: B023
        asyncio.run(play(World(api), SCENES))


def test_a_second_pass_changes_nothing() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    before = api.effects
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert api.effects == before


def test_what_goes_with_a_mesh_is_what_its_policy_says() -> None:
    for policy, left in (("Retain", True), ("Delete", False)):
        api = Api()
        world = World(api)
        asyncio.run(play(world, SCENES[:1]))
        change(world, deletionPolicy=policy)
        secret = {"name": "mesh.users", "namespace": NAMESPACE, "labels": {"shardmesh.io/store": NAME}}
        api.put("secrets", {"kind": "Secret", "metadata": secret})
        keys = {"name": "mesh-origins", "namespace": NAMESPACE, "labels": {"shardmesh.io/cluster": NAME}}
        api.put("secrets", {"kind": "Secret", "metadata": keys})
        asyncio.run(play(world, [SCENES[-1]]))
        kept = [each["metadata"]["name"] for kind in ("configmaps", "secrets") for each in api.of(kind)]
        wanted = (
            ["map", "moves-mesh-s-0", "moves-mesh-s-1", "mesh-origins", "mesh-root", "mesh.users"]
            if left
            else []
        )
        assert kept == wanted


def test_a_finalizer_waits_says_for_what_and_gives_up() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    delete(world)
    loop = Operator(api).loop
    assert asyncio.run(loop.run(NAMESPACE, NAME)) is not None
    found = api.find("meshclusters", NAME)
    assert found is not None
    assert found["status"]["phase"] == "Deleting"
    told = {each["type"]: each["message"] for each in found["status"]["conditions"]}
    assert told["Progressing"] == "waits for mesh-s-0, mesh-s-1 to end"
    found["metadata"]["deletionTimestamp"] = "2029-12-31T23:00:00Z"
    assert asyncio.run(loop.run(NAMESPACE, NAME)) is None
    assert api.of("meshclusters") == []
    assert "DeletionForced" in [each["reason"] for each in api.of("events")]


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
    world.set_map(transitions.missed(cluster, "mesh-s-0"))
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    found = api.find("meshclusters", NAME)
    assert found is not None
    told = {each["type"]: each["message"] for each in found["status"]["conditions"]}
    assert told["Available"] == (
        "0 of 2 daemons are ready: mesh-s-0 CrashLoopBackOff: back-off 40s; it ended with 78: refuses to "
        "start: the disk is empty; mesh-s-1 has no place: 0/6 nodes are available; to do: do what its last "
        "words say; all of them: kubectl -n ns logs mesh-s-0 --previous; add a machine with the pool's "
        "labels and room, or make replicas of the pool smaller"
    )
    assert told["Degraded"].startswith("mesh-s-0 away: its pod is looked at; after 900 s")
    node = api.find("meshnodes", "mesh-s-1")
    assert node is not None
    assert node["status"]["conditions"][0]["message"] == (
        "its pod has no place: 0/6 nodes are available; to do: add a machine with the pool's labels and "
        "room, or make replicas of the pool smaller"
    )


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
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    assert told(api, "Available")["message"] == (
        '0 of 3 daemons are ready: mesh-s-0 FailedMount: secret "t" not found; mesh-s-1 has no place: its '
        "volume a-mesh-s-1: FailedBinding: no storage class is set; to do: make what it lacks; the pod then "
        "starts by itself; kubectl -n ns describe pvc; name a storage class that is there and has room, in "
        "volumeClaim.storageClass"
    )
    assert told(api, "Progressing")["status"] == "True"
    assert told(api, "Progressing")["message"] == (
        "2 pods are there, 3 are wanted; pool s: FailedCreate: exceeded quota: q"
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
        ("auth.rootSecretRef names the Secret keys, which is not there; make it in the", "keys", []),
        (
            "auth.rootSecretRef names the Secret keys, which has no AWS_ACCESS_KEY_ID and no",
            "keys",
            ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"],
        ),
        ("s3.tls.secretRef names the Secret tls, which is not there", "tls", ["tls.crt", "tls.key"]),
    ]
    for said, name, keys in steps:
        assert asyncio.run(loop.run(NAMESPACE, NAME))
        world.tick()
        assert told(api, "Progressing")["reason"] == "SecretMissing"
        assert said in told(api, "Progressing")["message"]
        assert {name: pod["metadata"]["uid"] for name, pod in world.pods().items()} == before
        metadata, data = {"name": name, "namespace": NAMESPACE}, dict.fromkeys(keys, "eA==")
        api.put("secrets", {"kind": "Secret", "metadata": metadata, "data": data})
    asyncio.run(play(world, [("all there", void, lambda world: settled(world, 2))], begun=True))


@pytest.mark.parametrize("status", [403, 422])
def test_what_the_api_server_refuses_is_said_where_people_look(status: int) -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    change(world, nodePools=pool(3))
    api.fault = Fault(lambda method, plural, _: method == "PATCH" and plural == "statefulsets", status)
    loop = Operator(api).loop
    for _ in range(2):  # said once
        with pytest.raises(ApiError):
            asyncio.run(loop.run(NAMESPACE, NAME))
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
    assert asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
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
    asyncio.run(Operator(api).loop.run(NAMESPACE, NAME))
    found = api.find("meshclusters", NAME)
    assert found is not None
    (told,) = (each for each in found["status"]["conditions"] if each["type"] == "Progressing")
    assert (told["status"], told["message"]) == (
        "True",
        "2 pods are outdated, and stay so: update.paused is set",
    )


def test_two_that_change_the_map_at_once_change_it_one_after_the_other() -> None:
    """The operator read the map; a daemon changes it before the operator writes."""
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:2]))
    change(world, nodePools=pool(2))
    raced: list[int] = []

    def race(method: str, plural: str, _: int) -> bool:
        if method == "PUT" and plural == "configmaps" and not raced:
            raced.append(1)
            found = world.map()
            assert found is not None
            entry = copy.deepcopy(api.find("configmaps", "map"))
            assert entry is not None
            api.put("configmaps", entry)  # the same value, another version
        return False

    api.fault = Fault(race, 500)
    asyncio.run(play(world, [SCENES[2]], begun=True))
    assert raced


# watches and leading ----------------------------------------------------------------------------------------


def event(kind: str, version: int) -> Document:
    metadata = {
        "name": "p",
        "namespace": NAMESPACE,
        "resourceVersion": str(version),
        "labels": {"shardmesh.io/cluster": NAME},
    }
    return {"type": kind, "object": {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}}


def test_watches_that_break_are_begun_anew() -> None:
    """One that breaks off, one that is too old (410), one that ends: after each everything is looked at."""
    api = Api()
    expired = {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"}
    api.streams = [
        [event("ADDED", 1), httpx2.ReadError("reset")],
        [{"type": "ERROR", "object": expired}],
        [event("MODIFIED", 2)],
    ]
    seen: list[str] = []

    async def run() -> None:
        leads, done = asyncio.Event(), asyncio.Event()
        leads.set()

        async def look(namespace: str, name: str) -> float:
            seen.append(f"{namespace}/{name}")
            if not api.streams and len(seen) > 2:
                done.set()
            return 60.0

        loops = Loops({"MeshCluster": look}, leads, pause=0)
        task = asyncio.ensure_future(
            watch(Kube(api.client()), loops, "Pod", None, "shardmesh.io/cluster", 0.01)
        )
        async with asyncio.timeout(60):
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await loops.close()

    asyncio.run(run())
    assert set(seen) == {f"{NAMESPACE}/{NAME}"}


def test_one_of_two_operators_leads() -> None:
    api, clock = Api(), [0.0]

    def stamp() -> str:
        return f"2030-01-01T00:00:{clock[0]:02.0f}Z"

    async def run() -> None:
        one, other = (
            Leading(Kube(api.client()), "ns", "op", name, stamp=stamp, monotonic=lambda: clock[0])
            for name in ("one", "other")
        )
        assert await one.step()
        assert not await other.step()
        clock[0] += TTL - 1
        assert await one.step()
        clock[0] += TTL - 1
        assert not await other.step(), "it was renewed"
        clock[0] += TTL + 1
        assert await other.step(), "nobody has renewed it"
        assert not await one.step()
        await other.release()
        assert await one.step(), "it was given back"

    asyncio.run(run())


def test_passes_wait_for_the_lead_and_are_repeated_when_they_fail() -> None:
    async def run(leads: asyncio.Event, calls: list[str]) -> None:
        done = asyncio.Event()

        async def look(_: str, name: str) -> float | None:
            calls.append(name)
            if len(calls) == 1:
                raise httpx2.ConnectError("nobody there")
            done.set()
            return None

        loops = Loops({"MeshCluster": look}, leads, pause=0)
        loops.look("MeshCluster", "ns", "m")
        await asyncio.sleep(0)
        assert calls == []
        leads.set()
        async with asyncio.timeout(60):
            await done.wait()
        await loops.close()

    leads, calls = asyncio.Event(), list[str]()
    asyncio.run(run(leads, calls))
    assert calls == ["m", "m"]
