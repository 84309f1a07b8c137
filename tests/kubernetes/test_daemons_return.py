"""Daemons' pods, tied by the webhook to the nodes with their directories: asked by a real API server, placed
by the real scheduler."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from lightkube.resources.core_v1 import ConfigMap, Node, Pod

from meshoperator.planners.disk_affinity import MACHINE
from meshwire.cluster import Node as MeshNode
from meshwire.cluster import transitions
from tests.kubernetes.test_webhook import (
    account,
    certificate,
    host_of,
    node,
    registered,
    serving,
    until,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lightkube import Client

    from meshwire.cluster import ClusterMap
    from tests.support.certificates import Authority

__all__ = ["certificate"]  # the fixture


def entry(kube: Client, namespace: str, key: str, value: str) -> None:
    """A document of the control store, as daemons write it."""
    topic = key.partition("/")[0]
    metadata = {
        "name": key.replace("/", "-"),
        "namespace": namespace,
        "labels": {"shardmesh.io/store": "mesh", "shardmesh.io/topic": topic},
        "annotations": {"shardmesh.io/key": key},
    }
    made: Any = ConfigMap.from_dict({"metadata": metadata, "data": {"value": value}})
    kube.create(made)


def daemon(name: str, pool: str) -> Any:
    labels = {"shardmesh.io/cluster": "mesh", "shardmesh.io/pool": "s", "app.kubernetes.io/name": "meshd"}
    volume = {"name": "d", "hostPath": {"path": "/d", "type": "DirectoryOrCreate"}}
    spec = {
        "nodeSelector": {"pool": pool},
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "meshd", "image": "i:1"}],
        "volumes": [volume],
    }
    return Pod.from_dict({"metadata": {"name": name, "labels": labels}, "spec": spec})


def settled(count: int) -> ClusterMap:
    found = transitions.bootstrap_map(MeshNode("mesh-s-0", "http://mesh-s-0:9000"))
    for number in range(1, count):
        found = transitions.join_node(found, MeshNode(f"mesh-s-{number}", f"http://mesh-s-{number}:9000"))
    for each in found.nodes:
        if found.must_sync(each.node_id):
            found = transitions.mark_complete(found, each.node_id)
    return found


def test_daemons_run_where_their_directories_are_and_elsewhere_when_those_are_of_no_use(
    kubeconfig: Path, kube: Client, namespace: str, certificate: Authority, tmp_path: Path
) -> None:
    pool = uuid.uuid4().hex[:8]
    hosts = [f"{pool}-{letter}" for letter in "abcd"]
    for name in hosts:
        kube.create(node(name, {"pool": pool}))
        kube.patch(Node, name, {"spec": {"taints": None}})
    account(kube, namespace)
    cluster = transitions.mark_node_down(settled(5), "mesh-s-3")
    entry(kube, namespace, "cluster/map", cluster.to_json().decode())
    homes = {"mesh-s-0": hosts[3], "mesh-s-1": hosts[1], "mesh-s-2": hosts[3], "mesh-s-4": f"{pool}-gone"}
    for name, home in (homes | {"mesh-s-3": hosts[0]}).items():
        entry(kube, namespace, f"machines/{name}", f'{{"machine":"{home}"}}')
    try:
        with (
            serving(kubeconfig, tmp_path / "tls") as (_, hook, _kube),
            registered(kube, namespace, certificate, hook.port, "daemons"),
        ):
            until(lambda: tied(kube, namespace, pool, homes["mesh-s-1"]))
            for number in range(5):
                kube.create(daemon(f"mesh-s-{number}", pool), namespace=namespace)
            found = {name: host_of(kube, name, namespace) for name in ("mesh-s-0", "mesh-s-1", "mesh-s-2")}
            assert found == {name: homes[name] for name in found}
            for name in ("mesh-s-3", "mesh-s-4"):  # given up; its node is gone
                assert host_of(kube, name, namespace) in hosts
                metadata = kube.get(Pod, name, namespace=namespace).metadata
                assert metadata is not None
                assert MACHINE not in (metadata.annotations or {})
    finally:
        for name in hosts:
            kube.delete(Node, name)


def tied(kube: Client, namespace: str, pool: str, home: str) -> bool:
    """Whether the API server has heard of the webhook: it does a moment after it was registered."""
    kube.create(daemon("mesh-s-1", pool), namespace=namespace)
    metadata = kube.get(Pod, "mesh-s-1", namespace=namespace).metadata
    kube.delete(Pod, "mesh-s-1", namespace=namespace, grace_period=0)
    assert metadata is not None
    return (metadata.annotations or {}).get(MACHINE) == home
