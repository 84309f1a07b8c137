"""Settings of the operator: a frozen dataclass, documented field by field.

Law: validated once, at construction, and passed down as a value.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


PREFIX: Final = "MESH_OPERATOR_"


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of the operator. `field`: the field of OperatorSettings that it sets; `text`
    and `default`: what `--help` and the docs say; `parse`: converts its value, or raises ValueError with what
    to write instead."""

    name: str
    field: str
    text: str
    default: str
    parse: Callable[[str], Any]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise ValueError("HOST:PORT, such as 0.0.0.0:8080")
    return host.strip("[]"), int(port)


def _log_level(text: str) -> str:
    if text.upper() not in logging.getLevelNamesMapping():
        raise ValueError("debug, info, warning or error")
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    pairs = [each.partition("=") for each in _names(text)]
    if not pairs or any(not name or not equals for name, equals, _ in pairs):
        raise ValueError("NAME=VALUE, separated by commas")
    return tuple((name, value) for name, _, value in pairs)


def _setting(
    default: object,
    text: str,
    *,
    parse: Callable[[str], Any] = str,
    unset: str = "",
    unit: str = "",
    variable: str = "",
) -> Any:
    """Declare a field that a variable sets. `text`: one sentence about it; `unset`: the default in words;
    `unit`: that of the default; `variable`: its name, by default the field's."""
    number = f"{default:g}" if isinstance(default, float) else str(default)
    told = {
        "text": text,
        "default": unset or f"{number} {unit}".rstrip(),
        "parse": parse,
        "variable": variable,
    }
    return field(default=default, metadata=told)


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """What the operator watches and how much data it may move. Raises ValueError for impossible values. The
    fields of `_setting` are environment variables, which their texts explain; the others are fixed."""

    namespaces: tuple[str, ...] = _setting(
        (), "Namespaces to watch, separated by commas.", parse=_names, unset="all namespaces"
    )
    reads_nodes: bool = _setting(
        True,
        "Scope of the operator's rights: cluster, or namespaced, where it does not read Kubernetes nodes.",
        parse=lambda text: text != "namespaced",
        unset="cluster",
        variable="SCOPE",
    )
    log_level: str = _setting("info", "Log level: debug, info, warning or error.", parse=_log_level)
    lease_namespace: str = _setting(
        "", "Namespace of the leader election Lease.", unset="the pod's own, or that of the kubeconfig"
    )
    pod_name: str = _setting(
        "",
        "Name of the operator's own pod, which must be in the namespace of the Lease.",
        unset="none: it does not run in a pod",
    )
    pod_uid: str = _setting(
        "",
        "UID of that pod, required with its name: the Lease is then deleted together with the pod.",
        unset="none: it does not run in a pod",
    )
    pod_labels: tuple[tuple[str, str], ...] = _setting(
        (("app.kubernetes.io/component", "operator"),),
        "Labels by which the NetworkPolicies of meshes admit the operator's pods, NAME=VALUE, separated by "
        "commas.",
        parse=_labels,
        unset="app.kubernetes.io/component=operator",
    )
    daemon_account: str = _setting("shardmesh-daemon", "ServiceAccount of the daemons.")
    daemon_role: str = _setting(
        "",
        "ClusterRole to bind to the daemons' ServiceAccount in every namespace with a MeshCluster.",
        unset="none: the binding is made elsewhere",
    )
    endpoint: str = _setting(
        "",
        "URL at which the operator reaches a mesh, with {name} and {namespace} in it, to run the operator "
        "outside the cluster.",
        unset="the Service of the mesh",
    )
    webhook: tuple[str, int] | None = _setting(
        None,
        "HOST:PORT on which to serve the webhook; host [::] listens on IPv6 and IPv4.",
        parse=_address,
        unset="not served",
    )
    webhook_certificates: str = _setting(
        "", "Directory with the webhook's certificate and key, tls.crt and tls.key.", unset="none"
    )
    metrics: tuple[str, int] | None = _setting(
        None, "HOST:PORT on which to serve /metrics.", parse=_address, unset="not served"
    )
    health: tuple[str, int] | None = _setting(
        None, "HOST:PORT on which to serve /healthz.", parse=_address, unset="not served"
    )
    resync_seconds: float = _setting(
        60.0,
        "Time after which every object is reconciled even without a change.",
        parse=_number,
        unit="seconds",
    )
    eager_seconds: float = _setting(
        2.0, "Time between passes over an object that has work to do.", parse=_number, unit="seconds"
    )
    deletion_seconds: float = _setting(
        600.0, "How long a deleted MeshCluster waits for its daemons to stop.", parse=_number, unit="seconds"
    )
    move_bytes_per_second: int = _setting(
        200 << 20,
        "Limit on all optional movement of data together; 0: only missing copies are made.",
        parse=_whole_number,
        unit="bytes per second (200 MiB/s)",
    )
    plan_seconds: float = _setting(300.0, "Time between placement plans.", parse=_number, unit="seconds")
    pods_seconds: float = _setting(
        300.0,
        "Time between checks of all pods for misspelt labels and annotations.",
        parse=_number,
        unit="seconds",
    )
    figures_seconds: float = _setting(
        30.0, "Time between updates of the usage in statuses.", parse=_number, unit="seconds"
    )
    moves_at_once: int = 4
    """Datasets whose copies move at the same time, at most."""
    high_watermark: float = 0.85
    """Share of a node's capacity above which nothing new is placed there."""
    move_gain: float = 0.2
    """Least improvement of the score for which a copy moves; otherwise small changes would move data back and
    forth."""
    cluster_ipv6: bool = False
    """Whether the cluster's first family is IPv6: its pods may have no address of IPv4."""
    copy_gpus: float = 4.0
    """GPUs that justify one copy beyond those requested, weighted by distance (same host 1, same rack 0.6,
    same zone 0.3). The copy is removed when it serves less than half as many."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> OperatorSettings:
        """Read the variables MESH_OPERATOR_… that the chart sets. Raises ValueError."""

        found: dict[str, Any] = {}
        for variable in variables():
            if text := environ.get(variable.name, ""):
                try:
                    found[variable.field] = variable.parse(text)
                except ValueError as error:
                    raise ValueError(f"{variable.name} is {text!r}; write {error}") from None
        return cls(**found)

    @property
    def pod(self) -> tuple[str, str] | None:
        """Name and uid of the operator's own pod; None if it runs in none."""
        return (self.pod_name, self.pod_uid) if self.pod_uid else None

    @property
    def move_bytes(self) -> int:
        """Bytes that one plan may move."""
        return int(self.move_bytes_per_second * self.plan_seconds)

    def __post_init__(self) -> None:
        if not 0 < self.high_watermark <= 1:
            raise ValueError("high_watermark must be above 0 and at most 1")
        seconds = self.resync_seconds, self.plan_seconds, self.eager_seconds, self.figures_seconds
        if min(*seconds, self.pods_seconds) <= 0 or self.deletion_seconds < 0:
            raise ValueError(
                "resync, plan, eager, pods and figures_seconds must be above 0, deletion_seconds at least 0"
            )
        if bool(self.pod_name) != bool(self.pod_uid):
            raise ValueError("set both pod_name and pod_uid, or neither")
        if self.moves_at_once < 1 or self.move_bytes_per_second < 0:
            raise ValueError("moves_at_once must be at least 1, move_bytes_per_second at least 0")
        if self.move_gain < 0 or self.copy_gpus <= 0:
            raise ValueError("move_gain must not be negative, copy_gpus must be above 0")


def variables() -> list[Variable]:
    """Return the variables that `OperatorSettings.from_environment` reads, by name."""
    found = [
        Variable(
            PREFIX + (each.metadata["variable"] or each.name.upper()),
            each.name,
            each.metadata["text"],
            each.metadata["default"],
            each.metadata["parse"],
        )
        for each in fields(OperatorSettings)
        if each.metadata
    ]
    return sorted(found, key=lambda variable: variable.name)
