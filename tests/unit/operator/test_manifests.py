"""What a MeshCluster is made of: manifests, and what they follow from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from meshoperator.cluster_model import POOL_LABEL, TEMPLATE_ANNOTATION, Cluster, HostNode
from meshoperator.planners.manifests import cluster_manifests
from meshoperator.resources import MeshClusterSpec, parse

if TYPE_CHECKING:
    from meshoperator.cluster_model import Manifest

STORE: dict[str, Any] = {
    "name": "s",
    "replicas": 2,
    "tiers": [
        {"name": "bulk", "class": "hdd", "hostPath": "/mnt/hdd"},
        {"name": "fast", "class": "nvme", "volumeClaim": {"size": "1Ti"}},
    ],
}
CACHE: dict[str, Any] = {
    "name": "gpu",
    "perMatchingNode": True,
    "nodeSelector": {"gpu": "yes"},
    "roles": ["cache", "compute"],
    "tiers": [{"name": "scratch", "class": "nvme", "hostPath": "/mnt/scratch", "quota": "800Gi"}],
}
PLACES = (
    HostNode("k0", {"gpu": "yes", "topology.kubernetes.io/zone": "a"}),
    HostNode("k1", {"gpu": "yes"}, schedulable=False),
    HostNode("k2"),
)


def cluster(places: tuple[HostNode, ...] | None = PLACES, **spec: Any) -> Cluster:
    document = {"image": "i:1", "nodePools": [STORE, CACHE], **spec}
    return Cluster("m", "ns", "uid", parse(MeshClusterSpec, document), places)


def found(of: Cluster, kind: str, *, settled: bool = True) -> list[Manifest]:
    return [each for each in cluster_manifests(of, settled=settled) if each["kind"] == kind]


def pool(of: Cluster, name: str) -> Manifest:
    (one,) = (each for each in found(of, "StatefulSet") if each["metadata"]["labels"][POOL_LABEL] == name)
    return one


def arguments(of: Cluster, name: str) -> str:
    return " ".join(pool(of, name)["spec"]["template"]["spec"]["containers"][0]["args"])


def test_data_is_on_every_tier_and_the_index_on_the_fastest() -> None:
    said = arguments(cluster(), "s")
    assert "--disk /var/lib/meshd/bulk/data --disk /var/lib/meshd/fast/data" in said
    assert "--index-dir /var/lib/meshd/fast/index" in said
    mounts = pool(cluster(), "s")["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    by_path = {each["mountPath"]: each for each in mounts}
    assert by_path["/var/lib/meshd/bulk"]["subPathExpr"] == "$(POD_NAME)", "two daemons share no folder"
    assert by_path["/var/lib/meshd/home"]["name"] == "fast"
    (claim,) = pool(cluster(), "s")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "1Ti"}


def test_a_tier_for_the_index_has_no_data() -> None:
    tiers = [
        {"name": "flash", "class": "nvme", "content": "Index", "volumeClaim": {"size": "200Gi"}},
        {"name": "bulk", "class": "hdd", "hostPath": "/mnt/hdd", "quota": "1Ti"},
        {"name": "fast", "class": "ssd", "hostPath": "/mnt/ssd", "quota": "1Ti"},
    ]
    of = cluster(nodePools=[STORE | {"tiers": tiers}])
    said = arguments(of, "s")
    assert "--disk /var/lib/meshd/bulk/data --disk /var/lib/meshd/fast/data --index-dir" in said
    assert "--index-dir /var/lib/meshd/flash/index" in said
    assert said.count("flash") == 1
    assert f"--cache {2 << 40}" in said
    mounts = pool(of, "s")["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    by_path = {each["mountPath"]: each["name"] for each in mounts}
    assert by_path["/var/lib/meshd/flash"] == "flash"
    assert by_path["/var/lib/meshd/home"] == "fast", "only the index is there"
    (claim,) = pool(of, "s")["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "flash"


def test_quotas_bound_copies_of_what_is_elsewhere_and_batches_in_memory() -> None:
    assert f"--cache {800 << 30}" in arguments(cluster(), "gpu")
    assert "--cache" not in arguments(cluster(), "s")
    tiers = [
        {"name": "a", "class": "ssd", "hostPath": "/a", "quota": "1Gi"},
        {"name": "b", "class": "mem", "quota": "2Gi"},
    ]
    of = cluster(nodePools=[STORE | {"tiers": tiers}])
    assert f"--frame-cache {2 << 30} --cache {1 << 30}" in arguments(of, "s")
    spec = pool(of, "s")["spec"]["template"]["spec"]
    assert "b" not in {each["name"] for each in (*spec["volumes"], *spec["containers"][0]["volumeMounts"])}


def test_a_daemon_goes_back_to_its_disk() -> None:
    """Where a tier is a directory of the Kubernetes node; a volume follows it by itself."""
    label = cluster().disks_label("s")
    assert len(label.partition("/")[2]) <= 63
    directory = {"name": "a", "class": "ssd", "hostPath": "/a"}
    on_host = pool(cluster(nodePools=[STORE | {"tiers": [directory]}]), "s")["spec"]["template"]["spec"]
    (term,) = on_host["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchExpressions"] == [{"key": label, "operator": "Exists"}]
    claim = {"name": "a", "class": "ssd", "volumeClaim": {"size": "1Gi"}}
    on_claims = pool(cluster(nodePools=[STORE | {"tiers": [claim]}]), "s")["spec"]["template"]["spec"]
    assert "nodeAffinity" not in on_claims["affinity"]


def test_a_daemon_is_given_its_directories_on_the_nodes_disks() -> None:
    """The kubelet creates them as root's; claims have `fsGroup`."""
    over = {"spec": {"initContainers": [{"name": "mine"}], "securityContext": {"runAsUser": 1000}}}
    pod = pool(cluster(podTemplate=over), "gpu")["spec"]["template"]["spec"]
    owner, mine = pod["initContainers"]
    assert mine == {"name": "mine"}
    assert owner["command"] == [
        *("install", "--directory", "--owner=1000", "--group=65532", "--mode=0700"),
        "/var/lib/meshd/scratch",
        "/var/lib/meshd/home",
    ]
    mounts = pod["containers"][0]["volumeMounts"]
    assert owner["volumeMounts"] == [each for each in mounts if each["name"] == "scratch"]
    assert owner["image"] == pod["containers"][0]["image"]
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
    claim = {"name": "a", "class": "ssd", "volumeClaim": {"size": "1Gi"}}
    of = cluster(nodePools=[STORE | {"tiers": [claim]}])
    assert "initContainers" not in pool(of, "s")["spec"]["template"]["spec"]


