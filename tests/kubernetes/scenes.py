"""A mesh on a real control plane as scenes see it: its spec, pods, map and keys; a client that reads all the
time.

Law: what is awaited has its own words, and what is not there in time is told with all there is to see.
"""

from __future__ import annotations

import json
import random
import threading
import time
from base64 import b64decode
from typing import TYPE_CHECKING, Any

from botocore.config import Config
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import ConfigMap, Event, Pod, Secret
from lightkube.types import PatchType

from meshwire.cluster import parse_map
from tests.support.boto_sessions import boto_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightkube import Client

    from meshwire.cluster import ClusterMap
    from tests.kubernetes.kubelet import Kubelet

PATIENCE = 240.0
MeshCluster: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshCluster", "meshclusters")
MeshNode: Any = create_namespaced_resource("shardmesh.io", "v1alpha1", "MeshNode", "meshnodes")
POOL: dict[str, Any] = {
    "name": "s",
    "replicas": 3,
    "roles": ["store", "cache", "compute"],
    "tiers": [{"name": "disk", "class": "nvme", "hostPath": "/mnt/shardmesh"}],
    "nodeSelector": {"disks": "nvme"},
    "weight": 1,
    "extraArgs": [
        "--workers=1",
        "--transform-workers=1",
        "--lease=4",
        "--drain-timeout=1",
        "--shutdown-delay=0",
    ],
}
SPEC = {"image": "registry.example.com/shardmesh/meshd:0.1.0", "nodePools": [POOL]}


class Scene:
    """The mesh, as tests see it."""

    def __init__(self, kube: Client, namespace: str, kubelet: Kubelet) -> None:
        self.kube: Any = kube
        self.namespace, self.kubelet = namespace, kubelet
        self.bodies: dict[str, bytes] = {}

    def mesh(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kube.get(MeshCluster, "mesh", namespace=self.namespace).to_dict()
        return found

    def change(self, **spec: Any) -> None:
        self.kube.patch(
            MeshCluster, "mesh", {"spec": spec}, namespace=self.namespace, patch_type=PatchType.MERGE
        )

    def scale(self, replicas: int) -> None:
        self.change(nodePools=[POOL | {"replicas": replicas}])

    def map(self) -> ClusterMap:
        labels = {"shardmesh.io/store": "mesh", "shardmesh.io/topic": "cluster"}
        (found,) = self.kube.list(ConfigMap, namespace=self.namespace, labels=labels)
        return parse_map(found.data["value"])

    def pods(self) -> dict[str, Any]:
        labels = {"shardmesh.io/cluster": "mesh"}
        return {
            each.metadata.name: each for each in self.kube.list(Pod, namespace=self.namespace, labels=labels)
        }

    def evicted(self, name: str) -> bool:
        """As `kubectl drain` asks: whether the budget lets the pod go."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/eviction"
        metadata = {"name": name, "namespace": self.namespace}
        wish = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": metadata}
        answer = self.kube._client._client.post(path, json=wish)
        assert answer.status_code in (201, 429), answer.text
        return bool(answer.status_code == 201)

    def until(self, wanted: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
        end = time.monotonic() + patience
        while not wanted():
            if time.monotonic() > end:
                raise AssertionError(f"not {what} in time\n{self.state()}")
            time.sleep(0.5)

    def settled(self, count: int) -> None:
        """All is as it should be, and the operator says so of the present spec."""

        def well() -> bool:
            found = self.mesh()
            status = found.get("status") or {}
            conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
            current = status.get("observedGeneration") == found["metadata"]["generation"]
            updated = all(pool["updated"] == pool["desired"] for pool in status.get("pools") or ())
            states = [node.state for node in self.map().nodes] if current and status.get("ready") else []
            return (
                current
                and updated
                and (status.get("ready"), status.get("desired")) == (count, count)
                and (conditions["Settled"], conditions["Progressing"]) == ("True", "False")
                and states == ["up"] * count
            )

        self.until(well, f"settled with {count} daemons")

    def state(self) -> str:
        mesh = self.mesh()
        said = json.dumps(mesh.get("status"), indent=1)
        events = [f"{e.reason}: {e.message}" for e in self.kube.list(Event, namespace=self.namespace)]
        return f"{said}\n{[(p, v.status.phase) for p, v in self.pods().items()]}\n" + "\n".join(
            [*events[-40:], self.kubelet.output()]
        )

    def reasons(self) -> set[str]:
        return {each.reason for each in self.kube.list(Event, namespace=self.namespace)}

    def places(self) -> list[tuple[str, int]]:
        """Where a connection to the Service goes."""
        return [
            (each.address, 9000)
            for each in list(self.kubelet.pods.values())
            if each.name.startswith("mesh-s-") and each.ready and not each.asked_to_end
        ]

    def client(self, endpoint: str) -> Any:
        keys = self.kube.get(Secret, "mesh-root", namespace=self.namespace).to_dict()["data"]
        return boto_session().client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=b64decode(keys["AWS_ACCESS_KEY_ID"]).decode(),
            aws_secret_access_key=b64decode(keys["AWS_SECRET_ACCESS_KEY"]).decode(),
            region_name="us-east-1",
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 5}, s3={"addressing_style": "path"}
            ),
        )


class Reader:
    """A client that reads ten times a second, with ordinary retries."""

    def __init__(self, client: Any, bodies: dict[str, bytes]) -> None:
        self._client, self._bodies = client, bodies
        self.read, self.failed = 0, list[str]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader")

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        names, choose = sorted(self._bodies), random.Random(7)
        while not self._stop.is_set():
            name = choose.choice(names)
            try:
                body = self._client.get_object(Bucket="photos", Key=name)["Body"].read()
                if body != self._bodies[name]:
                    self.failed.append(f"{name}: {len(body)} other bytes")
            except Exception as error:
                self.failed.append(f"{name}: {type(error).__name__}: {error}")
            self.read += 1
            self._stop.wait(0.1)


def photographs(client: Any) -> dict[str, bytes]:
    """What is in the bucket now."""
    client.create_bucket(Bucket="photos")
    bodies = {}
    for number in range(60):
        body = random.Random(number).randbytes(1000 + 3000 * (number % 7))
        client.put_object(Bucket="photos", Key=f"{number:03}.bin", Body=body)
        bodies[f"{number:03}.bin"] = body
    return bodies
