"""A MeshCluster that is deleted, over an emulated API: what goes with it, and what waits for whom."""

from __future__ import annotations

import asyncio

from tests.kubernetes.emulated import Api
from tests.kubernetes.playing import SCENES, Operator, change, delete, play
from tests.kubernetes.world import NAME, NAMESPACE, World


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
    assert asyncio.run(loop.reconcile(NAMESPACE, NAME)) is not None
    found = api.find("meshclusters", NAME)
    assert found is not None
    assert found["status"]["phase"] == "Deleting"
    told = {each["type"]: each["message"] for each in found["status"]["conditions"]}
    assert told["Progressing"] == "waiting for mesh-s-0, mesh-s-1 to end"
    found["metadata"]["deletionTimestamp"] = "2029-12-31T23:00:00Z"
    assert asyncio.run(loop.reconcile(NAMESPACE, NAME)) is None
    assert api.of("meshclusters") == []
    said = {each["reason"]: each["message"] for each in api.of("events")}
    assert said["DeletionForced"].startswith(
        "deleted although mesh-s-0 and mesh-s-1 did not stop within 600 s"
    )
    assert "delete pod NAME --force" in said["DeletionForced"]
    assert said["Deleted"] == "its daemons were not waited for any longer"
