"""Volumes of daemons over an emulated API: they grow under their pods, whatever happens to the operator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kubernetes.emulated import Api, Fault
from tests.kubernetes.playing import (
    CLAIMED,
    EXPANDED,
    Operator,
    change,
    claims,
    killed_everywhere,
    on_claims,
    play,
    settled,
    told,
    void,
)
from tests.kubernetes.world import NAME, NAMESPACE, World


def test_volumes_grow_under_their_pods_wherever_the_operator_is_killed() -> None:
    killed_everywhere(CLAIMED, EXPANDED)


def test_a_daemon_is_decommissioned_with_its_volume_wherever_the_operator_is_killed() -> None:
    """Its claim goes when the map says that others have its data (`World.tick` asserts that)."""
    scene = ("decommission", _decommission, lambda world: settled(world, 2) and not _is_decommissioned(world))
    killed_everywhere(CLAIMED, scene)


def _decommission(world: World) -> None:
    found = world.api.find("meshnodes", "mesh-s-1")
    assert found is not None
    found["spec"]["desiredState"] = "Decommissioned"
    world.api.put("meshnodes", found)


def _is_decommissioned(world: World) -> bool:
    found = world.api.find("meshnodes", "mesh-s-1")
    return found is None or "desiredState" in found["spec"]


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
        asyncio.run(loop.reconcile(NAMESPACE, NAME))
        world.tick()
    assert len(world.pods()) == 3
    assert told(api, "Progressing")["message"].startswith("a-mesh-s-0 cannot grow to 2Ti: ")
    said = [each["message"] for each in api.of("events") if each["reason"] == "Refused"]
    names = sorted(message.partition(" ")[0] for message in said)
    assert names == ["a-mesh-s-0", "a-mesh-s-1"]  # once each


@pytest.mark.parametrize(
    ("tiers", "why"),
    [
        (on_claims("500Gi")[0]["tiers"], "cannot shrink to"),
        (
            [*on_claims("1Ti")[0]["tiers"], {"name": "b", "class": "hdd", "volumeClaim": {"size": "1Ti"}}],
            "a running pod gets no further volumes",
        ),
    ],
)
def test_volumes_that_cannot_be_are_refused_with_what_to_do(tiers: list[Any], why: str) -> None:
    api = Api()
    world = World(api)
    asyncio.run(play(world, CLAIMED))
    change(world, nodePools=[on_claims("1Ti")[0] | {"tiers": tiers}])
    assert asyncio.run(Operator(api).loop.reconcile(NAMESPACE, NAME))
    found = told(api, "Progressing")
    assert found["reason"] == "SpecRefused"
    assert why in found["message"]
    assert "remove this one from the spec" in found["message"]
    assert set(claims(world).values()) == {"1Ti"}


def test_a_pod_whose_claim_is_gone_is_made_anew() -> None:
    """Made while the claim of the pod before was ending: nobody makes a claim for a pod that is there."""
    api = Api()
    world = World(api)
    asyncio.run(play(world, CLAIMED))
    waiting = world.pods()["mesh-s-1"]
    del waiting["spec"]["nodeName"], waiting["status"]
    api.put("pods", waiting)
    operator = Operator(api)
    asyncio.run(operator.loop.reconcile(NAMESPACE, NAME))
    assert "mesh-s-1" in world.pods()  # it waits for its volume
    del api.objects["persistentvolumeclaims", NAMESPACE, "a-mesh-s-1"]
    asyncio.run(operator.loop.reconcile(NAMESPACE, NAME))
    assert sorted(world.pods()) == ["mesh-s-0"]
    assert "mesh-s-1 is restarted: its volume claim is gone, and a new one is created with a new pod" in [
        each["message"] for each in api.of("events")
    ]
