"""The rest of a cluster, for tests of the operator's loop: a StatefulSet controller, machines, and daemons
that do nothing but keep the cluster map as real ones do.

Law: every tick checks what must never happen: a pod that goes while the mesh still relies on it alone.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from meshd.control.kubernetes.resource_encoding import OPEN_TOPICS
from meshwire.cluster import Node, parse_map, transitions
from meshwire.cluster.transitions import TransitionError

if TYPE_CHECKING:
    from meshwire.cluster import ClusterMap
    from tests.kubernetes.emulated import Api

NAMESPACE, NAME = "ns", "mesh"
_LABELS = {"shardmesh.io/store": NAME, "shardmesh.io/topic": "cluster"}


class World:
    """`tick` lets everybody but the operator do one step."""

    def __init__(self, api: Api, hosts: int = 6) -> None:
        self.api = api
        for number in range(hosts):
            labels = {"topology.kubernetes.io/zone": "abc"[number % 3]}
            api.put(
                "nodes", {"kind": "Node", "metadata": {"name": f"k{number}", "labels": labels}, "spec": {}}
            )

    def tick(self) -> None:
        self._controller()
        self._storage()
        self._machines()
        self._daemons()
        cluster = self.map()
        away = [node.node_id for node in cluster.nodes if node.state == "away"] if cluster else []
        assert len(away) <= 1 or not self.api.of("statefulsets"), f"several are away at once: {away}"

    def map(self) -> ClusterMap | None:
        entry = self.api.find("configmaps", "map")
        return parse_map(entry["data"]["value"]) if entry else None

    def pods(self) -> dict[str, dict[str, Any]]:
        return {each["metadata"]["name"]: each for each in self.api.of("pods")}

    def set_map(self, cluster: ClusterMap) -> None:
        if cluster == self.map():
            return
        metadata = {
            "name": "map",
            "namespace": NAMESPACE,
            "labels": _LABELS,
            "annotations": {"shardmesh.io/key": "cluster/map"},
        }
        value = {"value": cluster.to_json().decode()}
        self.api.put("configmaps", {"kind": "ConfigMap", "metadata": metadata, "data": value})

    def _controller(self) -> None:
        sets = {each["metadata"]["name"]: each for each in self.api.of("statefulsets")}
        wanted = {
            f"{name}-{ordinal}": each
            for name, each in sets.items()
            for ordinal in range(each["spec"]["replicas"])
        }
        cluster = self.map()
        for name in self.pods().keys() - wanted.keys():
            if name.rpartition("-")[0] in self.api.orphaned - sets.keys():
                continue
            if sets:  # the end of a MeshCluster keeps nothing running
                held = [share.node_id for share in cluster.current_shares] if cluster else []
                assert name not in held, f"{name} goes, and the mesh relies on it"
            del self.api.objects["pods", NAMESPACE, name]
            self.api.version += 1
        for name in wanted.keys() - self.pods().keys():
            template = copy.deepcopy(wanted[name]["spec"]["template"])
            metadata = template["metadata"] | {"name": name, "namespace": NAMESPACE}
            self.api.put("pods", {"kind": "Pod", "metadata": metadata, "spec": template["spec"]})

    def _storage(self) -> None:
        """Each pod's claims; a volume is as large as its claim asks for, one tick later."""
        for each in self.api.of("persistentvolumeclaims"):
            capacity = {"capacity": dict(each["spec"]["resources"]["requests"])}
            if each.get("status") != capacity:
                self.api.put("persistentvolumeclaims", each | {"status": capacity})
        cluster = self.map()
        held = [share.node_id for share in cluster.current_shares] if cluster else []
        for name in self.pods():
            found = self.api.find("statefulsets", name.rpartition("-")[0])
            for template in found["spec"].get("volumeClaimTemplates") or () if found else ():
                claim = copy.deepcopy(template) | {"kind": "PersistentVolumeClaim"}
                claim["metadata"] |= {
                    "name": f"{template['metadata']['name']}-{name}",
                    "namespace": NAMESPACE,
                }
                if not self.api.find("persistentvolumeclaims", claim["metadata"]["name"]):
                    assert name not in held, f"the volume of {name} is gone, and the mesh relies on it"
                    self.api.put("persistentvolumeclaims", claim)

    def _machines(self) -> None:
        hosts = {
            each["metadata"]["name"] for each in self.api.of("nodes") if not each["spec"].get("unschedulable")
        }
        for pod in self.pods().values():
            taken = {each["spec"].get("nodeName") for each in self.pods().values()}
            if "nodeName" not in pod["spec"]:
                free = sorted(hosts - taken)
                if free:
                    pod["spec"]["nodeName"] = free[0]
                    self.api.put("pods", pod)
            elif not _ready(pod):
                pod["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
                self.api.put("pods", pod)

    def _daemons(self) -> None:
        alive = {name: pod for name, pod in self.pods().items() if _ready(pod)}
        cluster = self.map()
        for name in sorted(alive):
            here = Node(name, f"http://{name}:9000", zone="a")
            known = cluster.node(name) if cluster else None
            if cluster is None:
                cluster = transitions.bootstrap_map(here, slots=1024)
            elif known is None or known.state in ("away", "down"):
                cluster = transitions.join_node(cluster, here)
        if cluster is None:
            return
        for node in cluster.nodes:
            if node.node_id not in alive:
                cluster = transitions.mark_node_away(cluster, node.node_id)
        for node in cluster.nodes:
            if cluster.must_sync(node.node_id):
                try:
                    cluster = transitions.mark_complete(cluster, node.node_id)
                except TransitionError:
                    continue
        self.set_map(cluster)
        if not cluster.is_rebalancing:
            for name in sorted(alive):
                self._clear(name, cluster.version)

    def _clear(self, name: str, version: int) -> None:
        """A daemon says that it has let go of what others own."""
        self.set_document(f"moves/{name}", {"version": version, "clear": version})

    def set_document(self, key: str, document: object) -> None:
        """A daemon writes to the control store."""
        topic, _, name = key.partition("/")
        assert topic in OPEN_TOPICS, "the operator cannot read it: daemons keep it in a Secret"
        place = ("configmaps", NAMESPACE, f"{topic}-{name}")
        data = {"value": json.dumps(document)}
        if (self.api.objects.get(place) or {}).get("data") != data:
            metadata = {
                "name": place[2],
                "namespace": NAMESPACE,
                "labels": _LABELS | {"shardmesh.io/topic": topic},
                "annotations": {"shardmesh.io/key": key},
            }
            self.api.put("configmaps", {"kind": "ConfigMap", "metadata": metadata, "data": data})


def mesh_cluster(replicas: int, **changes: Any) -> dict[str, Any]:
    """A MeshCluster of one pool."""
    pool = {
        "name": "s",
        "replicas": replicas,
        "tiers": [{"name": "a", "class": "nvme", "hostPath": "/mnt/a"}],
    }
    return {
        "apiVersion": "shardmesh.io/v1alpha1",
        "kind": "MeshCluster",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": json.loads(json.dumps({"image": "i", "nodePools": [pool], **changes})),
    }


def _ready(pod: dict[str, Any]) -> bool:
    return bool((pod.get("status") or {}).get("conditions"))