def test_one_daemon_on_each_node_that_matches() -> None:
    assert pool(cluster(), "gpu")["spec"]["replicas"] == 2
    of = cluster(places=None)
    assert of.replicas(of.spec.node_pools[1]) is None, "nobody knows"


def test_prometheus_finds_each_daemon_once_over_tls_too() -> None:
    of = cluster(metrics={"serviceMonitor": True}, s3={"tls": {"secretRef": {"name": "mesh-tls"}}})
    every = cluster_manifests(of, settled=True)
    (monitor,) = (each for each in every if each["kind"] == "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [each for each in every if each["kind"] == "Service"]
    (service,) = (each for each in services if wanted <= each["metadata"]["labels"].items())
    assert service["metadata"]["name"] == "m-nodes"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "m-s3.ns.svc")
    assert endpoint["tlsConfig"]["ca"] == {"secret": {"name": "mesh-tls", "key": "ca.crt"}}
    annotations = pool(of, "s")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scheme"] == "https"
    (settings,) = found(of, "ConfigMap")
    assert yaml.safe_load(settings["data"]["default"])["peer-ca"] == "/etc/mesh/tls/ca.crt"


def test_the_service_has_the_options_that_are_set_and_no_others() -> None:
    def services(**s3: Any) -> dict[str, Manifest]:
        return {each["metadata"]["name"]: each for each in found(cluster(s3=s3), "Service")}

    plain = services()
    assert set(plain["m-s3"]["spec"]) == {"type", "selector", "ports"}, "earlier API servers refuse more"
    assert "annotations" not in plain["m-s3"]["metadata"]
    annotations = {"cloud.example/scheme": "internal"}
    chosen = services(
        serviceType="LoadBalancer",
        serviceAnnotations=annotations,
        externalTrafficPolicy="Local",
        trafficDistribution="PreferClose",
        ipFamilyPolicy="PreferDualStack",
    )
    spec = chosen["m-s3"]["spec"]
    assert (spec["externalTrafficPolicy"], spec["trafficDistribution"]) == ("Local", "PreferClose")
    assert chosen["m-s3"]["metadata"]["annotations"] == annotations
    assert {each["spec"]["ipFamilyPolicy"] for each in chosen.values()} == {"PreferDualStack"}
    assert set(chosen["m-nodes"]["spec"]) - set(plain["m-nodes"]["spec"]) == {"ipFamilyPolicy"}


