"""Watches that break, who leads, and when passes are made, over an emulated API."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx2

from meshoperator.controllers.work_queue import WorkQueue
from meshoperator.kube.client import Kube
from meshoperator.kube.leader_election import TTL, LeaderElection
from meshoperator.manager import watch, watch_daemons, watch_maps
from tests.kubernetes.emulated import Api
from tests.kubernetes.world import NAME, NAMESPACE

if TYPE_CHECKING:
    import pytest

    from tests.kubernetes.emulated import Document


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

        loops = WorkQueue({"MeshCluster": look}, leads, pause=0)
        task = asyncio.ensure_future(watch_daemons(Kube(api.client()), loops, None, 0.01))
        async with asyncio.timeout(60):
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await loops.close()

    asyncio.run(run())
    assert set(seen) == {f"{NAMESPACE}/{NAME}"}


def test_a_changed_cluster_map_is_looked_at() -> None:
    """And again after a watch that broke, or that is too old to go on."""
    api, seen = Api(), list[str]()
    labels = {"shardmesh.io/store": NAME, "shardmesh.io/topic": "cluster"}

    def changed(kind: str, version: str) -> Document:
        metadata = {"name": "c", "namespace": NAMESPACE, "resourceVersion": version, "labels": labels}
        return {"type": kind, "object": {"metadata": metadata}}

    expired = {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"}
    api.streams = [
        [changed("ADDED", "5"), changed("BOOKMARK", "7")],
        [{"type": "ERROR", "object": expired}],
        [changed("MODIFIED", "9"), httpx2.ReadError("reset")],
        [changed("MODIFIED", "11")],
    ]

    async def run() -> None:
        leads, looked = asyncio.Event(), asyncio.Event()
        leads.set()

        async def look(namespace: str, name: str) -> float:
            seen.append(f"{namespace}/{name}")
            looked.set()
            return 600.0

        queue = WorkQueue({"MeshCluster": look}, leads, pause=0)
        task = asyncio.ensure_future(watch_maps(Kube(api.client()), queue, None, 0.05))
        async with asyncio.timeout(60):
            while api.streams or len(seen) < 3:
                await looked.wait()
                looked.clear()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await queue.close()

    asyncio.run(run())
    assert seen == [f"{NAMESPACE}/{NAME}"] * 3, "a bookmark is no change"


def test_one_of_two_operators_leads() -> None:
    api, clock = Api(), [0.0]

    def stamp() -> str:
        return f"2030-01-01T00:00:{clock[0]:02.0f}Z"

    async def run() -> None:
        one, other = (
            LeaderElection(Kube(api.client()), "ns", "op", name, stamp=stamp, monotonic=lambda: clock[0])
            for name in ("one", "other")
        )
        assert await one.renew_or_acquire()
        assert not await other.renew_or_acquire()
        clock[0] += TTL - 1
        assert await one.renew_or_acquire()
        clock[0] += TTL - 1
        assert not await other.renew_or_acquire(), "it was renewed"
        clock[0] += TTL + 1
        assert await other.renew_or_acquire(), "nobody has renewed it"
        assert not await one.renew_or_acquire()
        await other.release()
        assert await one.renew_or_acquire(), "it was given back"

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

        loops = WorkQueue({"MeshCluster": look}, leads, pause=0)
        loops.enqueue("MeshCluster", "ns", "m")
        await asyncio.sleep(0)
        assert calls == []
        leads.set()
        async with asyncio.timeout(60):
            await done.wait()
        await loops.close()

    leads, calls = asyncio.Event(), list[str]()
    asyncio.run(run(leads, calls))
    assert calls == ["m", "m"]


def test_a_kind_that_the_server_does_not_serve_is_watched_once_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its CRD may be installed, deleted and installed again while the operator runs."""
    api, seen = Api(absent={"meshviews"}), list[str]()
    spec = {
        "type": "ADDED",
        "object": {"kind": "MeshView", "metadata": {"name": "v", "resourceVersion": "1"}},
    }

    async def run() -> None:
        came = asyncio.Event()

        def on_event(what: str, document: Document) -> None:
            seen.append(f"{what} {document['metadata']['name']}")
            api.absent.add("meshviews")  # deleted again, while it is watched
            came.set()

        task = asyncio.ensure_future(watch(Kube(api.client()), "MeshView", None, on_event, 0, 0))
        for _ in range(2):
            await asyncio.sleep(0.05)
            came.clear()
            api.streams = [[spec, httpx2.ReadError("reset")]]
            api.absent.remove("meshviews")
            async with asyncio.timeout(60):
                await came.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert seen == ["ADDED v"] * 2
    told = [each.message for each in caplog.records if each.levelname == "ERROR"]
    assert len(told) == 2, "once each time it is gone, however often it is looked for"
    assert "does not serve MeshView; install its CRD" in told[0]
