"""Manifests of a MeshCluster that lead to its daemons: Services, NetworkPolicy, ServiceMonitor. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshoperator.cluster_model import SCRAPE_LABEL, owned

if TYPE_CHECKING:
    from meshoperator.cluster_model import Cluster, Manifest


def s3_service(cluster: Cluster) -> Manifest:
    """Return the Service for clients."""
    port = {"name": "s3", "port": cluster.spec.s3.port, "targetPort": "s3", "protocol": "TCP"}
    s3 = cluster.spec.s3
    # An API server refuses fields that it does not know, so what is not set is left out.
    chosen = {
        "externalTrafficPolicy": s3.external_traffic_policy,
        "trafficDistribution": s3.traffic_distribution,
        **_families(cluster),
    }
    spec: dict[str, Any] = {"type": s3.service_type, "selector": cluster.labels(), "ports": [port]}
    spec |= {name: value for name, value in chosen.items() if value}
    found = owned(cluster, "v1", "Service", f"{cluster.name}-s3", cluster.labels(), spec=spec)
    if s3.service_annotations:
        found["metadata"]["annotations"] = dict(s3.service_annotations)
    return found


def _families(cluster: Cluster) -> dict[str, Any]:
    """Return the fields of a Service that choose its IP families; none that is not set."""
    s3 = cluster.spec.s3
    chosen = {"ipFamilyPolicy": s3.ip_family_policy, "ipFamilies": list(s3.ip_families)}
    return {name: value for name, value in chosen.items() if value}


def peer_service(cluster: Cluster) -> Manifest:
    """Return the headless Service, which gives every daemon a name."""
    port = {"name": "s3", "port": cluster.spec.s3.port, "targetPort": "s3", "protocol": "TCP"}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # joining nodes are contacted before they are ready
        "selector": cluster.labels(),
        "ports": [port],
    } | _families(cluster)
    labels = cluster.labels() | {SCRAPE_LABEL: "true"}
    return owned(cluster, "v1", "Service", f"{cluster.name}-nodes", labels, spec=spec)


def network_policy(cluster: Cluster) -> Manifest:
    """Return the NetworkPolicy: who may connect. If namespaces are chosen: these, daemons, the operator."""
    namespaces = cluster.spec.network_policy.from_namespaces
    port = {"port": "s3", "protocol": "TCP"}
    clients: dict[str, Any] = {"ports": [port]}
    if namespaces:
        clients["from"] = [
            {"namespaceSelector": {"matchLabels": namespaces}},
            {"podSelector": {"matchLabels": cluster.labels()}},
            *_operator(cluster),
        ]
    spec = {
        "podSelector": {"matchLabels": cluster.labels()},
        "policyTypes": ["Ingress"],
        "ingress": [clients],
    }
    return owned(cluster, "networking.k8s.io/v1", "NetworkPolicy", cluster.name, cluster.labels(), spec=spec)


def _operator(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the operator's pods as a source of connections. Kubernetes 1.21 and later label each namespace
    with its name."""
    pods = {"podSelector": {"matchLabels": dict(cluster.operator_labels)}}
    if not (namespace := cluster.operator_namespace):
        return []
    if namespace == cluster.namespace:
        return [pods]
    return [pods | {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}]


def service_monitor(cluster: Cluster) -> Manifest:
    """Return the ServiceMonitor. It selects one Service: a daemon found by two would be counted twice."""
    endpoint: dict[str, Any] = {
        "port": "s3",
        "path": "/metrics",
        "interval": cluster.spec.metrics.interval,
        "scheme": "https" if cluster.spec.s3.tls else "http",
        "relabelings": [{"targetLabel": "mesh", "replacement": cluster.name}],  # the alerts are by mesh
    }
    if cluster.spec.s3.tls:  # Prometheus connects to pods by address, certificates are for names
        authority = {"secret": {"name": cluster.spec.s3.tls.secret_ref.name, "key": "ca.crt"}}
        name = f"{cluster.name}-s3.{cluster.namespace}.svc"
        endpoint["tlsConfig"] = {"ca": authority, "serverName": name}
    spec = {"selector": {"matchLabels": cluster.labels() | {SCRAPE_LABEL: "true"}}, "endpoints": [endpoint]}
    return owned(
        cluster, "monitoring.coreos.com/v1", "ServiceMonitor", cluster.name, cluster.labels(), spec=spec
    )
