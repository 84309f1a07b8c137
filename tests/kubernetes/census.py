"""Everything that a mesh and its operator have in a namespace, as one value by which two histories can be
compared: what was decided, without what differs each time (times, versions, uids, addresses, machines).

Law: an object that is not expected differs from none, so what is left over is seen, whatever its kind.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lightkube import Client

    from tests.kubernetes.scenes import Scene

_KINDS: Final = {
    "": ("configmaps", "secrets", "services", "serviceaccounts", "pods", "persistentvolumeclaims"),
    "apps": ("statefulsets",),
    "policy": ("poddisruptionbudgets",),
    "networking.k8s.io": ("networkpolicies",),
    "rbac.authorization.k8s.io": ("rolebindings",),
    "shardmesh.io": ("meshclusters", "meshnodes", "meshdatasets", "meshloads", "meshviews"),
}
_VERSIONS: Final = {"policy": "v1beta1", "shardmesh.io": "v1alpha1"}
_STATUS: Final = {
    "meshclusters": ("observedGeneration", "phase", "ready", "desired", "pools", "trouble"),
    "meshnodes": ("state", "zone", "rack", "drain"),
    "meshdatasets": ("phase", "bucket", "objects", "sourceBytes", "cachedBytes", "nodeLabel"),
    "meshloads": ("phase", "objectsDone", "objectsTotal", "bytesDone", "failed"),
    "meshviews": ("ready", "address", "opBuilds"),
}
_IN_TIME: Final = ("keyuse/",)
"""Keys of what daemons write when it is time: when an access key was last used."""
_STORE: Final = "shardmesh.io/store"
_KEY: Final = re.compile("MESHROOT[0-9A-F]+")  # root's, which is drawn when a mesh is made
Census = dict[str, Any]


def census(scene: Scene) -> Census:
    """Return it for a scene's namespace, with our labels of Kubernetes nodes."""
    found: Census = {}
    for group, plurals in _KINDS.items():
        base = f"/apis/{group}/{_VERSIONS.get(group, 'v1')}" if group else "/api/v1"
        for plural in plurals:
            for each in _items(scene.kube, f"{base}/namespaces/{scene.namespace}/{plural}"):
                name = _called(each)
                if not _is_of_kubernetes(plural, name) and not name.startswith(_IN_TIME):
                    found[f"{plural}/{name}"] = _described(plural, each)
    found["nodes"] = dict(_labels_of_nodes(scene.kube))
    if any(key.startswith("meshclusters/") for key in found) and "configmaps/cluster/map" in found:
        found["map"] = sorted((node.node_id, node.state, node.leaving) for node in scene.map().nodes)
    return found


def differences(expected: Census, found: Census) -> list[str]:
    """Return what is there once more, is lacking, or is different, a line each."""
    return [
        f"{key}: expected {expected.get(key, 'none')}, found {found.get(key, 'none')}"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]


def _items(kube: Client, path: str) -> list[dict[str, Any]]:
    answer = kube._client._client.get(path)
    answer.raise_for_status()
    return list(answer.json()["items"])


def _is_of_kubernetes(plural: str, name: str) -> bool:
    return name == "kube-root-ca.crt" or (
        plural in ("secrets", "serviceaccounts") and (name == "default" or "-token-" in name)
    )


def _called(document: dict[str, Any]) -> str:
    """Return the key that an object of the control store has, otherwise its name."""
    metadata = document["metadata"]
    key = (metadata.get("annotations") or {}).get("shardmesh.io/key")
    found = str(key if key and _STORE in (metadata.get("labels") or {}) else metadata["name"])
    return _KEY.sub("MESHROOT…", found)


def _described(plural: str, document: dict[str, Any]) -> dict[str, Any]:
    metadata, spec, status = document["metadata"], document.get("spec") or {}, document.get("status") or {}
    found: dict[str, Any] = {
        "finalizers": metadata.get("finalizers") or [],
        "owners": sorted(f"{each['kind']}/{each['name']}" for each in metadata.get("ownerReferences") or ()),
        "ends": "deletionTimestamp" in metadata,
    }
    if plural == "pods":
        ready = [each["status"] for each in status.get("conditions") or () if each["type"] == "Ready"]
        images = [each["image"] for each in spec["containers"]]
        return found | {"ready": ready, "images": images, "template": _template(metadata)}
    if plural == "statefulsets":
        template = _template(spec["template"]["metadata"])
        return found | {"replicas": spec["replicas"], "template": template}
    if plural == "services":
        ports = [(each["name"], each["port"]) for each in spec["ports"]]
        return found | {"ports": ports, "selector": spec.get("selector"), "type": spec["type"]}
    if plural == "poddisruptionbudgets":
        return found | {"most": spec.get("maxUnavailable"), "selector": spec["selector"]}
    if plural in ("configmaps", "secrets"):
        return found | {"entries": sorted(document.get("data") or {})}
    if plural in _STATUS:
        found |= {name: status[name] for name in _STATUS[plural] if status.get(name) is not None}
        conditions = status.get("conditions") or ()
        return found | {each["type"]: f"{each['status']} {each['reason']}" for each in conditions}
    if plural == "rolebindings":
        return found | {"role": document["roleRef"]["name"]}
    return found


def _template(metadata: dict[str, Any]) -> str:
    return str((metadata.get("annotations") or {}).get("shardmesh.io/template"))


def _labels_of_nodes(kube: Client) -> Counter[str]:
    """Return, for each label of ours, how many Kubernetes nodes have it."""
    return Counter(
        f"{label}={value}"
        for each in _items(kube, "/api/v1/nodes")
        for label, value in (each["metadata"].get("labels") or {}).items()
        if "shardmesh.io/" in label
    )
