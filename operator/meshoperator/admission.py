"""What the webhook does to a training pod: affinity to copies of its datasets, endpoint and keys in its
environment. Pure.

Law: what the user set stays; done twice is done once. Several datasets are ANDed where they are required, and
each draws with full weight where they are preferred. Nothing fails a pod: what is not known is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from meshoperator.resources import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LABEL: Final = f"{GROUP}/dataset"  # one, or several with dots between (labels take no commas)
ANNOTATION: Final = f"{GROUP}/datasets"  # or a list with commas; wins over the label
REQUIRE: Final = f"{GROUP}/require-local"  # "true": only where a copy is
DONE: Final = f"{GROUP}/admitted"
HOST, RACK, ZONE = 100, 60, 30


@dataclass(frozen=True, slots=True)
class Known:
    """What the webhook knows of a dataset. Labels are of Kubernetes nodes: they have a copy on them, or in
    their rack, or in their zone."""

    name: str
    endpoint: str
    bucket: str
    secret: str
    near: Literal["Off", "Preferred", "Required"] = "Preferred"

    @property
    def labels(self) -> tuple[tuple[str, int], ...]:
        """Label and weight, the nearest first."""
        return tuple(
            (f"{level}.{GROUP}/{self.name}", weight)
            for level, weight in (("host", HOST), ("rack", RACK), ("zone", ZONE))
        )


def wanted(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the datasets a pod reads."""
    metadata = pod.get("metadata") or {}
    annotation = (metadata.get("annotations") or {}).get(ANNOTATION)
    names = (
        annotation.split(",") if annotation else ((metadata.get("labels") or {}).get(LABEL) or "").split(".")
    )
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def patch(pod: Mapping[str, Any], known: Mapping[str, Known]) -> list[dict[str, Any]]:
    """A JSON patch (RFC 6902); empty where nothing is to be done."""
    metadata = pod.get("metadata") or {}
    annotations = metadata.get("annotations") or {}
    datasets = [known[name] for name in wanted(pod) if name in known]
    if not datasets or DONE in annotations:
        return []
    operations = [
        _put(metadata, "annotations", "/metadata/annotations", DONE, ",".join(each.name for each in datasets))
    ]
    affinity = _affinity(
        (pod.get("spec") or {}).get("affinity") or {}, datasets, force=annotations.get(REQUIRE) == "true"
    )
    if affinity is not None:
        operations.append({"op": "add", "path": "/spec/affinity", "value": affinity})
    for kind in ("initContainers", "containers"):
        for place, container in enumerate((pod.get("spec") or {}).get(kind) or ()):
            added = _environment(container.get("env") or [], datasets)
            if added:
                value = [*(container.get("env") or []), *added]
                operations.append({"op": "add", "path": f"/spec/{kind}/{place}/env", "value": value})
    return operations


def _affinity(
    affinity: Mapping[str, Any], datasets: Iterable[Known], *, force: bool
) -> dict[str, Any] | None:
    """The pod's affinity and ours; None where ours is nothing."""
    node = dict(affinity.get("nodeAffinity") or {})
    drawn = [each for each in datasets if each.near != "Off"]
    if not drawn:
        return None
    needed = [_has(each.labels[0][0]) for each in drawn if force or each.near == "Required"]
    if needed:
        # terms are ORed, expressions within one ANDed: so ours go into every term there is
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        terms = (node.get(key) or {}).get("nodeSelectorTerms") or [{}]
        node[key] = {
            "nodeSelectorTerms": [
                {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *needed]}
                for term in terms
            ]
        }
    preferred = [
        {"weight": weight, "preference": {"matchExpressions": [_has(label)]}}
        for each in drawn
        for label, weight in each.labels
    ]
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    node[key] = [*(node.get(key) or []), *preferred]
    return {**affinity, "nodeAffinity": node}


def _has(label: str) -> dict[str, Any]:
    return {"key": label, "operator": "Exists"}


def _environment(present: list[Mapping[str, Any]], datasets: list[Known]) -> list[dict[str, Any]]:
    """Variables that the container has not set itself. Keys by reference: no secret passes through here."""
    first = datasets[0]
    one_mesh = all(each.endpoint == first.endpoint for each in datasets)
    values: list[dict[str, Any]] = [
        {"name": "MESH_DATASETS", "value": ",".join(each.name for each in datasets)}
    ]
    if one_mesh:
        values += [
            {"name": "MESH_ENDPOINT", "value": first.endpoint},
            {"name": "AWS_ENDPOINT_URL", "value": first.endpoint},
            {"name": "MESH_BUCKETS", "value": ",".join(each.bucket for each in datasets)},
        ]
        if first.secret:
            values += [_from(key, first.secret) for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    names = {each.get("name") for each in present}
    return [each for each in values if each["name"] not in names]


def _from(key: str, secret: str) -> dict[str, Any]:
    # optional: a pod of another namespace starts without keys instead of never
    return {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}}


def _put(parent: Mapping[str, Any], name: str, path: str, key: str, value: str) -> dict[str, Any]:
    if parent.get(name):
        return {"op": "add", "path": f"{path}/{key.replace('~', '~0').replace('/', '~1')}", "value": value}
    return {"op": "add", "path": path, "value": {key: value}}
