"""What a MeshCluster is made of in Kubernetes: manifests, in the order in which they are applied. Pure.

Law: a function of the spec and what is known of nodes alone; applying it twice changes nothing. Secrets are
only named, never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from meshoperator.daemonpods import daemon_settings, stateful_set
from meshoperator.meshes import SCRAPE_LABEL, owned

if TYPE_CHECKING:
    from meshoperator.meshes import Cluster, Manifest


def children(cluster: Cluster, *, settled: bool) -> list[Manifest]:
    """Everything but the MeshNodes and the root Secret. `settled`: whether a pod may be evicted."""
    found = [_settings(cluster), _service(cluster), _peers(cluster)]
    found += [stateful_set(cluster, pool) for pool in cluster.spec.node_pools]
    found.append(_budget(cluster, settled=settled))
    if cluster.spec.network_policy.enabled:
        found.append(_policy(cluster))
    if cluster.spec.metrics.service_monitor:
        found.append(_monitor(cluster))
    return found


def root_keys(cluster: Cluster, access_key: str, secret_key: str) -> Manifest:
    """The Secret of root's keys, for a cluster that names none. It stays when the cluster goes."""
    found = owned(cluster, "v1", "Secret", cluster.root_secret, cluster.labels())
    del found["metadata"]["ownerReferences"]
    return found | {"stringData": {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}}


def _settings(cluster: Cluster) -> Manifest:
    """One file of settings for each node a daemon may run on: its zone and rack; `default` where nodes may
    not be read."""
    topology = cluster.spec.topology
    data = {"default": yaml.safe_dump(daemon_settings(cluster))}
    for place in cluster.places or ():
        own = {"zone": place.labels.get(topology.zone, ""), "rack": place.labels.get(topology.rack, "")}
        data[place.name] = yaml.safe_dump(daemon_settings(cluster) | {k: v for k, v in own.items() if v})
    return owned(cluster, "v1", "ConfigMap", f"{cluster.name}-settings", cluster.labels(), data=data)


def _service(cluster: Cluster) -> Manifest:
    port = {"name": "s3", "port": cluster.spec.s3.port, "targetPort": "s3", "protocol": "TCP"}
    spec = {"type": cluster.spec.s3.service_type, "selector": cluster.labels(), "ports": [port]}
    return owned(cluster, "v1", "Service", f"{cluster.name}-s3", cluster.labels(), spec=spec)


def _peers(cluster: Cluster) -> Manifest:
    port = {"name": "s3", "port": cluster.spec.s3.port, "targetPort": "s3", "protocol": "TCP"}
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # nodes that join are asked before they are ready
        "selector": cluster.labels(),
        "ports": [port],
    }
    labels = cluster.labels() | {SCRAPE_LABEL: "true"}
    return owned(cluster, "v1", "Service", f"{cluster.name}-nodes", labels, spec=spec)


def _budget(cluster: Cluster, *, settled: bool) -> Manifest:
    spec = {"maxUnavailable": 1 if settled else 0, "selector": {"matchLabels": cluster.labels()}}
    return owned(cluster, "policy/v1", "PodDisruptionBudget", cluster.name, cluster.labels(), spec=spec)


def _policy(cluster: Cluster) -> Manifest:
    namespaces = cluster.spec.network_policy.from_namespaces
    port = {"port": "s3", "protocol": "TCP"}
    clients: dict[str, Any] = {"ports": [port]}
    if namespaces:
        clients["from"] = [
            {"namespaceSelector": {"matchLabels": namespaces}},
            {"podSelector": {"matchLabels": cluster.labels()}},
        ]
    spec = {
        "podSelector": {"matchLabels": cluster.labels()},
        "policyTypes": ["Ingress"],
        "ingress": [clients],
    }
    return owned(cluster, "networking.k8s.io/v1", "NetworkPolicy", cluster.name, cluster.labels(), spec=spec)


def _monitor(cluster: Cluster) -> Manifest:
    """By one Service: a daemon that is found by two is counted twice."""
    endpoint: dict[str, Any] = {
        "port": "s3",
        "path": "/metrics",
        "interval": cluster.spec.metrics.interval,
        "scheme": "https" if cluster.spec.s3.tls else "http",
    }
    if cluster.spec.s3.tls:  # Prometheus asks for pods by address, certificates are for names
        authority = {"secret": {"name": cluster.spec.s3.tls.secret_ref.name, "key": "ca.crt"}}
        name = f"{cluster.name}-s3.{cluster.namespace}.svc"
        endpoint["tlsConfig"] = {"ca": authority, "serverName": name}
    spec = {"selector": {"matchLabels": cluster.labels() | {SCRAPE_LABEL: "true"}}, "endpoints": [endpoint]}
    return owned(
        cluster, "monitoring.coreos.com/v1", "ServiceMonitor", cluster.name, cluster.labels(), spec=spec
    )
