"""Manifests of a MeshCluster: StatefulSets, services, settings, policies, in order of application. Pure.

Law: a function of the spec and the known nodes; applying it twice changes nothing. Any change of a pod
template changes its digest, and so rolls the daemons. Secrets are named, never read.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

import yaml

from meshoperator.cluster_model import TEMPLATE_ANNOTATION, owned
from meshoperator.planners.service_manifests import (
    network_policy,
    peer_service,
    s3_service,
    service_monitor,
)
from meshoperator.resources.spec_types import parse_quantity
from meshwire.cluster.cluster_map import DEFAULT_SLOTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshoperator.cluster_model import Cluster, Manifest
    from meshoperator.resources.cluster import NodePool
    from meshoperator.resources.cluster_disks import Tier


HOME: Final = "/var/lib/meshd"
USER: Final = 65532
"""The user and group of daemons, as in their image."""
_SPEED: Final = ("nvme", "ssd", "hdd")
_ORIGINS: Final = "/etc/mesh/origins"
_TOKEN: Final = "/var/run/secrets/kubernetes.io/serviceaccount"


def stateful_set(cluster: Cluster, pool: NodePool) -> Manifest:
    """Return the StatefulSet of a pool: its daemons, with their volumes."""
    labels = cluster.labels(pool.name)
    template = _template(cluster, pool)
    claims = [
        {
            "metadata": {"name": tier.name, "labels": labels},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": tier.volume_claim.size}},
            }
            | (
                {"storageClassName": tier.volume_claim.storage_class}
                if tier.volume_claim.storage_class
                else {}
            ),
        }
        for tier in pool.tiers
        if tier.volume_claim
    ]
    spec = {
        "replicas": cluster.replicas(pool) or 0,
        "serviceName": f"{cluster.name}-nodes",
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},  # the operator decides when
        "selector": {"matchLabels": labels},
        "template": template,
    } | ({"volumeClaimTemplates": claims} if claims else {})
    return owned(cluster, "apps/v1", "StatefulSet", f"{cluster.name}-{pool.name}", labels, spec=spec)


def daemon_settings(cluster: Cluster) -> dict[str, Any]:
    """Return the settings that all daemons share."""
    spec = cluster.spec
    found: dict[str, Any] = {
        "control": f"kubernetes://{cluster.namespace}/{cluster.name}",
        # `[::]` takes IPv4, too; but a mesh that has listened on IPv4 is not rolled for that
        "listen": f"{'[::]' if spec.s3.ip_family_policy or cluster.ipv6 else '0.0.0.0'}:{spec.s3.port}",
        "copies": spec.copies,
        "down-after": spec.down_after_seconds,
        "scrub-interval": spec.upkeep.scrub_interval_seconds,
        "repair-interval": spec.upkeep.repair_interval_seconds,
        "log-format": "json",
        "origin-credentials": _ORIGINS,
    }
    if spec.upkeep.remember_removals_seconds != type(spec.upkeep)().remember_removals_seconds:
        # By its earlier name: an operator is upgraded before its daemons, and those may restart meanwhile.
        found["remember-removals"] = spec.upkeep.remember_removals_seconds
    if spec.slots != DEFAULT_SLOTS:  # which daemons of an earlier release, that do not know it, have too
        found["slots"] = spec.slots
    if spec.console.enabled:
        found["console"] = "on"
        found |= {"console-grafana": spec.console.grafana} if spec.console.grafana else {}
    if spec.tracing:
        found |= {"trace-endpoint": spec.tracing.endpoint, "trace-ratio": spec.tracing.ratio}
    if spec.s3.domains:
        found["domain"] = list(spec.s3.domains)
    if spec.s3.tls:
        names = {"tls-cert": "tls.crt", "tls-key": "tls.key", "peer-ca": "ca.crt"}
        found |= {name: f"/etc/mesh/tls/{file}" for name, file in names.items()}
    if spec.auth.users_secret_ref:
        found["users"] = f"/etc/mesh/users/{spec.auth.users_secret_ref.key}"
    return found


def _template(cluster: Cluster, pool: NodePool) -> Manifest:
    spec, port = cluster.spec, cluster.spec.s3.port
    annotations: dict[str, str] = {}
    if spec.metrics.enabled:
        annotations = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(port),
            "prometheus.io/path": "/metrics",
            "prometheus.io/scheme": "https" if spec.s3.tls else "http",
        }
    pod: dict[str, Any] = {
        "serviceAccountName": cluster.account,
        "automountServiceAccountToken": False,  # a token valid for an hour is projected instead
        "terminationGracePeriodSeconds": 60,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(cluster, pool)],
        "volumes": _volumes(cluster, pool),
        "affinity": _apart(cluster, pool),
    }
    if pool.node_selector:
        pod["nodeSelector"] = dict(pool.node_selector)
    if pool.tolerations:
        pod["tolerations"] = [_toleration(each) for each in pool.tolerations]
    if pool.priority_class_name:
        pod["priorityClassName"] = pool.priority_class_name
    if spec.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": each.name} for each in spec.image_pull_secrets]
    template: dict[str, Any] = {
        "metadata": {"labels": cluster.labels(pool.name), "annotations": annotations},
        "spec": pod,
    }
    _lay_over(template, spec.pod_template or {})
    if any(tier.host_path for tier in pool.tiers):
        given = template["spec"].get("initContainers") or []
        user = template["spec"].get("securityContext") or {}
        template["spec"]["initContainers"] = [_directory_owner(cluster, pool, user), *given]
    template["metadata"]["annotations"][TEMPLATE_ANNOTATION] = digest([template, daemon_settings(cluster)])
    return template


def digest(value: object) -> str:
    """Return the digest that identifies a template."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _container(cluster: Cluster, pool: NodePool) -> Manifest:
    port = cluster.spec.s3.port
    scheme = "https" if cluster.spec.s3.tls else "http"
    arguments = [
        "serve",
        "--config",
        f"/etc/mesh/settings/{'default' if cluster.places is None else '$(NODE_NAME)'}",
        "--advertise",
        f"{scheme}://$(POD_NAME).{cluster.name}-nodes.{cluster.namespace}.svc:{port}",
    ]
    arguments += [f"--role={role}" for role in pool.roles]
    arguments += ["--data-dir", f"{HOME}/home", *_disks(pool)]
    if pool.weight:
        arguments += ["--weight", str(pool.weight)]
    arguments += _cache(pool)
    probe = {"port": "s3", "scheme": scheme.upper()}
    return {
        "name": "meshd",
        "image": cluster.spec.image,
        "args": [*arguments, *pool.extra_args],
        "env": [
            _field("POD_NAME", "metadata.name"),
            _field("NODE_NAME", "spec.nodeName"),
            _field("MESHD_NODE_ID", "metadata.name"),
            *([_field("MESHD_MACHINE", "spec.nodeName")] if any(t.host_path for t in pool.tiers) else []),
            _key("MESHD_ROOT_ACCESS_KEY", cluster.root_secret, "AWS_ACCESS_KEY_ID"),
            _key("MESHD_ROOT_SECRET_KEY", cluster.root_secret, "AWS_SECRET_ACCESS_KEY"),
        ],
        "ports": [{"name": "s3", "containerPort": port, "protocol": "TCP"}],
        "startupProbe": {
            "httpGet": {"path": "/-/healthy"} | probe,
            "periodSeconds": 2,
            "failureThreshold": 150,
        },
        "livenessProbe": {
            "httpGet": {"path": "/-/healthy"} | probe,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "readinessProbe": {"httpGet": {"path": "/-/ready"} | probe, "periodSeconds": 5, "timeoutSeconds": 5},
        "terminationMessagePolicy": "FallbackToLogsOnError",  # its start-up error is in the pod's status
        "resources": _resources(pool),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": _mounts(cluster, pool),
    } | ({"imagePullPolicy": cluster.spec.image_pull_policy} if cluster.spec.image_pull_policy else {})


def _resources(pool: NodePool) -> Manifest:
    named = (("requests", pool.resources.requests), ("limits", pool.resources.limits))
    return {name: dict(quantities) for name, quantities in named if quantities}


def _directory_owner(cluster: Cluster, pool: NodePool, user: Mapping[str, Any]) -> Manifest:
    """Return the init container that gives a daemon, which runs as `user`, its directories on a node's disks.

    The kubelet creates them, and those of `subPathExpr`, as root's with mode 0755, and `fsGroup` does not
    apply to hostPath. Only the directories themselves change owner, nothing in them.
    """
    tiers = {tier.name for tier in pool.tiers if tier.host_path}
    mounts = [mount for mount in _mounts(cluster, pool) if mount["name"] in tiers]
    owner, group = (USER if user.get(name) is None else user[name] for name in ("runAsUser", "runAsGroup"))
    command = ["install", "--directory", f"--owner={owner}", f"--group={group}", "--mode=0700"]
    return {
        "name": "directory-owner",
        "image": cluster.spec.image,
        "command": [*command, *(mount["mountPath"] for mount in mounts)],
        "env": [_field("POD_NAME", "metadata.name")],  # in subPathExpr
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(pool),  # a pod needs the larger of both, so this adds nothing
        "volumeMounts": mounts,
    } | ({"imagePullPolicy": cluster.spec.image_pull_policy} if cluster.spec.image_pull_policy else {})


def _disks(pool: NodePool) -> list[str]:
    """Return the arguments for disks: data on every tier but that for the index; without one, the index is
    on the fastest."""
    index = next((tier for tier in pool.tiers if tier.content == "Index"), _home(pool))
    found = [flag for tier in pool.data_tiers for flag in ("--disk", f"{HOME}/{tier.name}/data")]
    return found + (["--index-dir", f"{HOME}/{index.name}/index"] if index else [])


def _cache(pool: NodePool) -> list[str]:
    """Return the cache limits: the sum of the disks' quotas for remote data, and the size for batches."""
    disks = [tier.quota for tier in pool.data_tiers]
    memory = sum(parse_quantity(tier.quota) for tier in pool.tiers if tier.class_ == "mem" and tier.quota)
    found = ["--frame-cache", str(memory)] if memory else []
    if not disks or None in disks:
        return found
    return [*found, "--cache", str(sum(parse_quantity(quota) for quota in disks if quota))]


def _home(pool: NodePool) -> Tier | None:
    """Return the tier of the data directory: the fastest disk with data."""
    return min(pool.data_tiers, key=lambda tier: _SPEED.index(tier.class_), default=None)


def _mounts(cluster: Cluster, pool: NodePool) -> list[Manifest]:
    found: list[Manifest] = [
        {"name": "settings", "mountPath": "/etc/mesh/settings", "readOnly": True},
        {"name": "token", "mountPath": _TOKEN, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "origins", "mountPath": _ORIGINS, "readOnly": True},
    ]
    # a folder per daemon: a daemon must not adopt the data of another that ran on the node before
    own = {"subPathExpr": "$(POD_NAME)"}
    found += [
        {"name": tier.name, "mountPath": f"{HOME}/{tier.name}"} | (own if tier.host_path else {})
        for tier in pool.tiers
        if tier.class_ != "mem"
    ]
    home = _home(pool)
    if home is None:
        found.append({"name": "home", "mountPath": f"{HOME}/home"})
    else:
        path = "$(POD_NAME)/home" if home.host_path else "home"
        found.append({"name": home.name, "mountPath": f"{HOME}/home", "subPathExpr": path})
    if cluster.spec.s3.tls:
        found.append({"name": "tls", "mountPath": "/etc/mesh/tls", "readOnly": True})
    if cluster.spec.auth.users_secret_ref:
        found.append({"name": "users", "mountPath": "/etc/mesh/users", "readOnly": True})
    return found


def _volumes(cluster: Cluster, pool: NodePool) -> list[Manifest]:
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}},
    ]
    found: list[Manifest] = [
        {"name": "settings", "configMap": {"name": f"{cluster.name}-settings"}},
        {"name": "token", "projected": {"sources": sources}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "origins", "secret": {"secretName": cluster.origins_secret, "optional": True}},
    ]
    found += [
        {"name": tier.name, "hostPath": {"path": tier.host_path, "type": "DirectoryOrCreate"}}
        for tier in pool.tiers
        if tier.host_path
    ]
    if _home(pool) is None:
        found.append({"name": "home", "emptyDir": {}})
    if cluster.spec.s3.tls:
        found.append({"name": "tls", "secret": {"secretName": cluster.spec.s3.tls.secret_ref.name}})
    if cluster.spec.auth.users_secret_ref:
        found.append({"name": "users", "secret": {"secretName": cluster.spec.auth.users_secret_ref.name}})
    return found


