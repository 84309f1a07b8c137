"""A MeshDataset as others see it: its bucket, what it is to a training pod, its origin in the daemons' terms.
Pure.

Law: a dataset is used in its own namespace and in those that its annotation names, nowhere else.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from meshoperator.admission import Known
from meshoperator.resources import GROUP, MeshDatasetSpec, parse
from meshoperator.sizes import bytes_of

if TYPE_CHECKING:
    from meshoperator.meshes import Cluster, Manifest

SHARED: Final = f"{GROUP}/namespaces"
"""Annotation of a MeshDataset: namespaces whose pods may read it, too, with commas; `*`: all."""
_NEVER: Final = 10 * 365 * 86400.0


def place(spec: MeshDatasetSpec, name: str) -> tuple[str, str]:
    """Bucket and prefix in the mesh."""
    if spec.source.uri.startswith("mesh://"):
        parts = urlsplit(spec.source.uri)
        prefix = parts.path.lstrip("/")
        return parts.netloc, prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    return spec.bucket or name, ""


def mark(namespace: str, name: str) -> str:
    """What the labels of Kubernetes nodes say of it; alike names of two namespaces are two."""
    return f"{name}.{hashlib.sha256(f'{namespace}/{name}'.encode()).hexdigest()[:8]}"


def known(document: Manifest, cluster: Cluster) -> Known:
    """What a training pod needs to know. Raises ResourceError."""
    metadata, spec = document["metadata"], parse(MeshDatasetSpec, document["spec"])
    bucket, prefix = place(spec, metadata["name"])
    return Known(
        metadata["name"],
        mark(metadata["namespace"], metadata["name"]),
        cluster.endpoint,
        bucket,
        prefix,
        spec.placement.near_pods,
        cluster.spec.s3.tls is not None,
    )


def shared_with(document: Manifest, namespace: str) -> bool:
    """Whether pods of a namespace may read it."""
    metadata = document["metadata"]
    if metadata["namespace"] == namespace:
        return True
    said = (metadata.get("annotations") or {}).get(SHARED, "")
    return bool({"*", namespace} & {each.strip() for each in said.split(",")})


def origin(spec: MeshDatasetSpec, credentials: str, *, anew: bool) -> dict[str, Any]:
    """The body of `PUT /-/buckets/NAME`. `anew`: what is cached is compared with the source once more.
    Training data is only read: nothing is written to its source."""
    never = spec.refresh.policy == "Never"
    found: dict[str, Any] = {
        "url": spec.source.uri,
        "credentials": credentials,
        "write": "off",
        "immutable": never and not anew,
        "ttl": 0.0 if anew else _NEVER if never else float(spec.refresh.interval_seconds),
        "quota": bytes_of(spec.quota) if spec.quota else 0,
        "pins": [""] if spec.placement.pin else [],
    }
    return found


def changes(present: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """What of an origin is to be changed; empty where nothing is."""
    return {
        name: value
        for name, value in wanted.items()
        if name != "url" and (list(have) if isinstance(have := present.get(name), tuple) else have) != value
    }
