"""Services of a MeshCluster on a real API server: each option is taken, changed and taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest
from lightkube import ApiError
from lightkube.resources.core_v1 import Service
from lightkube.types import PatchType

from meshoperator.cluster_model import Cluster
from meshoperator.planners.service_manifests import peer_service, s3_service
from meshoperator.resources import MeshClusterSpec, parse

if TYPE_CHECKING:
    from lightkube import Client

POOL = {"name": "s", "replicas": 1, "tiers": [{"name": "d", "class": "ssd", "hostPath": "/mnt/d"}]}


class Apply(Protocol):
    """Applies a mesh's Services, with these fields of `s3`, as the operator does; returns what is stored."""

    def __call__(self, **s3: Any) -> tuple[Any, Any]: ...


@pytest.fixture
def apply(kube: Client, namespace: str) -> Apply:
    def applied(**s3: Any) -> tuple[Any, Any]:
        spec = parse(MeshClusterSpec, {"image": "i:1", "nodePools": [POOL], "s3": s3})
        cluster = Cluster("mesh", namespace, "8b6f1e4c-0c7b-4c27-9c2e-6f1d7e5d3a10", spec, ())
        found = []
        for each in (s3_service(cluster), peer_service(cluster)):
            name = each["metadata"]["name"]
            del each["metadata"]["ownerReferences"]  # there is no such mesh: it would be collected as garbage
            stored = kube.patch(
                Service,
                name,
                each,
                namespace=namespace,
                patch_type=PatchType.APPLY,
                field_manager="mesh",
                force=True,
            )
            found.append(stored)
        return found[0], found[1]

    return applied


def test_the_clients_address_is_kept_while_that_is_wanted(apply: Apply) -> None:
    assert apply()[0].spec.externalTrafficPolicy is None
    kept = apply(serviceType="NodePort", externalTrafficPolicy="Local")[0].spec
    assert (kept.type, kept.externalTrafficPolicy, bool(kept.healthCheckNodePort)) == (
        "NodePort",
        "Local",
        False,
    )
    balanced = apply(serviceType="LoadBalancer", externalTrafficPolicy="Local")[0].spec
    assert balanced.healthCheckNodePort, "load balancers ask it which nodes have a daemon"
    assert balanced.ports[0].nodePort == kept.ports[0].nodePort
    open_ = apply(serviceType="LoadBalancer")[0].spec
    assert (open_.externalTrafficPolicy, bool(open_.healthCheckNodePort)) == ("Cluster", False)
    for policy in ({}, {"externalTrafficPolicy": "Local"}):
        apply(serviceType="NodePort", **policy)
        closed = apply()[0].spec
        assert (closed.type, closed.ports[0].nodePort) == ("ClusterIP", None)


def test_annotations_come_and_go_beside_those_of_others(apply: Apply, kube: Client, namespace: str) -> None:
    topology = {"service.kubernetes.io/topology-mode": "Auto"}
    assert apply(serviceAnnotations=topology)[0].metadata.annotations == topology
    foreign = {"metadata": {"annotations": {"cloud.example/address": "203.0.113.7"}}}
    kube.patch(Service, "mesh-s3", foreign, namespace=namespace)
    assert apply()[0].metadata.annotations == {"cloud.example/address": "203.0.113.7"}


def test_families_are_those_of_the_cluster(apply: Apply) -> None:
    for policy in ("SingleStack", "PreferDualStack"):
        for stored in apply(ipFamilyPolicy=policy):
            # API servers before 1.20 and those without dual stack leave the field out, or store it
            assert (stored.spec.ipFamilyPolicy or policy) in ("SingleStack", policy)
            assert stored.spec.clusterIP
    assert apply()[0].spec.clusterIP


def test_a_distribution_needs_an_api_server_that_knows_it(apply: Apply, kube: Client) -> None:
    version = kube._client._client.get("/version").json()["gitVersion"]
    if tuple(map(int, version.removeprefix("v").split(".")[:2])) >= (1, 31):
        assert apply(trafficDistribution="PreferClose")[0].to_dict()["spec"]["trafficDistribution"]
    else:
        with pytest.raises(ApiError, match="trafficDistribution"):
            apply(trafficDistribution="PreferClose")
    assert apply()[0].spec.clusterIP