def _apart(cluster: Cluster, pool: NodePool) -> Manifest:
    """Return the affinity: never two daemons of a pool on one node, for they would share its disks and its
    failures. A daemon whose disk is a directory of a node prefers that node."""
    term = {
        "labelSelector": {"matchLabels": cluster.labels(pool.name)},
        "topologyKey": "kubernetes.io/hostname",
    }
    spread = {"labelSelector": {"matchLabels": cluster.labels()}, "topologyKey": cluster.spec.topology.zone}
    found: Manifest = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [term],
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 50, "podAffinityTerm": spread}],
        }
    }
    if any(tier.host_path for tier in pool.tiers):
        back = {"matchExpressions": [{"key": cluster.disks_label(pool.name), "operator": "Exists"}]}
        preferred = [{"weight": 100, "preference": back}]
        found["nodeAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    return found


def _toleration(each: Any) -> Manifest:
    found = {
        "key": each.key,
        "operator": each.operator,
        "value": each.value,
        "effect": each.effect,
        "tolerationSeconds": each.toleration_seconds,
    }
    return {key: value for key, value in found.items() if value is not None}


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _key(name: str, secret: str, key: str) -> Manifest:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _lay_over(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Merge `over` into `base`: maps are merged, everything else is replaced."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _lay_over(base[key], value)
        else:
            base[key] = value


def cluster_manifests(cluster: Cluster, *, settled: bool) -> list[Manifest]:
    """Return all manifests except MeshNodes and the root Secret. `settled`: whether a pod may be evicted."""
    found = [_settings(cluster), s3_service(cluster), peer_service(cluster)]
    found += [stateful_set(cluster, pool) for pool in cluster.spec.node_pools]
    found.append(_budget(cluster, settled=settled))
    if cluster.spec.network_policy.enabled:
        found.append(network_policy(cluster))
    if cluster.spec.metrics.service_monitor:
        found.append(service_monitor(cluster))
    return found


def root_keys(cluster: Cluster, access_key: str, secret_key: str) -> Manifest:
    """Return the Secret of root's keys, for a cluster that names none. It outlives the cluster."""
    found = owned(cluster, "v1", "Secret", cluster.root_secret, cluster.labels())
    del found["metadata"]["ownerReferences"]
    return found | {"stringData": {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}}


def _settings(cluster: Cluster) -> Manifest:
    """Return the settings, one file for each node a daemon may run on with its zone and rack; `default` if
    nodes may not be read."""
    topology = cluster.spec.topology
    data = {"default": yaml.safe_dump(daemon_settings(cluster))}
    for place in cluster.places or ():
        own = {"zone": place.labels.get(topology.zone, ""), "rack": place.labels.get(topology.rack, "")}
        data[place.name] = yaml.safe_dump(daemon_settings(cluster) | {k: v for k, v in own.items() if v})
    return owned(cluster, "v1", "ConfigMap", f"{cluster.name}-settings", cluster.labels(), data=data)


def _budget(cluster: Cluster, *, settled: bool) -> Manifest:
    spec = {"maxUnavailable": 1 if settled else 0, "selector": {"matchLabels": cluster.labels()}}
    return owned(cluster, "policy/v1", "PodDisruptionBudget", cluster.name, cluster.labels(), spec=spec)
