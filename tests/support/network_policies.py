"""What NetworkPolicies (networking.k8s.io/v1) allow, by reading them: for clusters that enforce none.

Law: as Kubernetes describes them. A pod that no policy selects for a direction is open in it; otherwise one
rule of one policy has to allow a connection. Policies only add up. Whether a plug-in does the same is not
known here.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Policy = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """One end of a connection: a pod, or, without a namespace, what is no pod. `ports`: the named ones of its
    containers."""

    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "192.0.2.1"
    ports: Mapping[str, int] = field(default_factory=dict)


def pod_peer(metadata: Mapping[str, Any], spec: Mapping[str, Any], **rest: Any) -> Peer:
    """Return a pod, or the pods of a template, as one end of a connection; `rest`: fields that these do not
    tell."""
    ports = {
        port["name"]: port["containerPort"]
        for container in spec["containers"]
        for port in container.get("ports") or ()
        if "name" in port
    }
    found = {"namespace": metadata.get("namespace", ""), "labels": metadata.get("labels") or {}} | rest
    return Peer(ports=ports, **found)


def allows(policies: Iterable[Policy], source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection from `source` to this port of `target` is allowed at both ends."""
    known = list(policies)
    incoming = _rules(known, target, "Ingress")
    outgoing = _rules(known, source, "Egress")
    arrives = any(
        _has_port(rule, target, port, protocol) and _has_peer(rule.get("from"), source, policy)
        for policy, rule in incoming or ()
    )
    leaves = any(
        _has_port(rule, target, port, protocol) and _has_peer(rule.get("to"), target, policy)
        for policy, rule in outgoing or ()
    )
    return (incoming is None or arrives) and (outgoing is None or leaves)


def _rules(policies: Sequence[Policy], pod: Peer, direction: str) -> list[tuple[Policy, Any]] | None:
    """Return the rules of this direction that apply to a pod; None if no policy does."""
    selecting = [
        each
        for each in policies
        if pod.namespace
        and each["metadata"]["namespace"] == pod.namespace
        and _selects(each["spec"].get("podSelector") or {}, pod.labels)
        and direction in _types(each["spec"])
    ]
    if not selecting:
        return None
    return [(each, rule) for each in selecting for rule in each["spec"].get(direction.lower()) or ()]


def _types(spec: Mapping[str, Any]) -> Sequence[str]:
    default = ["Ingress", "Egress"] if spec.get("egress") else ["Ingress"]
    return spec.get("policyTypes") or default


def _has_port(rule: Mapping[str, Any], target: Peer, port: int, protocol: str) -> bool:
    for each in rule.get("ports") or ():
        wanted = each.get("port")
        if each.get("protocol", "TCP") != protocol:
            continue
        if isinstance(wanted, str):
            wanted = target.ports.get(wanted, -1)
        if wanted is None or wanted <= port <= each.get("endPort", wanted):
            return True
    return not rule.get("ports")


def _has_peer(peers: Sequence[Mapping[str, Any]] | None, other: Peer, policy: Policy) -> bool:
    return not peers or any(_is_peer(each, other, policy["metadata"]["namespace"]) for each in peers)


def _is_peer(wanted: Mapping[str, Any], other: Peer, namespace: str) -> bool:
    if block := wanted.get("ipBlock"):
        address = ipaddress.ip_address(other.address)
        apart = any(address in ipaddress.ip_network(each) for each in block.get("except") or ())
        return address in ipaddress.ip_network(block["cidr"]) and not apart
    if not other.namespace:
        return False
    spaces, pods = wanted.get("namespaceSelector"), wanted.get("podSelector")
    here = other.namespace == namespace if spaces is None else _selects(spaces, other.namespace_labels)
    return here and _selects(pods or {}, other.labels)


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    return all(_meets(each, labels) for each in selector.get("matchExpressions") or ())


def _meets(wanted: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = wanted["key"], wanted.get("values") or ()
    match wanted["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case other:
            raise ValueError(f"no operator of selectors: {other}")