def test_families_of_services_are_those_that_are_chosen() -> None:
    chosen = found(cluster(s3={"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv6"]}), "Service")
    assert [each["spec"]["ipFamilies"] for each in chosen] == [["IPv6"], ["IPv6"]]
    assert all("ipFamilies" not in each["spec"] for each in found(cluster(), "Service"))


def test_daemons_listen_on_both_families_once_a_policy_is_set() -> None:
    def listens(**s3: Any) -> str:
        (settings,) = found(cluster(s3=s3), "ConfigMap")
        return str(yaml.safe_load(settings["data"]["default"])["listen"])

    assert listens() == "0.0.0.0:9000"
    assert listens(ipFamilyPolicy="SingleStack") == "[::]:9000"
    assert listens(ipFamilyPolicy="PreferDualStack", port=9443) == "[::]:9443"
    rolled = [pool(cluster(s3=s3), "s")["spec"]["template"] for s3 in ({}, {"ipFamilyPolicy": "SingleStack"})]
    assert rolled[0] != rolled[1]


def test_settings_say_where_a_node_is() -> None:
    (settings,) = found(cluster(), "ConfigMap")
    assert yaml.safe_load(settings["data"]["k0"])["zone"] == "a"
    assert "zone" not in yaml.safe_load(settings["data"]["k2"])
    assert "/etc/mesh/settings/$(NODE_NAME)" in arguments(cluster(), "s")
    assert "/etc/mesh/settings/default" in arguments(cluster(places=None), "s")


def test_daemons_send_traces_where_the_mesh_says() -> None:
    (settings,) = found(cluster(tracing={"endpoint": "http://collector:4318", "ratio": 0.5}), "ConfigMap")
    told = yaml.safe_load(settings["data"]["k0"])
    assert (told["trace-endpoint"], told["trace-ratio"]) == ("http://collector:4318", 0.5)
    (settings,) = found(cluster(), "ConfigMap")
    assert "trace-endpoint" not in yaml.safe_load(settings["data"]["k0"])


def test_a_mesh_is_founded_with_the_slots_that_it_says() -> None:
    (settings,) = found(cluster(slots=131_072), "ConfigMap")
    assert yaml.safe_load(settings["data"]["k0"])["slots"] == 131_072
    (settings,) = found(cluster(), "ConfigMap")
    assert "slots" not in yaml.safe_load(settings["data"]["k0"])


def test_daemons_serve_the_console_if_the_mesh_says_so() -> None:
    grafana = "https://grafana.example.org"
    (settings,) = found(cluster(console={"enabled": True, "grafana": grafana}), "ConfigMap")
    told = yaml.safe_load(settings["data"]["k0"])
    assert (told["console"], told["console-grafana"]) == ("on", grafana)
    (settings,) = found(cluster(), "ConfigMap")
    assert "console" not in yaml.safe_load(settings["data"]["k0"])


def test_a_pod_may_be_evicted_while_the_mesh_is_settled() -> None:
    for settled, number in ((True, 1), (False, 0)):
        (budget,) = found(cluster(), "PodDisruptionBudget", settled=settled)
        assert budget["spec"]["maxUnavailable"] == number


def test_what_pods_are_made_of_tells_the_outdated_ones() -> None:
    def template(**spec: Any) -> str:
        metadata = pool(cluster(**spec), "s")["spec"]["template"]["metadata"]
        return str(metadata["annotations"][TEMPLATE_ANNOTATION])

    assert template() == template()
    assert template() != template(image="i:2")
    assert template() != template(podTemplate={"metadata": {"labels": {"a": "b"}}})
    assert template() != template(s3={"domains": ["s3.example.com"]}), "settings are read at the start"
    assert template() == template(places=PLACES[:1]), "machines come and go"
    assert template() == template(nodePools=[{**STORE, "replicas": 3}, CACHE])


def test_what_is_laid_over_wins() -> None:
    over = {"spec": {"containers": [{"name": "other"}], "hostNetwork": True}}
    spec = pool(cluster(podTemplate=over), "s")["spec"]["template"]["spec"]
    assert (spec["hostNetwork"], spec["containers"]) == (True, [{"name": "other"}])
    assert spec["securityContext"]["runAsNonRoot"]


def test_everything_goes_with_its_mesh() -> None:
    for each in cluster_manifests(cluster(), settled=True):
        (owner,) = each["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("MeshCluster", "uid")
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "shardmesh"
