"""The loops of datasets, loads and views over an emulated API that refuses at random and whose watches
break; the daemon is real."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from lightkube import ApiError

from meshoperator.controllers.base_controller import FINALIZER
from meshoperator.kube.client import Kube
from meshoperator.manager import DataManager
from meshoperator.planners.pod_admission import LABEL, SECRET
from meshoperator.settings import OperatorSettings
from tests.kubernetes.dying import Ear
from tests.kubernetes.emulated import Api, Fault
from tests.kubernetes.world import mesh_cluster
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMESPACE = "ns"
OPS = [{"op": "decode"}, {"op": "encode", "args": {"format": "png"}}]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start() as found:
        yield found


def document(what: str, name: str, **spec: Any) -> dict[str, Any]:
    api = "shardmesh.io/v1alpha1"
    return {"apiVersion": api, "kind": what, "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def world(daemon: Daemon) -> Api:
    api = Api()
    api.put("meshclusters", mesh_cluster(1))
    keys = {"AWS_ACCESS_KEY_ID": daemon.access_key, "AWS_SECRET_ACCESS_KEY": daemon.secret_key}
    data = {key: base64.b64encode(value.encode()).decode() for key, value in keys.items()}
    api.put(
        "secrets", {"kind": "Secret", "metadata": {"name": "mesh-root", "namespace": NAMESPACE}, "data": data}
    )
    return api


def program(api: Api, daemon: Daemon, leads: asyncio.Event) -> DataManager:
    settings = OperatorSettings(endpoint=daemon.endpoint)
    return DataManager(Kube(api.client()), settings, Ear(), leads, time.time)


@pytest.mark.parametrize("seed", range(4))
def test_refusals_hold_nothing_up(daemon: Daemon, tmp_path: Path, seed: int) -> None:
    (tmp_path / "1.bin").write_bytes(b"one")
    api, choose, name = world(daemon), random.Random(seed), f"photos-{seed}"
    source = {"uri": f"file://{tmp_path}"}
    api.put("meshdatasets", document("MeshDataset", name, clusterRef="mesh", source=source))
    api.put("meshloads", document("MeshLoad", "load", datasetRef=name))
    api.put(
        "meshviews", document("MeshView", "view", clusterRef="mesh", bucket=name, kind="transform", ops=OPS)
    )
    api.fault = Fault(lambda method, *_: choose.random() < 0.3, choose.choice((409, 500, 503)))
    wanted: list[tuple[str, str, Callable[[dict[str, Any]], Any]]] = [
        ("meshdatasets", name, lambda status: status.get("sourceBytes") == 3),
        ("meshloads", "load", lambda status: status.get("phase") == "Succeeded"),
        ("meshviews", "view", lambda status: status.get("ready")),
    ]

    async def converge() -> None:
        found = program(api, daemon, asyncio.Event())
        passes = found.passes()
        kinds = {"meshdatasets": "MeshDataset", "meshloads": "MeshLoad", "meshviews": "MeshView"}

        async def look(plural: str, name: str) -> None:
            try:
                await passes[kinds[plural]](NAMESPACE, name)
            except ApiError:
                await asyncio.sleep(0)

        def status(plural: str, name: str) -> dict[str, Any]:
            return dict((api.find(plural, name) or {}).get("status") or {})

        try:
            async with asyncio.timeout(60):
                while not all(true(status(plural, name)) for plural, name, true in wanted):
                    for plural, name, _ in wanted:
                        await look(plural, name)
                    await asyncio.sleep(0.02)
                for plural, name, _ in reversed(wanted):
                    there = api.find(plural, name)
                    assert there is not None
                    there["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
                    api.put(plural, there)
                    while api.find(plural, name) is not None:
                        await look(plural, name)
        finally:
            await found.aclose()

    asyncio.run(converge())
    assert daemon.request("GET", f"/-/buckets/{name}").status == 404


def test_what_is_deleted_waits_for_no_mesh_whose_definition_is_gone(daemon: Daemon) -> None:
    """As when all definitions are deleted at once: MeshClusters may be over before the others are."""
    api = world(daemon)
    kinds = {"meshdatasets": "MeshDataset", "meshloads": "MeshLoad", "meshviews": "MeshView"}
    specs: dict[str, dict[str, Any]] = {
        "meshdatasets": {"clusterRef": "mesh", "source": {"uri": "file:///nowhere"}},
        "meshloads": {"datasetRef": "m"},
        "meshviews": {"clusterRef": "mesh", "bucket": "photos", "kind": "transform", "ops": OPS},
    }
    for plural, kind in kinds.items():
        api.put(plural, document(kind, "m", **specs[plural]))
        found = api.find(plural, "m")
        assert found is not None
        found["metadata"] |= {"deletionTimestamp": "2030-01-01T00:00:00Z", "finalizers": [FINALIZER]}
    api.absent.add("meshclusters")

    async def end() -> None:
        found = program(api, daemon, asyncio.Event())
        try:
            for kind in reversed(kinds.values()):
                await found.passes()[kind](NAMESPACE, "m")
        finally:
            await found.aclose()

    asyncio.run(end())
    assert [name for plural, _, name in api.objects if plural in kinds] == []


def test_what_is_not_understood_is_deleted_all_the_same(daemon: Daemon) -> None:
    """After ten minutes, as where daemons do not answer: an earlier operator may have taken it."""
    api = world(daemon)
    for name, since in (("old", "2020-01-01T00:00:00Z"), ("new", "2030-01-01T00:00:00Z")):
        api.put("meshviews", document("MeshView", name, clusterRef="mesh", bucket="m", kind="transform"))
        found = api.find("meshviews", name)
        assert found is not None
        found["metadata"] |= {"deletionTimestamp": since, "finalizers": [FINALIZER]}

    async def end() -> None:
        found = program(api, daemon, asyncio.Event())
        try:
            for name in ("old", "new"):
                await found.passes()["MeshView"](NAMESPACE, name)
        finally:
            await found.aclose()

    asyncio.run(end())
    (left,) = api.of("meshviews")
    assert left["metadata"]["name"] == "new"
    assert "Expected `str` of length >= 3" in left["status"]["conditions"][0]["message"]


def test_a_watch_that_breaks_is_begun_again(daemon: Daemon) -> None:
    """Of two training pods one is told before the watch breaks, one by the next."""
    api = world(daemon)
    source = {"uri": "mesh://texts"}
    api.put("meshdatasets", document("MeshDataset", "words", clusterRef="mesh", source=source))
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "uid": f"uid-{name}",
                "resourceVersion": "1",
                "labels": {LABEL: "words"},
                "annotations": {SECRET: f"keys-{name}"},
            },
        }
        for name in ("a", "b")
    ]
    events: list[Any] = [{"type": "ADDED", "object": pod} for pod in pods]
    api.streams = [[events[0], httpx2.ReadError("cut")], [events[1]]]

    async def follow() -> None:
        leads = asyncio.Event()
        found = program(api, daemon, leads)
        tasks = [asyncio.ensure_future(work) for work in found.work()]
        try:
            await asyncio.sleep(0.1)
            assert api.find("secrets", "keys-a") is None  # somebody else leads
            leads.set()
            async with asyncio.timeout(60):
                while not (api.find("secrets", "keys-a") and api.find("secrets", "keys-b")):  # noqa: ASYNC110 no event there
                    await asyncio.sleep(0.05)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await found.aclose()

    asyncio.run(follow())
    made = api.find("secrets", "keys-b")
    assert made is not None
    assert made["metadata"]["ownerReferences"][0]["name"] == "b"


def test_keys_that_are_on_their_way_are_waited_for(daemon: Daemon, tmp_path: Path) -> None:
    """The operator writes the Secret at once; the kubelets deliver it to the daemons when they come round."""
    (tmp_path / "1.bin").write_bytes(b"one")
    api = world(daemon)
    secret = {"kind": "Secret", "metadata": {"name": "keys", "namespace": NAMESPACE}}
    api.put("secrets", secret | {"data": {"aws_access_key_id": "eA=="}})
    source = {"uri": f"file://{tmp_path}", "secretRef": {"name": "keys"}}
    api.put("meshdatasets", document("MeshDataset", "keyed", clusterRef="mesh", source=source))

    def conditions() -> dict[str, tuple[str, str]]:
        status = (api.find("meshdatasets", "keyed") or {})["status"]
        return {each["type"]: (each["status"], each["reason"]) for each in status["conditions"]}

    async def run() -> None:
        ear, settings = Ear(), OperatorSettings(endpoint=daemon.endpoint)
        found = DataManager(Kube(api.client()), settings, ear, asyncio.Event(), time.time)
        look = found.passes()["MeshDataset"]
        try:
            for _ in range(3):
                rest = await look(NAMESPACE, "keyed")
            assert rest is not None
            assert rest < 30
            assert (api.find("meshdatasets", "keyed") or {})["status"]["phase"] == "Pending"
            assert conditions()["SourceReachable"] == ("Unknown", "CredentialsMissing")
            assert "SourceRefused" not in [reason for reason, _ in ear.heard]
            delivered = base64.b64decode((api.find("secrets", "mesh-origins") or {})["data"]["keyed"])
            deliver(daemon, "keyed", delivered)
            await look(NAMESPACE, "keyed")
            assert conditions()["SourceReachable"] == ("True", "Answers")
        finally:
            await found.aclose()

    asyncio.run(run())


def deliver(daemon: Daemon, name: str, content: bytes) -> None:
    """As the kubelet does, into the volume of the Secret."""
    folder = daemon.data_dir / "origins"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
