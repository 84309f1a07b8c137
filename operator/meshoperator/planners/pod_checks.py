"""Checks of pod labels and annotations: misspelt keys, missing datasets, pods without the webhook. Pure.

Law: reads metadata only. A key counts as misspelt only if both its domain and its name are close to ours. A
message names no namespace but the pod's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from meshoperator.planners.dataset_model import SHARED, shared_with
from meshoperator.planners.pod_admission import (
    ANNOTATION,
    DONE,
    INJECT,
    KEYS,
    LABEL,
    REQUIRE,
    ROLE,
    SECRET,
    requested_datasets,
)
from meshoperator.resources import GROUP

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from meshoperator.cluster_model import Manifest

REASONS: Final = ("KeyMisspelt", "LabelMissing", "ValueUnknown", "DatasetUnknown", "NotAdmitted")
"""Reasons of events about pods."""
_LABELS: Final = frozenset({LABEL})
_VALUES: Final = {
    REQUIRE: ("true", "false"),
    INJECT: ("all", "mesh", "none"),
    KEYS: ("environment", ""),
}
_ANNOTATIONS: Final = frozenset({ANNOTATION, ROLE, *_VALUES})
_NAMES: Final = {key.partition("/")[2]: key for key in (*_LABELS, *_ANNOTATIONS)}
_OWN: Final = frozenset({DONE, SECRET})
_NEAR: Final = 0.8
"""Least difflib ratio of a match: one or two letters may differ."""
_PRODUCT: Final = GROUP.partition(".")[0]
_RECREATE: Final = "recreate the pod"


@dataclass(frozen=True, slots=True)
class Notice:
    """A problem of a pod. `reason`: one of `REASONS`."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class AvailableDatasets:
    """The datasets that pods can request: MeshDatasets, and (namespace, name) of MeshClusters. `shares`:
    whether the webhook knows datasets of other namespaces; `admits`: whether there is a webhook."""

    datasets: tuple[Manifest, ...]
    clusters: frozenset[tuple[str, str]]
    shares: bool = True
    admits: bool = True


def find_misspellings(metadata: Manifest) -> tuple[Notice, ...]:
    """Return the keys and values that have no effect, and what was probably meant; one notice per reason."""
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    keys = [said for key in labels if key not in _LABELS and (said := _spelling_hint("label", key))]
    keys += [
        said
        for key in annotations
        if key not in _ANNOTATIONS | _OWN and (said := _spelling_hint("annotation", key))
    ]
    values = [
        f"the annotation {key} must be {' or '.join(filter(None, known))}, not {annotations[key]!r}"
        for key, known in _VALUES.items()
        if annotations.get(key, known[0]) not in known
    ]
    found = [Notice("KeyMisspelt", f"{'; '.join(keys)}; {_RECREATE}")] if keys else []
    if annotations.get(ANNOTATION) and LABEL not in labels:
        message = f"its annotation {ANNOTATION} needs the label {LABEL}, even if empty: add the label"
        found.append(Notice("LabelMissing", f"{message}, and {_RECREATE}"))
    return (*found, *([Notice("ValueUnknown", f"{'; '.join(values)}; {_RECREATE}")] if values else []))


@lru_cache(1024)  # pods of one controller have the same keys
def _spelling_hint(kind: str, key: str) -> str:
    """Return a hint about a misspelt key of ours; empty for any other key."""
    domain, slash, name = key.rpartition("/")
    if not slash or not _is_near(domain):
        return ""
    meant = get_close_matches(name.lower().replace("_", "-"), _NAMES, 1, _NEAR)
    if not meant:
        return ""
    right = _NAMES[meant[0]]
    return f"the {kind} {key} has no effect: use the {'label' if right in _LABELS else 'annotation'} {right}"


def _is_near(domain: str) -> bool:
    domain = domain.lower()
    return _PRODUCT in domain or bool(get_close_matches(domain, (GROUP, _PRODUCT), 1, _NEAR))


def datasets_not_injected(metadata: Manifest) -> tuple[str, ...]:
    """Return the datasets that a pod requests and the webhook did not inject."""
    if LABEL not in (metadata.get("labels") or {}):
        return ()
    given = ((metadata.get("annotations") or {}).get(DONE) or "").split(",")
    return tuple(name for name in requested_datasets({"metadata": metadata}) if name not in given)


def explain_missing(
    metadata: Manifest, names: Collection[str], available: AvailableDatasets
) -> tuple[Notice, ...]:
    """Return why a pod did not get these datasets; one notice per reason."""
    namespace = metadata["namespace"]
    mine = {
        each["metadata"]["name"]: each
        for each in available.datasets
        if _is_readable(each, namespace, available)
    }
    unknown = [_unknown(name, namespace, mine, available) for name in names if name not in mine]
    homeless = [
        f"MeshDataset {name} names the MeshCluster {mine[name]['spec']['clusterRef']}, which does not exist"
        for name in names
        if name in mine and _cluster_of(mine[name]) not in available.clusters
    ]
    found = []
    if unknown or homeless:
        found.append(Notice("DatasetUnknown", f"{'; '.join([*unknown, *homeless])}; then {_RECREATE}"))
    rest = [name for name in names if name in mine and _cluster_of(mine[name]) in available.clusters]
    if rest and available.admits:
        born = str(metadata.get("creationTimestamp") or "")
        late = [name for name in rest if born < str(mine[name]["metadata"].get("creationTimestamp") or "")]
        why = (
            f"{' and '.join(late)} was created after it"
            if late
            else "the webhook did not answer when it was created"
        )
        lacks = f"it has no placement, endpoint and keys for {' and '.join(rest)}: {why}"
        again = f"kubectl -n {namespace} delete pod {metadata['name']}, and its controller makes another"
        found.append(Notice("NotAdmitted", f"{lacks}; {_RECREATE} ({again})"))
    return tuple(found)


def _unknown(name: str, namespace: str, mine: Mapping[str, Manifest], available: AvailableDatasets) -> str:
    said = f"no MeshDataset {name} is available to pods of namespace {namespace}"
    if any(each["metadata"]["name"] == name for each in _in_other_namespaces(available.datasets, namespace)):
        share = f", or have its owner annotate it with {SHARED}: {namespace}" if available.shares else ""
        return f"{said}: another namespace has one of that name; run the pod there{share}"
    meant = get_close_matches(name, sorted(mine), 1, 0.6)
    if meant:
        return f"{said}: did you mean {meant[0]}?"
    return f"{said}: create it, or use one of kubectl -n {namespace} get meshdatasets"


def _in_other_namespaces(datasets: Iterable[Manifest], namespace: str) -> list[Manifest]:
    return [each for each in datasets if each["metadata"]["namespace"] != namespace]


def _is_readable(document: Manifest, namespace: str, available: AvailableDatasets) -> bool:
    metadata = document["metadata"]
    if metadata.get("deletionTimestamp"):
        return False
    return metadata["namespace"] == namespace or (available.shares and shared_with(document, namespace))


def _cluster_of(document: Manifest) -> tuple[str, str]:
    return document["metadata"]["namespace"], document["spec"]["clusterRef"]
