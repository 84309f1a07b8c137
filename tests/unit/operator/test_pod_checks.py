"""What pods are told: misspelt keys, datasets that are not there, a webhook that was not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from meshoperator import metrics
from meshoperator.controllers.pod_events import PodEvents
from meshoperator.planners.pod_admission import DONE
from meshoperator.planners.pod_checks import (
    REASONS,
    AvailableDatasets,
    datasets_not_injected,
    explain_missing,
    find_misspellings,
)
from meshoperator.settings import OperatorSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WEBHOOK = OperatorSettings(webhook=("127.0.0.1", 0))


def pod(
    labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None, **more: Any
) -> dict[str, Any]:
    found = {"name": "train", "namespace": "team", "uid": "u", "creationTimestamp": "2030-01-01T00:00:00Z"}
    return found | {"labels": labels or {}, "annotations": annotations or {}} | more


def dataset(
    name: str, namespace: str = "team", created: str = "2029-01-01T00:00:00Z", **annotations: str
) -> Any:
    given = {f"shardmesh.io/{key}": value for key, value in annotations.items()}
    metadata = {"name": name, "namespace": namespace, "creationTimestamp": created, "annotations": given}
    return {"metadata": metadata, "spec": {"clusterRef": "mesh"}}


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("mesh.shardmesh.io/dataset", "label shardmesh.io/dataset"),
        ("shardmesh/dataset", "label shardmesh.io/dataset"),
        ("shardmesh.com/dataset", "label shardmesh.io/dataset"),
        ("sharedmesh.io/dataset", "label shardmesh.io/dataset"),
        ("shardmash.io/dataset", "label shardmesh.io/dataset"),
        ("shardmesh.io/Dataset", "label shardmesh.io/dataset"),
        ("shardmesh.io/data-set", "label shardmesh.io/dataset"),
        ("shardmesh.io/datsets", "annotation shardmesh.io/datasets"),
        ("shardmesh.io/require_local", "annotation shardmesh.io/require-local"),
        ("shardmesh.io/inject", "annotation shardmesh.io/inject"),  # a label is none of these
        ("shardmesh.io/datasets", "annotation shardmesh.io/datasets"),
    ],
)
def test_near_misses_of_our_keys_are_told_with_the_right_one(key: str, right: str) -> None:
    (found,) = find_misspellings(pod({key: "photos"}))
    assert found.reason == "KeyMisspelt"
    assert found.message == f"the label {key} has no effect: use the {right}; recreate the pod"


@pytest.mark.parametrize(
    "key",
    [
        "dataset",
        "app.kubernetes.io/name",
        "servicemesh.io/dataset",
        "mesh.io/dataset",
        "example.com/dataset",
        "shardmesh.io/team",
        "kubeflow.org/inject",
    ],
)
def test_what_others_write_is_theirs(key: str) -> None:
    assert find_misspellings(pod({key: "photos"}, {key: "photos"})) == ()


def test_what_the_webhook_wrote_is_no_mistake() -> None:
    annotations = {DONE: "photos", "shardmesh.io/credentials": "s", "shardmesh.io/require-local": "true"}
    assert find_misspellings(pod({"shardmesh.io/dataset": "photos"}, annotations)) == ()
    assert datasets_not_injected(pod({"shardmesh.io/dataset": "photos"}, annotations)) == ()


def test_a_label_among_the_annotations_is_told() -> None:
    (found,) = find_misspellings(pod({}, {"shardmesh.io/dataset": "photos"}))
    assert "the annotation shardmesh.io/dataset has no effect: use the label" in found.message


def test_an_annotation_without_the_label_is_told() -> None:
    (found,) = find_misspellings(pod({}, {"shardmesh.io/datasets": "photos,words"}))
    assert found.reason == "LabelMissing"
    assert "even if empty: add the label" in found.message
    assert datasets_not_injected(pod({}, {"shardmesh.io/datasets": "photos,words"})) == ()


def test_values_that_nothing_reads_are_told() -> None:
    (found,) = find_misspellings(pod({}, {"shardmesh.io/require-local": "yes", "shardmesh.io/keys": "env"}))
    assert found.reason == "ValueUnknown"
    assert "shardmesh.io/require-local must be true or false, not 'yes'" in found.message
    assert "shardmesh.io/keys must be environment, not 'env'" in found.message


def why(asked: str, *datasets: Any, **shelf: Any) -> list[tuple[str, str]]:
    metadata = pod({"shardmesh.io/dataset": asked})
    there = AvailableDatasets(tuple(datasets), frozenset({("team", "mesh"), ("data", "mesh")}), **shelf)
    return [
        (each.reason, each.message)
        for each in explain_missing(metadata, datasets_not_injected(metadata), there)
    ]


def test_a_dataset_that_is_not_there_is_told_with_one_that_is() -> None:
    ((reason, message),) = why("photo", dataset("photos"), dataset("words"))
    assert reason == "DatasetUnknown"
    assert "no MeshDataset photo is available to pods of namespace team: did you mean photos?" in message
    ((_, message),) = why("photo", dataset("words"))
    assert "kubectl -n team get meshdatasets" in message


def test_a_dataset_of_another_namespace_is_told_without_that_namespace() -> None:
    ((reason, message),) = why("photos", dataset("photos", "data"))
    assert reason == "DatasetUnknown"
    assert "annotate it with shardmesh.io/namespaces: team" in message
    assert "data," not in message
    assert "namespace data" not in message
    ((_, message),) = why("photos", dataset("photos", "data", namespaces="team"), shares=False)
    assert "shardmesh.io/namespaces" not in message  # it would not help


def test_a_dataset_that_is_shared_is_there() -> None:
    ((reason, _),) = why("photos", dataset("photos", "data", namespaces="team"))
    assert reason == "NotAdmitted"


def test_a_pod_that_the_webhook_never_saw_is_told() -> None:
    ((reason, message),) = why("photos.words", dataset("photos"), dataset("words"))
    assert reason == "NotAdmitted"
    assert "the webhook did not answer when it was created; recreate the pod" in message
    assert "kubectl -n team delete pod train" in message
    assert (
        why("photos", dataset("photos"), admits=False) == []
    )  # there is no webhook: nobody promised anything


def test_a_dataset_that_came_after_its_pod_is_told() -> None:
    ((reason, message),) = why("photos", dataset("photos", created="2031-01-01T00:00:00Z"))
    assert (reason, "photos was created after it" in message) == ("NotAdmitted", True)


def test_a_dataset_whose_mesh_is_not_there_is_told() -> None:
    metadata = pod({"shardmesh.io/dataset": "photos"})
    (found,) = explain_missing(metadata, ("photos",), AvailableDatasets((dataset("photos"),), frozenset()))
    assert (found.reason, "the MeshCluster mesh, which does not exist" in found.message) == (
        "DatasetUnknown",
        True,
    )


class FakeKube:
    """Pages of pods; how often datasets were asked for."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.lists = 0

    async def pages_of_metadata(self, *_: Any) -> AsyncIterator[list[dict[str, Any]]]:
        for start in range(0, len(self.pods), 100):
            yield self.pods[start : start + 100]

    async def list_all(self, kind: str, namespace: str | None = None) -> list[dict[str, Any]]:
        self.lists += 1
        return [dataset("photos")] if kind == "MeshDataset" else []


