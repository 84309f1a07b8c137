"""Pods that ask for datasets and do not get them, as a real API server shows and selects them: what their
events say, how often, and how much of the pods is read."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from lightkube.resources.core_v1 import Event, Pod
from lightkube.types import PatchType

from meshoperator.dataprogram import DataProgram
from meshoperator.kube import Kube
from meshoperator.podnotices import PodNotices
from meshoperator.program import stamp
from meshoperator.recording import Recorder
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

        def operator(*namespaces: str) -> PodNotices:
            settings = OperatorSettings(namespaces, webhook=("127.0.0.1", 0))
            own = Kube(api)
            return PodNotices(own, settings, Recorder(own, stamp), time.monotonic, rest=0)

        async def read() -> None:
            async for page in Kube(api).pages_of_metadata("Pod", namespace, {}, 2):
                pages.append(page)

        try:
            first = operator(namespace)
            assert [loop.run(first.run(2)) for _ in range(2)] == [5, 5]
            expected = [
                ("annotated", "LabelMissing"),
                ("missed", "NotAdmitted"),
                ("misspelt", "KeyMisspelt"),
                ("unknown", "DatasetUnknown"),
            ]
            assert told(kube, namespace) == expected
            loop.run(operator(namespace).run())  # another one leads now
            loop.run(operator().run())  # in the whole cluster
            assert told(kube, namespace) == expected
            loop.run(read())
        finally:
            loop.run(api.close())
    assert [len(page) for page in pages] == [2, 2, 2, 1]
    assert {key for page in pages for each in page for key in each} == {"apiVersion", "kind", "metadata"}


def test_an_operator_looks_at_pods_by_itself(kubeconfig: Path, kube: Client, namespace: str) -> None:
    account(kube, namespace)
    mesh(kube, namespace)
    create(kube, namespace, "labelled", {LABEL: "photos"})
    create(kube, namespace, "misspelt", {"shardmesh.io/datset": "photos"})

    async def work() -> None:
        api = await client(kubeconfig)
        own = Kube(api)
        leads, settings = asyncio.Event(), OperatorSettings((namespace,))
        program = DataProgram(own, settings, Recorder(own, stamp), leads, time.time)
        tasks = [asyncio.ensure_future(each) for each in program.work()]
        leads.set()
        try:
            wanted = [("labelled", "DatasetUnknown"), ("misspelt", "KeyMisspelt")]
            await asyncio.to_thread(until, lambda: told(kube, namespace) == wanted)
            create(kube, namespace, "later", {LABEL: "words"})  # the watch shows it: no sweep for minutes
            await asyncio.to_thread(until, lambda: ("later", "DatasetUnknown") in told(kube, namespace))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await program.aclose()
            await api.close()

    with Loop() as loop:
        loop.run(work())
