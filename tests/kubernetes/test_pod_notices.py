"""Pods that ask for datasets and do not get them, as a real API server shows and selects them: what their
events say, how often, and how much of the pods is read."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Event, Namespace, Pod
from lightkube.types import PatchType
from prometheus_client import REGISTRY

from meshoperator.controllers.pod_events import UNPLACED, PodEvents
from meshoperator.kube.client import Kube
from meshoperator.kube.event_recorder import EventRecorder
from meshoperator.manager import DataManager, now_stamp
from meshoperator.settings import OperatorSettings
from tests.kubernetes.looping import Loop, client
from tests.kubernetes.test_webhook import account, dataset, mesh, until

if TYPE_CHECKING:
    from pathlib import Path

    from lightkube import Client

LABEL = "shardmesh.io/dataset"


def create(kube: Client, namespace: str, name: str, labels: dict[str, str], **annotations: str) -> None:
    given = {f"shardmesh.io/{key}": value for key, value in annotations.items()}
    metadata = {"name": name, "labels": labels, "annotations": given}
    spec = {"schedulerName": "nobody", "containers": [{"name": "train", "image": "i:1"}]}
    made: Any = Pod.from_dict({"metadata": metadata, "spec": spec})
    kube.create(made, namespace=namespace)


def told(kube: Client, namespace: str) -> list[tuple[str, str]]:
    """(pod, reason) of events, as often as they are there."""
    chosen = {"type": "Warning", "involvedObject.kind": "Pod", "source": "shardmesh-operator"}
    found = [each.to_dict() for each in kube.list(Event, namespace=namespace, fields=dict(chosen))]
    return sorted((each["involvedObject"]["name"], each["reason"]) for each in found)


def test_each_is_told_once_whoever_leads_and_by_metadata_alone(
    kubeconfig: Path, kube: Client, namespace: str
) -> None:
    account(kube, namespace)
    mesh(kube, namespace)
    dataset(kube, namespace, "photos", "mesh://texts")
    create(kube, namespace, "missed", {LABEL: "photos"})
    create(kube, namespace, "misspelt", {"mesh.shardmesh.io/dataset": "photos"})
    create(kube, namespace, "unknown", {LABEL: "photo"})
    create(kube, namespace, "annotated", {}, datasets="photos")
    create(kube, namespace, "well", {LABEL: "photos"}, admitted="photos")
    create(kube, namespace, "daemon", {"shardmesh.io/cluster": "mesh", "shardmesh.io/datasets": "x"})
    create(kube, namespace, "over", {"shardmesh.io/datasets": "photos"})
    over = {"status": {"phase": "Succeeded"}}
    kube.patch(Pod.Status, "over", over, namespace=namespace, patch_type=PatchType.MERGE)
    pages: list[list[dict[str, Any]]] = []
    with Loop() as loop:
        api = loop.run(client(kubeconfig))

        def operator(*namespaces: str) -> PodEvents:
            settings = OperatorSettings(namespaces, webhook=("127.0.0.1", 0))
            own = Kube(api)
            return PodEvents(own, settings, EventRecorder(own, now_stamp), time.monotonic, rest=0)

        async def read() -> None:
            async for page in Kube(api).pages_of_metadata("Pod", namespace, {}, 2):
                pages.append(page)

        try:
            first = operator(namespace)
            assert [loop.run(first.check_all(2)) for _ in range(2)] == [5, 5]
            expected = [
                ("annotated", "LabelMissing"),
                ("missed", "NotAdmitted"),
                ("misspelt", "KeyMisspelt"),
                ("unknown", "DatasetUnknown"),
            ]
            assert told(kube, namespace) == expected
            loop.run(operator(namespace).check_all())  # another one leads now
            loop.run(operator().check_all())  # in the whole cluster
            assert told(kube, namespace) == expected
            loop.run(read())
        finally:
            loop.run(api.close())
    assert [len(page) for page in pages] == [2, 2, 2, 1]
    assert {key for page in pages for each in page for key in each} == {"apiVersion", "kind", "metadata"}


def test_pods_of_a_time_without_an_operator_are_counted_until_they_are_gone(
    kubeconfig: Path, kube: Client, namespace: str
) -> None:
    """A counter that begins with them shows no increase."""
    account(kube, namespace)
    mesh(kube, namespace)
    dataset(kube, namespace, "photos", "mesh://texts")
    for name in ("first", "second"):
        create(kube, namespace, name, {LABEL: "photos"})

    empty = f"{namespace}-empty"
    kube.create(Namespace(metadata=ObjectMeta(name=empty)))

    def counted() -> float | None:
        value: float | None = REGISTRY.get_sample_value(
            "mesh_operator_pods_unserved", {"reason": "NotAdmitted"}
        )
        return value

    with Loop() as loop:
        api = loop.run(client(kubeconfig))
        try:
            own = Kube(api)
            settings = OperatorSettings((namespace, empty), webhook=("127.0.0.1", 0))
            pods = PodEvents(own, settings, EventRecorder(own, now_stamp), time.monotonic, rest=0)
            loop.run(pods.check_all())
            assert counted() == 2
            gone = kube.get(Pod, "first", namespace=namespace).to_dict()
            kube.delete(Pod, "first", namespace=namespace, grace_period=0)
            loop.run(pods.check_all())
            assert counted() == 1
            loop.run(pods.check_pod(gone))  # an event that came late; the next check corrects it
            loop.run(pods.check_all())
            assert counted() == 1
            over = {"status": {"phase": "Succeeded"}}
            kube.patch(Pod.Status, "second", over, namespace=namespace, patch_type=PatchType.MERGE)
            loop.run(pods.check_pod(kube.get(Pod, "second", namespace=namespace).to_dict()))
            assert counted() == 0
        finally:
            loop.run(api.close())
            kube.delete(Namespace, empty)


def test_an_operator_looks_at_pods_by_itself(kubeconfig: Path, kube: Client, namespace: str) -> None:
    account(kube, namespace)
    mesh(kube, namespace)
    create(kube, namespace, "labelled", {LABEL: "photos"})
    create(kube, namespace, "misspelt", {"shardmesh.io/datset": "photos"})

    async def work() -> None:
        api = await client(kubeconfig)
        own = Kube(api)
        leads, settings = asyncio.Event(), OperatorSettings((namespace,))
        program = DataManager(own, settings, EventRecorder(own, now_stamp), leads, time.time)
        tasks = [asyncio.ensure_future(each) for each in program.work()]
        leads.set()
        try:
            wanted = [("labelled", "DatasetUnknown"), ("misspelt", "KeyMisspelt")]
            await asyncio.to_thread(until, lambda: told(kube, namespace) == wanted)
            # watches show them: no sweep for minutes
            create(kube, namespace, "later", {LABEL: "words"})
            create(kube, namespace, "mistaken", {"shardmesh.io/datset": "photos"})
            wanted += [("later", "DatasetUnknown"), ("mistaken", "KeyMisspelt")]
            await asyncio.to_thread(until, lambda: told(kube, namespace) == sorted(wanted))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await program.aclose()
            await api.close()

    with Loop() as loop:
        loop.run(work())


def test_a_pod_is_in_the_watch_until_it_has_a_node_and_by_its_metadata_alone(
    kubeconfig: Path, kube: Client, namespace: str
) -> None:
    """So that ten thousand pods that run cost the API server nothing, whatever their statuses do."""
    account(kube, namespace)

    def place(name: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
        target = {"apiVersion": "v1", "kind": "Node", "name": "somewhere"}
        wish = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        assert kube._client._client.post(path, json=wish).status_code == 201

    def said(name: str, status: dict[str, Any]) -> None:
        kube.patch(Pod.Status, name, {"status": status}, namespace=namespace, patch_type=PatchType.MERGE)

    create(kube, namespace, "before", {})
    create(kube, namespace, "labelled", {LABEL: "photos"})
    seen: list[tuple[str, str]] = []
    parts: set[str] = set()

    async def work() -> None:
        api = await client(kubeconfig)
        try:
            changes = Kube(api).watch_metadata("Pod", namespace, UNPLACED, "0", 60)
            async for what, pod in changes:
                name = pod["metadata"]["name"]
                seen.append((what, name))
                parts.update(pod)
                if (what, name) == ("ADDED", "before"):
                    place("before")
                elif (what, name) == ("DELETED", "before"):
                    said("before", {"phase": "Running"})
                    said("before", {"phase": "Running", "message": "and on"})
                    create(kube, namespace, "after", {})
                elif name == "after":
                    return
        finally:
            await api.close()

    with Loop() as loop:
        loop.run(work())
    assert seen == [("ADDED", "before"), ("DELETED", "before"), ("ADDED", "after")]
    assert parts == {"apiVersion", "kind", "metadata"}


def test_a_line_break_in_an_annotation_ends_no_watch(kubeconfig: Path, kube: Client, namespace: str) -> None:
    """Of those that JSON may have as they are, and Unicode takes for one: anybody may write them."""
    account(kube, namespace)
    text = "a\u0085b\u2028c"
    create(kube, namespace, "odd", {LABEL: "photos"}, note=text)

    async def first() -> str:
        api = await client(kubeconfig)
        try:
            async for _, pod in Kube(api).watch("Pod", namespace, 60, LABEL):
                return str(pod["metadata"]["annotations"]["shardmesh.io/note"])
        finally:
            await api.close()
        return ""

    with Loop() as loop:
        assert loop.run(first()) == text
