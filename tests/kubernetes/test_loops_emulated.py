"""The loop of a MeshCluster over an emulated API: killed at every call that changes something, refused,
raced; what it makes and takes away."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest

from tests.kubernetes.emulated import Api, Fault
from tests.kubernetes.playing import SCENES, Operator, change, killed_everywhere, play, pool
from tests.kubernetes.world import NAME, NAMESPACE, World


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(len(SCENES)), ids=[name for name, *_ in SCENES])
def test_an_operator_killed_at_any_call_is_followed_by_one_that_goes_on(number: int) -> None:
    """Before each call that changes something: what it had done until then is what the next one finds. Nobody
    reads events: to die after one is to die before it."""
    killed_everywhere(SCENES[:number], SCENES[number])


def labelled(world: World) -> set[str]:
    """Kubernetes nodes that say that a daemon of the mesh has its disk there."""
    every = ((each["metadata"]["name"], each["metadata"]["labels"]) for each in world.api.of("nodes"))
    return {name for name, labels in every if any(key.startswith("disks.shardmesh.io/") for key in labels)}


def test_kubernetes_nodes_say_whose_disks_they_have_while_a_daemon_is_expected_back() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert labelled(world) == {"k0", "k1"}
    away = world.pods()["mesh-s-1"]  # it is being made anew
    del away["spec"]["nodeName"], away["status"]
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert labelled(world) == {"k0", "k1"}
    away["spec"]["nodeName"] = "k3"  # its own was not to be had
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert labelled(world) == {"k0", "k3"}
    change(world, deletionPolicy="Delete")
    asyncio.run(play(world, [SCENES[-1]]))
    assert labelled(world) == set()


def test_what_a_changed_spec_asks_for_no_more_goes_and_nothing_of_others() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    api.put("networkpolicies", {"kind": "NetworkPolicy", "metadata": {"name": "own", "namespace": NAMESPACE}})
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert [each["metadata"]["name"] for each in api.of("networkpolicies")] == [NAME, "own"]
    change(world, networkPolicy={"enabled": False}, metrics={"serviceMonitor": True})
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert [each["metadata"]["name"] for each in api.of("networkpolicies")] == ["own"]
    assert api.of("servicemonitors") == []  # no such API
    api.absent.clear()
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert [each["metadata"]["name"] for each in api.of("servicemonitors")] == [NAME]
    change(world, metrics={"serviceMonitor": False})
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert api.of("servicemonitors") == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("status", [409, 500])
def test_refusals_hold_nothing_up_for_ever(status: int, seed: int) -> None:
    """One call in eight that changes something is refused."""
    choose, api = random.Random(seed), Api()
    api.fault = Fault(lambda method, *_: method != "GET" and choose.random() < 0.125, status)
    asyncio.run(play(World(api), SCENES))


def test_a_second_pass_changes_nothing() -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, SCENES[:1]))
    before = api.effects
    asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    assert api.effects == before


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
