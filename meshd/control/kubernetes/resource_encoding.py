"""Encoding of a control store key as a ConfigMap or Secret. Pure.

Law: `resource_name` never changes its result; `decode_resource` returns what `encode_resource` was
given. Topics that may contain secrets become Secrets, because many accounts may read ConfigMaps.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from meshd.control.control_api import ControlError, Versioned, check_key

if TYPE_CHECKING:
    from collections.abc import Mapping

Resource = Literal["configmaps", "secrets"]
RESOURCES: Final[tuple[Resource, ...]] = ("configmaps", "secrets")
OPEN_TOPICS: Final = frozenset({"cluster", "buckets", "jobs", "machines", "moves", "scrubs"})
"""Topics without secrets, stored as ConfigMaps, which many accounts may read. The operator, which may not
list Secrets, reads the states of disks from `scrubs`."""
STORE, TOPIC, KEY, NONCE = (
    "shardmesh.io/store",
    "shardmesh.io/topic",
    "shardmesh.io/key",
    "shardmesh.io/write",
)
MAX_VALUE_BYTES: Final = 1_000_000  # Kubernetes takes 1 MiB an object, labels and all
_LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


class Entry(NamedTuple):
    """The stored value of a key, and the nonce of the write that stored it."""

    key: str
    value: Versioned
    nonce: str


def resource_of(key: str, open_topics: frozenset[str]) -> Resource:
    """Return the kind of the resource that stores a key."""
    return "configmaps" if key.partition("/")[0] in open_topics else "secrets"


def resource_name(store: str, key: str) -> str:
    """Return the name of the resource: readable, and unique by a hash."""
    words = re.sub(r"[^a-z0-9]+", "-", key.lower())[:60].strip("-")
    return f"{store}.{words or 'key'}-{hashlib.blake2b(check_key(key).encode(), digest_size=10).hexdigest()}"


def topic_label(topic: str) -> str:
    """Return a topic as the value of a label."""
    if _LABEL.fullmatch(topic):
        return topic
    return "x-" + hashlib.blake2b(topic.encode(), digest_size=16).hexdigest()


def encode_resource(
    resource: Resource, store: str, key: str, value: bytes, nonce: str, version: int = 0
) -> dict[str, Any]:
    """Return the resource that stores a key. `nonce` makes every write a change, even of an equal value.
    `version`: the version to replace, 0 for any. Raises ControlError if the value is too large."""
    if len(value) > MAX_VALUE_BYTES:
        raise ControlError(
            f"{key} has {len(value)} bytes; Kubernetes keeps at most {MAX_VALUE_BYTES} in an object"
        )
    metadata = {
        "name": resource_name(store, key),
        "labels": {STORE: store, TOPIC: topic_label(key.partition("/")[0])},
        "annotations": {KEY: key, NONCE: nonce},
    } | ({"resourceVersion": str(version)} if version else {})
    kind = "ConfigMap" if resource == "configmaps" else "Secret"
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata} | _data(resource, value)


def _data(resource: Resource, value: bytes) -> dict[str, Any]:
    if resource == "secrets":
        return {"type": "shardmesh.io/control", "data": {"value": b64encode(value).decode()}}
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {"binaryData": {"value": b64encode(value).decode()}}
    return {"data": {"value": text}}


def decode_resource(resource: Resource, document: Mapping[str, Any]) -> Entry | None:
    """Return what a resource stores; None if it is not ours (its annotation was removed)."""
    metadata = document["metadata"]
    annotations = metadata.get("annotations") or {}
    if KEY not in annotations:
        return None
    data, binary = document.get("data") or {}, document.get("binaryData") or {}
    if resource == "secrets":
        value = b64decode(data.get("value", ""))
    else:
        value = data["value"].encode() if "value" in data else b64decode(binary.get("value", ""))
    return Entry(
        annotations[KEY], Versioned(value, int(metadata["resourceVersion"])), annotations.get(NONCE, "")
    )
