"""The kinds on a real API server that judges CEL: what is taken, what is refused and with which words."""

from __future__ import annotations

from copy import deepcopy
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from lightkube import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from meshoperator.resources import GROUP, KINDS, VERSION, parse
from meshoperator.resources.cluster import MeshClusterSpec
from tests.kubernetes.control_plane import EXAMPLES

if TYPE_CHECKING:
    from lightkube import Client

    from meshoperator.resources import Kind

BY_NAME = {kind.name: kind for kind in KINDS}
Path = tuple[str | int, ...]


def example(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name.lower()}.yaml").read_text())
    return document


def resource(kind: Kind) -> Any:
    return create_namespaced_resource(GROUP, VERSION, kind.name, kind.plural)


def changed(document: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy with something else there; None takes it away."""
    found = deepcopy(document)
    whole: Any = found
    inner = reduce(lambda node, step: node[step], path[:-1], whole)
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return found


def create(kube: Client, namespace: str, document: dict[str, Any]) -> Any:
    kind = resource(BY_NAME[document["kind"]])
    return kube.create(kind.from_dict(document), namespace=namespace)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_examples_are_taken_completed_and_understood(kube: Client, namespace: str, kind: Kind) -> None:
    stored = create(kube, namespace, example(kind.name))
    spec = parse(kind.spec, stored.spec)
    assert spec == parse(kind.spec, example(kind.name)["spec"]), "defaults here and there differ"
    assert not stored.status


def test_every_option_of_the_service_is_taken(kube: Client, namespace: str) -> None:
    s3 = {
        "serviceType": "LoadBalancer",
        "serviceAnnotations": {"service.kubernetes.io/topology-mode": "Auto"},
        "externalTrafficPolicy": "Local",
        "trafficDistribution": "PreferClose",
        "ipFamilyPolicy": "PreferDualStack",
        "ipFamilies": ["IPv6", "IPv4"],
    }
    stored = create(kube, namespace, changed(example("MeshCluster"), ("spec", "s3"), s3))
    assert s3.items() <= stored.spec["s3"].items()
    assert parse(MeshClusterSpec, stored.spec).s3.external_traffic_policy == "Local"


_POOL: Path = ("spec", "nodePools", 0)
_TIER: Path = (*_POOL, "tiers", 0)
_DATA: dict[str, Any] = {"name": "d", "class": "hdd", "hostPath": "/mnt/a"}
_INDEX: dict[str, Any] = {
    "name": "i",
    "class": "ssd",
    "content": "Index",
    "volumeClaim": {"size": "1Gi"},
}
REFUSED: list[tuple[str, Path, Any, str]] = [
    ("MeshCluster", ("metadata", "name"), "m" * 31, "at most 30 characters"),
    ("MeshCluster", (*_POOL, "replicas"), None, "either replicas or perMatchingNode"),
    ("MeshCluster", (*_POOL, "perMatchingNode"), True, "either replicas or perMatchingNode"),
    ("MeshCluster", ("spec", "nodePools", 1, "nodeSelector"), {}, "every node of the cluster would match"),
    ("MeshCluster", (*_POOL, "tiers"), [], "needs at least one tier"),
    (
        "MeshCluster",
        (*_POOL, "tiers"),
        [{"name": name, "class": "ssd", "hostPath": "/mnt/a"} for name in "ab"],
        "two tiers of a pool cannot have the same hostPath",
    ),
    (
        "MeshCluster",
        (*_POOL, "tiers"),
        [{"name": "m", "class": "mem", "quota": "1Gi"}],
        "a tier that is not mem",
    ),
    ("MeshCluster", (*_POOL, "roles"), ["compute"], "to own the data"),
    ("MeshCluster", (*_POOL, "replicas"), 0, "no daemon would own the data"),
    ("MeshCluster", (*_POOL, "replicas"), 4097, "less than or equal to 4096"),
    ("MeshCluster", (*_TIER, "hostPath"), None, "either hostPath or volumeClaim"),
    ("MeshCluster", (*_TIER, "volumeClaim"), {"size": "1Gi"}, "either hostPath or volumeClaim"),
    ("MeshCluster", (*_TIER, "class"), "tape", "Unsupported value"),
    ("MeshCluster", (*_TIER, "quota"), "much", "should match"),
    ("MeshCluster", (*_TIER, "content"), "Logs", "Unsupported value"),
    ("MeshCluster", (*_TIER, "content"), "Index", "has no quota: it holds no data"),
    ("MeshCluster", (*_POOL, "tiers"), [_INDEX], "beside another disk tier, for data"),
    ("MeshCluster", (*_POOL, "tiers"), [_DATA, _INDEX, _INDEX | {"name": "j"}], "one tier for the index"),
    ("MeshCluster", (*_POOL, "tiers"), [_DATA, _INDEX | {"class": "mem"}], "a tier for the index is a disk"),
    ("MeshCluster", ("spec", "nodePools", 1, "name"), "store", "Duplicate value"),
    ("MeshCluster", ("spec", "image"), "two words", "should match"),
    ("MeshCluster", ("spec", "s3"), {"externalTrafficPolicy": "Local"}, "needs serviceType NodePort or"),
    ("MeshCluster", ("spec", "s3"), {"ipFamilies": ["IPv6"]}, "ipFamilies needs ipFamilyPolicy"),
    ("MeshCluster", ("spec", "s3"), {"trafficDistribution": "Nearest"}, "Unsupported value"),
    ("MeshCluster", ("spec", "s3"), {"ipFamilyPolicy": "Both"}, "Unsupported value"),
    ("MeshNode", ("spec", "desiredState"), "Gone", "Unsupported value"),
    ("MeshDataset", ("metadata", "name"), "d" * 51, "at most 50 characters"),
    ("MeshDataset", ("spec", "placement", "full"), True, "either copies or full"),
    ("MeshDataset", ("spec", "placement", "nearPods"), "Off", "has no effect with nearPods: Off"),
    ("MeshDataset", ("spec", "placement", "pin"), True, "remove pin or retention.idleSeconds"),
    ("MeshDataset", ("spec", "source", "uri"), "ftp://host/x", "should match"),
    ("MeshDataset", ("spec", "source", "uri"), "file:///data", "needs no secretRef"),
    ("MeshLoad", ("spec", "manifest"), "list.txt", "either paths or manifest"),
    ("MeshLoad", ("spec", "schedule"), None, "policy Cron needs a schedule"),
    ("MeshLoad", ("spec", "policy"), "Once", "policy Cron needs a schedule"),
    ("MeshLoad", ("spec", "schedule"), "every day", "should match"),
    ("MeshView", ("spec", "ops"), [], "kind transform needs ops"),
    ("MeshView", ("spec", "kind"), "shards", "ops belong to kind transform"),
]


@pytest.mark.parametrize(("kind", "path", "value", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_makes_no_sense_is_refused(
    kube: Client, namespace: str, kind: str, path: Path, value: Any, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        create(kube, namespace, changed(example(kind), path, value))
    assert caught.value.status.code == 422
    assert words in str(caught.value.status.message)


KEPT: list[tuple[str, Path, Any, str]] = [
    ("MeshCluster", ("spec", "copies"), 3, "copies cannot be changed"),
    ("MeshCluster", ("spec", "slots"), 32_768, "slots cannot be changed"),
    ("MeshCluster", (*_TIER, "hostPath"), "/mnt/other", "hostPath cannot be changed"),
    ("MeshCluster", (*_TIER, "class"), "ssd", "class cannot be changed"),
    ("MeshCluster", (*_POOL, "tiers", 1, "content"), "Index", "content cannot be changed"),
    ("MeshNode", ("spec", "pool"), "gpu", "pool cannot be changed"),
    ("MeshNode", ("spec", "nodeId"), "other", "nodeId cannot be changed"),
    ("MeshDataset", ("spec", "source", "uri"), "s3://other/x", "source.uri cannot be changed"),
    ("MeshDataset", ("spec", "bucket"), "other", "bucket cannot be changed"),
    ("MeshLoad", ("spec", "action"), "Evict", "action cannot be changed"),
    ("MeshView", ("spec", "bucket"), "other", "bucket cannot be changed"),
]


@pytest.mark.parametrize(("kind", "path", "value", "words"), KEPT, ids=lambda value: str(value)[:40])
def test_what_is_set_once_stays(
    kube: Client, namespace: str, kind: str, path: Path, value: Any, words: str
) -> None:
    create(kube, namespace, example(kind))
    _patch_is_refused(kube, namespace, changed(example(kind), path, value), words)


def test_the_index_of_a_pool_stays_on_its_tier(kube: Client, namespace: str) -> None:
    create(kube, namespace, example("MeshCluster"))
    more = [*example("MeshCluster")["spec"]["nodePools"][0]["tiers"], _INDEX]
    _patch_is_refused(
        kube, namespace, changed(example("MeshCluster"), (*_POOL, "tiers"), more), "cannot move"
    )


def test_a_tier_for_the_index_is_taken(kube: Client, namespace: str) -> None:
    stored = create(kube, namespace, changed(example("MeshCluster"), (*_POOL, "tiers"), [_DATA, _INDEX]))
    contents = [tier.content for tier in parse(MeshClusterSpec, stored.spec).node_pools[0].tiers]
    assert contents == ["Data", "Index"]
    more = changed(example("MeshCluster"), (*_POOL, "tiers"), [_DATA, _INDEX])
    more["spec"]["nodePools"][0]["replicas"] = 9
    assert kube.replace(_at_present(kube, namespace, more)).spec["nodePools"][0]["replicas"] == 9


def test_a_decommissioned_node_does_not_come_back(kube: Client, namespace: str) -> None:
    gone = changed(example("MeshNode"), ("spec", "desiredState"), "Decommissioned")
    create(kube, namespace, gone)
    active = changed(gone, ("spec", "desiredState"), "Active")
    _patch_is_refused(kube, namespace, active, "cannot be reactivated")


def test_what_may_change_changes(kube: Client, namespace: str) -> None:
    create(kube, namespace, example("MeshCluster"))
    more = changed(example("MeshCluster"), (*_POOL, "replicas"), 9)
    kind = resource(BY_NAME["MeshCluster"])
    assert kube.replace(_at_present(kube, namespace, more)).spec["nodePools"][0]["replicas"] == 9
    assert kube.get(kind, "mesh", namespace=namespace).metadata.generation == 2


def test_a_status_is_written_apart_and_judged_too(kube: Client, namespace: str) -> None:
    create(kube, namespace, example("MeshNode"))
    kind = resource(BY_NAME["MeshNode"])
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Answers",
        "message": "it answers",
        "lastTransitionTime": "2026-11-21T00:00:00Z",
    }
    status = {"state": "up", "bytes": 1 << 45, "conditions": [condition], "unknown": 1}
    kube.patch(
        kind.Status, "mesh-store-2", {"status": status}, namespace=namespace, patch_type=PatchType.MERGE
    )
    stored = kube.get(kind, "mesh-store-2", namespace=namespace)
    assert stored.status == {key: value for key, value in status.items() if key != "unknown"}
    assert stored.metadata.generation == 1
    bad = {"status": {"conditions": [condition | {"reason": "two words"}]}}
    with pytest.raises(ApiError, match="should match"):
        kube.patch(kind.Status, "mesh-store-2", bad, namespace=namespace, patch_type=PatchType.MERGE)


def _at_present(kube: Client, namespace: str, document: dict[str, Any]) -> Any:
    kind = resource(BY_NAME[document["kind"]])
    stored = kube.get(kind, document["metadata"]["name"], namespace=namespace)
    meta = document["metadata"] | {"resourceVersion": stored.metadata.resourceVersion, "namespace": namespace}
    return kind.from_dict(document | {"metadata": meta})


def _patch_is_refused(kube: Client, namespace: str, document: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        kube.replace(_at_present(kube, namespace, document))
    assert words in str(caught.value.status.message)
