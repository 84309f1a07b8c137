"""How pods are deleted so that they are created again: what is told of it, and what of a call that fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from meshoperator.controllers.cluster_controller import ClusterController
from meshoperator.settings import OperatorSettings
from tests.unit.operator.test_manifests import cluster

if TYPE_CHECKING:
    from collections.abc import Mapping


class Pods:
    """Pods by uid. Of each deletion it is known whether it had ended, and whether it was without grace."""

    def __init__(self, uids: Mapping[str, str], broken: str = "") -> None:
        self.uids, self.broken = dict(uids), broken
        self.ended: list[tuple[str, bool]] = []
        self.under_way = self.at_once = 0

    async def delete_pod(self, name: str, _: str, uid: str, *, now: bool = False) -> bool:
        self.under_way += 1
        self.at_once = max(self.at_once, self.under_way)
        if name == self.broken:
            self.under_way -= 1
            raise ConnectionError("the API server is away")
        await asyncio.sleep(0.01)
        self.under_way -= 1
        self.ended.append((name, now))
        return self.uids.pop(name, "") == uid


class Events:
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    async def record_event(self, _: Any, reason: str, message: str) -> None:
        self.heard.append((reason, message))


def _restart(pods: Any, events: Any, reasons: Mapping[str, str], *, now: bool = False) -> None:
    uids = {name: f"uid of {name}" for name in reasons}
    clusters = ClusterController(pods, OperatorSettings(), events, str)
    asyncio.run(asyncio.wait_for(clusters._restart(cluster(), reasons, uids, {}, now=now), 30))


def test_displaced_pods_are_deleted_at_the_same_moment_and_without_grace() -> None:
    pods, events = Pods({"m-s-0": "uid of m-s-0", "m-s-1": "another"}), Events()
    _restart(pods, events, {"m-s-0": "it is on k1", "m-s-1": "it is on k0"}, now=True)
    assert pods.at_once == 2
    assert sorted(pods.ended) == [("m-s-0", True), ("m-s-1", True)]
    assert events.heard == [("Restarting", "m-s-0 is restarted: it is on k1")], (
        "of a successor nothing is told"
    )


def test_a_deletion_that_fails_ends_the_pass_when_the_others_have_ended() -> None:
    """Their events are written, and none of them goes on beside the next pass."""
    pods, events = Pods({"m-s-1": "uid of m-s-1"}, broken="m-s-0"), Events()
    with pytest.raises(ConnectionError, match="away"):
        _restart(pods, events, {"m-s-0": "why", "m-s-1": "why not"})
    assert pods.ended == [("m-s-1", False)]
    assert events.heard == [("Restarting", "m-s-1 is restarted: why not")]
