"""From what daemons hold to labels of Kubernetes nodes, on a real API server."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from lightkube.resources.core_v1 import Node

from meshoperator.controllers.placement_controller import PlacementController
from meshoperator.kube.client import Kube
from meshoperator.planners.dataset_model import dataset_mark
from meshoperator.planners.placement_inputs import Holding, PlacementBoard
from meshoperator.planners.pod_admission import label
from meshoperator.settings import OperatorSettings
from tests.kubernetes.looping import Loop, client
from tests.kubernetes.test_crds_served import create, resource
from tests.kubernetes.test_webhook import GROUP_VERSION, dataset, mesh, node

if TYPE_CHECKING:
    from pathlib import Path

    from lightkube import Client

    from meshoperator.resources import Kind

ZONE, RACK = "topology.kubernetes.io/zone", "topology.shardmesh.io/rack"


def daemon(kube: Client, namespace: str, name: str, host: str) -> None:
    from meshoperator.resources import MeshNode

    spec = {"clusterRef": "mesh", "pool": "s", "nodeId": name}
    create(
        kube,
        namespace,
        {"apiVersion": GROUP_VERSION, "kind": "MeshNode", "metadata": {"name": name}, "spec": spec},
    )
    kind: Kind = MeshNode
    found: Any = resource(kind)
    status = {"status": {"node": host, "state": "up", "zone": "z1"}}
    from lightkube.types import PatchType

    kube.patch(found.Status, name, status, namespace=namespace, patch_type=PatchType.MERGE)


def test_nodes_are_labelled_by_what_lies_on_them(kubeconfig: Path, kube: Client, namespace: str) -> None:
    short = uuid.uuid4().hex[:6]
    hosts = {f"{short}-{number}": f"r{short}{number // 2}" for number in range(4)}
    for name, rack in hosts.items():
        kube.create(node(name, {ZONE: f"z{short}", RACK: rack}))
    mesh(kube, namespace)
    dataset(kube, namespace, "photos", "s3://cloud/train")
    first, second, third, fourth = hosts
    daemon(kube, namespace, "mesh-s-0", first)
    daemon(kube, namespace, "mesh-s-1", third)
    board, key = PlacementBoard(), dataset_mark(namespace, "photos")

    def labels() -> dict[str, set[str]]:
        found = {}
        for name in hosts:
            metadata = kube.get(Node, name).metadata
            assert metadata is not None
            found[name] = {each.split(".")[0] for each in metadata.labels or {} if each.endswith(key)}
        return found

    with Loop() as loop:
        api = loop.run(client(kubeconfig))
        planner = PlacementController(Kube(api), OperatorSettings(), board)
        try:
            loop.run(planner.plan_and_label())
            assert set().union(*labels().values()) == set()  # not looked at yet
            board.record_holdings(
                namespace, "photos", [Holding("mesh-s-0", 1, 100, 1000, 100), Holding("mesh-s-1", 0, 0, 1000)]
            )
            loop.run(planner.plan_and_label())
            assert labels() == {
                first: {"host", "rack", "zone"},
                second: {"rack", "zone"},
                third: {"zone"},
                fourth: {"zone"},
            }
            assert board.copy_locations(namespace, "photos")[0].reason
            board.record_holdings(
                namespace, "photos", [Holding("mesh-s-0", 0, 0, 1000), Holding("mesh-s-1", 1, 100, 1000, 100)]
            )
            loop.run(planner.plan_and_label())
            assert labels()[third] == {"host", "rack", "zone"}
            assert labels()[first] == {"zone"}
            before = labels()
            loop.run(planner.plan_and_label())
            assert labels() == before
        finally:
            loop.run(api.close())
            for name in hosts:
                kube.delete(Node, name)
    assert label("host", key).endswith(key)
