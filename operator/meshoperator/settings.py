"""Settings of the operator: a frozen dataclass, documented field by field.

Law: validated once, at construction, and passed down as a value.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_PREFIX: Final = "MESH_OPERATOR_"


def _log_level(text: str) -> str:
    if text.upper() not in logging.getLevelNamesMapping():
        raise ValueError
    return text


_KINDS: Final[dict[Callable[[str], Any], str]] = {
    int: "a whole number",
    float: "a number",
    _log_level: "debug, info, warning or error",
}
_PLAIN: Final[dict[str, Callable[[str], Any]]] = {
    "log_level": _log_level,
    "lease_namespace": str,
    "pod_name": str,
    "pod_uid": str,
    "daemon_account": str,
    "daemon_role": str,
    "endpoint": str,
    "webhook_certificates": str,
    "resync_seconds": float,
    "eager_seconds": float,
    "deletion_seconds": float,
    "figures_seconds": float,
    "pods_seconds": float,
    "plan_seconds": float,
    "move_bytes_per_second": int,
}
"""Settings that are one variable each, named as here in upper case after MESH_OPERATOR_."""
_OTHERS: Final = ("NAMESPACES", "SCOPE", "WEBHOOK", "METRICS", "HEALTH")


def variables() -> list[str]:
    """Return the names of the variables that `OperatorSettings.from_environment` reads."""
    return [f"{_PREFIX}{name}" for name in (*_OTHERS, *(name.upper() for name in _PLAIN))]


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """What the operator watches and how much data it may move. Raises ValueError for impossible values."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: the whole cluster."""
    reads_nodes: bool = True
    """Whether Kubernetes nodes may be read; False if the operator has rights in its namespaces only."""
    log_level: str = "info"
    """debug, info, warning or error."""
    lease_namespace: str = ""
    """Namespace of the leader election Lease; empty: the kubeconfig's, or the pod's own."""
    pod_name: str = ""
    """Name of the operator's own pod, which must be in `lease_namespace`; empty: it runs in none."""
    pod_uid: str = ""
    """The pod's uid. With both, the Lease is deleted with the pod."""
    daemon_account: str = "shardmesh-daemon"
    """ServiceAccount of the daemons."""
    daemon_role: str = ""
    """ClusterRole that the account is bound to in every namespace with a mesh; empty: the binding is made
    elsewhere."""
    endpoint: str = ""
    """URL template of a mesh's endpoint, with `{name}` and `{namespace}`; empty: its Service. Set it to run
    the operator outside the cluster."""
    webhook: tuple[str, int] | None = None
    """Host and port of the webhook; None: no webhook. Host `::` is every address of both families."""
    webhook_certificates: str = ""
    """Folder with the webhook's `tls.crt` and `tls.key`."""
    metrics: tuple[str, int] | None = None
    """Host and port of `/metrics`; None: not served."""
    health: tuple[str, int] | None = None
    """Host and port of `/healthz`; None: not served."""
    resync_seconds: float = 60.0
    """Seconds after which every object is reconciled again, even without an event."""
    eager_seconds: float = 2.0
    """Seconds between passes while an object has work to do."""
    deletion_seconds: float = 600.0
    """Seconds for which a deleted MeshCluster waits for its daemons to end."""
    move_bytes_per_second: int = 200 << 20
    """Limit on all optional movement together, so that training keeps its bandwidth. 0: existing copies stay
    where they are; missing copies are still made."""
    plan_seconds: float = 300.0
    """Seconds between placement plans."""
    pods_seconds: float = 300.0
    """Seconds between checks of all pods for misspelt keys."""
    figures_seconds: float = 30.0
    """Seconds between updates of usage in statuses."""
    moves_at_once: int = 4
    """Datasets whose copies move at the same time, at most."""
    high_watermark: float = 0.85
    """Share of a node's capacity above which nothing new is placed there."""
    move_gain: float = 0.2
    """Least improvement of the score for which a copy moves; otherwise small changes would move data back and
    forth."""
    copy_gpus: float = 4.0
    """GPUs that justify one copy beyond those requested, weighted by distance (same host 1, same rack 0.6,
    same zone 0.3). The copy is removed when it serves less than half as many."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> OperatorSettings:
        """Read the variables MESH_OPERATOR_… that the chart sets. Raises ValueError."""

        def value(name: str) -> str:
            return environ.get(f"{_PREFIX}{name}", "")

        def address(name: str) -> tuple[str, int] | None:
            host, _, port = value(name).rpartition(":")
            if port and not (port.isdecimal() and int(port) < 1 << 16):
                raise ValueError(f"{_PREFIX}{name} is {value(name)!r}; write HOST:PORT, such as 0.0.0.0:8080")
            return (host.strip("[]"), int(port)) if port else None

        found: dict[str, Any] = {
            "namespaces": tuple(filter(None, value("NAMESPACES").split(","))),
            "reads_nodes": value("SCOPE") != "namespaced",
            "webhook": address("WEBHOOK"),
            "metrics": address("METRICS"),
            "health": address("HEALTH"),
        }
        for name, convert in _PLAIN.items():
            if text := value(name.upper()):
                try:
                    found[name] = convert(text)
                except ValueError:
                    kind = _KINDS[convert]
                    raise ValueError(f"{_PREFIX}{name.upper()} is {text!r}; write {kind}") from None
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
