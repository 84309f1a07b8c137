"""Settings of the operator: a frozen dataclass, documented field by field.

Law: validated once, at construction, and passed down as a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """How the operator watches and how eager it is to move data. Raises ValueError for impossible values."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: the whole cluster."""
    reads_nodes: bool = True
    """Whether Kubernetes nodes may be read: not where the operator has rights in its namespaces only."""
    log_level: str = "info"
    """debug, info, warning or error."""
    lease_namespace: str = ""
    """Where operators agree on which of them acts; empty: the one of the kubeconfig, in a pod its own."""
    daemon_account: str = "shardmesh-daemon"
    """ServiceAccount of the daemons."""
    daemon_role: str = ""
    """ClusterRole the account is bound to in every namespace with a mesh; empty: somebody else does that."""
    endpoint: str = ""
    """Where meshes answer, with `{name}` and `{namespace}` in it; empty: their Services. For an operator that
    runs outside of the cluster."""
    webhook: tuple[str, int] | None = None
    """Where the webhook listens; None: there is none."""
    webhook_certificates: str = ""
    """Folder with its `tls.crt` and `tls.key`."""
    metrics: tuple[str, int] | None = None
    """Where `/metrics` listens; None: nowhere."""
    resync_seconds: float = 60.0
    """Every object is looked at again after this long, whatever events said."""
    eager_seconds: float = 2.0
    """As long as something is to be done."""
    deletion_seconds: float = 600.0
    """A MeshCluster that is deleted waits this long for its daemons to end."""
    move_bytes_per_second: int = 200 << 20
    """All movement for the better together, so that training keeps its bandwidth. 0: copies that are there
    stay; what is missing is still made."""
    plan_seconds: float = 300.0
    """From one plan to the next."""
    pods_seconds: float = 300.0
    """From one look at all pods for misspelt keys to the next."""
    figures_seconds: float = 30.0
    """From one look at what daemons hold to the next."""
    moves_at_once: int = 4
    """Datasets whose copies are being moved at the same time."""
    high_watermark: float = 0.85
    """Share of a node's capacity above which nothing new is placed on it."""
    move_gain: float = 0.2
    """A copy moves only for a score better by this much: without it, small changes make data wander."""

    copy_gpus: float = 4.0
    """One more copy than asked for is made for this many GPUs that come near it (on its host: 1 each, in its
    rack 0.6, in its zone 0.3); it goes again when it serves less than half as many."""

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> OperatorSettings:
        """As the chart says it (MESH_OPERATOR_…). Raises ValueError."""

        def said(name: str) -> str:
            return environ.get(f"MESH_OPERATOR_{name}", "")

        def address(name: str) -> tuple[str, int] | None:
            host, _, port = said(name).rpartition(":")
            return (host, int(port)) if port else None

        found: dict[str, Any] = {
            "namespaces": tuple(filter(None, said("NAMESPACES").split(","))),
            "reads_nodes": said("SCOPE") != "namespaced",
            "log_level": said("LOG_LEVEL") or "info",
            "lease_namespace": said("LEASE_NAMESPACE"),
            "daemon_role": said("DAEMON_ROLE"),
            "webhook": address("WEBHOOK"),
            "webhook_certificates": said("WEBHOOK_CERTIFICATES"),
            "metrics": address("METRICS"),
        }
        if said("ENDPOINT"):
            found["endpoint"] = said("ENDPOINT")
        if said("DAEMON_ACCOUNT"):
            found["daemon_account"] = said("DAEMON_ACCOUNT")
        if said("RESYNC_SECONDS"):
            found["resync_seconds"] = float(said("RESYNC_SECONDS"))
        if said("EAGER_SECONDS"):
            found["eager_seconds"] = float(said("EAGER_SECONDS"))
        if said("DELETION_SECONDS"):
            found["deletion_seconds"] = float(said("DELETION_SECONDS"))
        if said("FIGURES_SECONDS"):
            found["figures_seconds"] = float(said("FIGURES_SECONDS"))
        if said("PODS_SECONDS"):
            found["pods_seconds"] = float(said("PODS_SECONDS"))
        if said("PLAN_SECONDS"):
            found["plan_seconds"] = float(said("PLAN_SECONDS"))
        if said("MOVE_BYTES_PER_SECOND"):
            found["move_bytes_per_second"] = int(said("MOVE_BYTES_PER_SECOND"))
        return cls(**found)

    @property
    def move_bytes(self) -> int:
        """What may move by one plan."""
        return int(self.move_bytes_per_second * self.plan_seconds)

    def __post_init__(self) -> None:
        if not 0 < self.high_watermark <= 1:
            raise ValueError("high_watermark must be above 0 and at most 1")
        seconds = self.resync_seconds, self.plan_seconds, self.eager_seconds, self.figures_seconds
        if min(*seconds, self.pods_seconds) <= 0 or self.deletion_seconds < 0:
            raise ValueError("resync, plan, eager, pods and figures_seconds must be above 0")
        if self.moves_at_once < 1 or self.move_bytes_per_second < 0:
            raise ValueError("moves_at_once must be at least 1, move_bytes_per_second at least 0")
        if self.move_gain < 0 or self.copy_gpus <= 0:
            raise ValueError("move_gain must not be negative, copy_gpus must be above 0")