class Ear:
    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    async def record_event(self, about: dict[str, Any], reason: str, message: str, *, once: str = "") -> None:
        assert once
        self.heard.append((about["metadata"]["name"], reason))


def numbered(number: int, controller: str = "") -> dict[str, Any]:
    owner = [{"uid": controller, "controller": True}] if controller else []
    label = {"shardmesh.io/dataset": "photo"}
    return {"metadata": pod(label, name=f"p{number}", uid=f"u{number}", ownerReferences=owner)}


def test_events_are_bounded_and_the_counter_is_not() -> None:
    kube, ear, now = FakeKube(), Ear(), [0.0]
    counter = metrics.unserved.labels("DatasetUnknown")._value
    before = counter.get()
    notices: Any = PodEvents(kube, WEBHOOK, ear, lambda: now[0], rest=0)  # type: ignore[arg-type]
    kube.pods = [numbered(number, "job") for number in range(1000)]  # one job, once for all

    def sweep() -> int:
        ear.heard.clear()
        asyncio.run(notices.check_all())
        return len(ear.heard)

    assert [sweep(), sweep()] == [5, 0]
    assert counter.get() - before == 1000
    assert kube.lists == 2  # not once a pod
    kube.pods += [numbered(number) for number in range(1000, 2000)]  # each by itself: a burst, then a trickle
    assert sweep() == 45
    assert sweep() == 0
    now[0] += 20
    assert sweep() == 10
    assert counter.get() - before == 2000
    kube.pods, now[0] = [numbered(3000, "job")], now[0] + 60
    assert [sweep(), sweep()] == [0, 1]  # those that were told are found to be gone: then this one may be


def test_every_reason_is_a_warning() -> None:
    from meshoperator.kube.event_recorder import _WARNINGS

    assert set(REASONS) <= _WARNINGS
