"""The chart with the real helm: rendered over a matrix of values, judged by an API server; its refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.kubernetes.control_plane import ROOT
from tests.kubernetes.helm_binary import helm
from tests.kubernetes.releases import copied_chart

sys.path.insert(0, str(ROOT / "tests" / "docs"))
from values_page import PAGE, page

if TYPE_CHECKING:
    from pathlib import Path

    from lightkube import Client

CHART = ROOT / "helm" / "shardmesh"
MESH = {
    "cluster": {
        "create": True,
        "spec": yaml.safe_load((ROOT / "helm/examples/meshcluster.yaml").read_text())["spec"],
    }
}
MATRIX: dict[str, dict[str, Any]] = {
    "default": {},
    "namespaced": {"scope": "namespaced", "watchNamespaces": ["a", "b"]},
    "mesh": MESH | {"ingress": {"enabled": True, "host": "s3.example.com", "tlsSecretName": "s3-tls"}},
    "cert-manager": {"webhook": {"certificates": {"source": "cert-manager"}}},
    "own certificate": {
        "webhook": {"certificates": {"source": "secret", "secretName": "w", "caBundle": "QQ=="}}
    },
    "no webhook": {"webhook": {"enabled": False}, "operator": {"podDisruptionBudget": True}},
    "pinned": {
        "operator": {
            "image": {"repository": "r/o", "digest": "sha256:" + "0" * 64},
            "imagePullSecrets": [{"name": "k"}],
        },
        "priorityClass": {"create": True},
        "commonLabels": {"team": "data"},
    },
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"opertor": {}}, "additional properties"),
    ({"operator": {"image": {"repository": "r", "digest": "sha256:12"}}}, "does not match pattern"),
    ({"scope": "galaxy"}, "must be one of"),
    ({"webhook": {"certificates": {"source": "secret"}}}, "minLength"),
    ({"cluster": {"create": True}}, "nodePools"),
    ({"cluster": {"name": "Mesh"}}, "does not match pattern"),
    ({"ingress": {"enabled": True}}, "minLength"),
    ({"webhook": {"timeoutSeconds": 31}}, "maximum"),
]


def rendered(values: dict[str, Any], *flags: str) -> list[dict[str, Any]]:
    done = run("template", "mesh", CHART, "--namespace", "ns", "--values", "-", *flags, given=values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def run(*argv: object, given: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    command = [helm(), *map(str, argv)]
    return subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, check=False, timeout=100
    )


@cache
def documents(name: str) -> list[dict[str, Any]]:
    return rendered(MATRIX[name])


def test_the_page_of_values_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "helm/shardmesh/README.md is stale: run `make reference`"


def test_every_value_is_in_the_schema_and_the_other_way_round() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    _same("", schema, schema, yaml.safe_load((CHART / "values.yaml").read_text()))


def test_helm_has_nothing_to_say() -> None:
    done = run("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda value: str(value)[:50])
def test_wrong_values_are_refused(values: dict[str, Any], words: str) -> None:
    done = run("template", "mesh", CHART, "--values", "-", given=values)
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize("name", MATRIX)
def test_pods_are_restricted_and_labelled(name: str) -> None:
    found = documents(name)
    pods = [pod for each in found for pod in _pods(each)]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod.get("hostNetwork")
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert "memory" in container["resources"]["limits"]
            assert ":latest" not in container["image"]
    for each in found:
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "shardmesh", each["kind"]
    names = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in found]
    assert len(names) == len(set(names))


def test_an_operator_leaves_a_lost_machine_soon_and_several_are_apart() -> None:
    mine = {"key": "mine", "operator": "Exists"}
    values = {"operator": {"tolerations": [mine], "replicas": 2, "lostNodeSeconds": 20}}
    (one,) = (each["spec"] for each in documents("default") if each["kind"] == "Deployment")
    (two,) = (each["spec"] for each in rendered(values) if each["kind"] == "Deployment")
    assert (one["replicas"], two["replicas"]) == (1, 2)
    lost = [
        {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute"}
        for why in ("not-ready", "unreachable")
    ]
    pods = one["template"]["spec"], two["template"]["spec"]
    assert pods[0]["tolerations"] == [each | {"tolerationSeconds": 30} for each in lost]
    assert pods[1]["tolerations"] == [mine, *(each | {"tolerationSeconds": 20} for each in lost)]
    assert "affinity" not in pods[0]
    (term,) = pods[1]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    chosen = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert chosen.items() <= two["template"]["metadata"]["labels"].items()


def test_an_operator_listens_on_both_families() -> None:
    """Kubelets and API server reach it in a cluster of either, with the chart's defaults."""

    def told(policy: str | None) -> tuple[set[str], Any]:
        found = rendered({"operator": {"ipFamilyPolicy": policy}})
        (pod,) = (each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment")
        (service,) = (each["spec"] for each in found if each["kind"] == "Service")
        env = {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}
        names = ("HEALTH", "METRICS", "WEBHOOK")
        hosts = {env[f"MESH_OPERATOR_{name}"].rpartition(":")[0] for name in names}
        return hosts, service.get("ipFamilyPolicy")

    assert told("") == ({"[::]"}, None)
    assert told(None) == ({"[::]"}, None), "as after an upgrade with --reuse-values from an earlier chart"
    assert told("PreferDualStack") == ({"[::]"}, "PreferDualStack")


def test_a_namespaced_operator_has_no_rights_of_the_cluster() -> None:
    found = documents("namespaced")
    assert not {"ClusterRole", "ClusterRoleBinding"} & {each["kind"] for each in found}
    assert {each["metadata"]["namespace"] for each in found if each["kind"] == "Role"} == {"a", "b", "ns"}


def test_an_operator_may_hold_its_lease_in_a_namespace_without_meshes() -> None:
    found = documents("namespaced")
    (pod,) = (each["spec"]["template"]["spec"] for each in found if each["kind"] == "Deployment")
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    namespace = env["MESH_OPERATOR_LEASE_NAMESPACE"]
    there = [each for each in found if each["metadata"].get("namespace") == namespace]
    (role,) = (each for each in there if each["kind"] == "Role")
    lease = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "update"],
    }
    assert role["rules"] == [lease], "and nothing else"
    (binding,) = (each for each in there if each["kind"] == "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = {"kind": "ServiceAccount", "name": pod["serviceAccountName"], "namespace": namespace}
    assert binding["subjects"] == [account]
    own = [each for each in rendered({"scope": "namespaced"}) if each["kind"] == "Role"]
    assert sorted(each["metadata"]["name"] for each in own) == [
        "mesh-shardmesh-daemon",
        "mesh-shardmesh-operator",
    ]


@pytest.mark.parametrize("name", MATRIX)
def test_no_rights_are_given_wholesale(name: str) -> None:
    for each in documents(name):
        for rule in each.get("rules", ()) if each["kind"] in ("Role", "ClusterRole") else ():
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
            assert (
                "secrets" not in rule["resources"]
                or "operator" not in each["metadata"]["name"]
                or "list" not in rule["verbs"]
            )


@pytest.mark.parametrize(
    ("example", "prefix"),
    [
        ("values-ingress.yaml", "nginx.ingress.kubernetes.io/"),
        ("values-ingress-nginxinc.yaml", "nginx.org/"),
    ],
)
def test_the_examples_of_an_ingress_become_one(example: str, prefix: str) -> None:
    """Each is for one controller, and has what streams bodies."""
    values = yaml.safe_load((ROOT / "helm" / "examples" / example).read_text())
    (made,) = (each for each in rendered(MESH | values) if each["kind"] == "Ingress")
    annotations = made["metadata"]["annotations"]
    assert {name.partition("/")[0] + "/" for name in annotations} == {prefix}
    assert annotations[f"{prefix}proxy-buffering"].lower() in ("off", "false")
    said = str(annotations).replace("-", "_")  # annotations, or directives of nginx
    assert "proxy_request_buffering" in said
    assert "proxy_next_upstream" in said
    (rule,) = made["spec"]["rules"]
    assert made["spec"]["tls"] == [
        {"hosts": [rule["host"]], "secretName": values["ingress"]["tlsSecretName"]}
    ]


def test_what_depends_on_other_apis_comes_with_them() -> None:
    values = {"monitoring": {"serviceMonitor": True}, "operator": {"podDisruptionBudget": True}}
    without = {(each["kind"], each["apiVersion"]) for each in rendered(values, "--kube-version", "1.25.0")}
    assert not {kind for kind, _ in without} & {"ServiceMonitor", "PrometheusRule"}
    apis = ["monitoring.coreos.com/v1/ServiceMonitor", "monitoring.coreos.com/v1/PrometheusRule"]
    flags = [flag for api in apis for flag in ("--api-versions", api)]
    found = {(each["kind"], each["apiVersion"]) for each in rendered(values, *flags)}
    assert ("ServiceMonitor", "monitoring.coreos.com/v1") in found
    assert ("PodDisruptionBudget", "policy/v1") in found


def test_a_change_of_values_rolls_the_operator() -> None:
    def checksum(values: dict[str, Any]) -> str:
        (found,) = (each for each in rendered(values) if each["kind"] == "Deployment")
        return str(found["spec"]["template"]["metadata"]["annotations"]["checksum/values"])

    assert checksum({}) == checksum({"commonLabels": {"a": "b"}})
    assert checksum({}) != checksum({"operator": {"logLevel": "debug"}})


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """As it is, but for old API servers, too, and without the definitions, which are there already (the test
    plane's are on a server of their own, and its main one knows no CEL)."""
    return copied_chart(tmp_path)


@pytest.mark.parametrize("name", ["default", "namespaced", "mesh", "no webhook"])
def test_an_api_server_takes_it(kubeconfig: Path, namespace: str, name: str, chart: Path) -> None:
    values = MATRIX[name] | ({"watchNamespaces": [namespace]} if name == "namespaced" else {})
    place = ["--namespace", namespace, "--kubeconfig", kubeconfig]
    installed = run("install", "mesh", chart, *place, "--values", "-", given=values)
    assert installed.returncode == 0, installed.stderr
    try:
        upgraded = run(
            "upgrade",
            "mesh",
            chart,
            *place,
            "--values",
            "-",
            "--set",
            "operator.logLevel=debug",
            given=values,
        )
        assert upgraded.returncode == 0, upgraded.stderr
    finally:
        removed = run("uninstall", "mesh", *place)
    assert removed.returncode == 0, removed.stderr


def test_an_api_server_lets_it_hold_its_lease_beside_its_meshes(
    kubeconfig: Path, kube: Client, namespace: str, chart: Path
) -> None:
    from lightkube.models.authorization_v1 import ResourceAttributes, SubjectAccessReviewSpec
    from lightkube.resources.authorization_v1 import SubjectAccessReview

    def may(verb: str, group: str, resource: str, there: str) -> bool:
        what = ResourceAttributes(group=group, namespace=there, resource=resource, verb=verb)
        who = f"system:serviceaccount:{namespace}:mesh-shardmesh-operator"
        asked = SubjectAccessReview(spec=SubjectAccessReviewSpec(resourceAttributes=what, user=who))
        answer = kube.create(asked).status
        return answer is not None and answer.allowed

    values = {"scope": "namespaced", "watchNamespaces": ["default"]}
    place = ["--namespace", namespace, "--kubeconfig", kubeconfig]
    installed = run("install", "mesh", chart, *place, "--values", "-", given=values)
    assert installed.returncode == 0, installed.stderr
    try:
        assert all(
            may(verb, "coordination.k8s.io", "leases", namespace) for verb in ("get", "create", "update")
        )
        assert may("get", "", "secrets", "default")
        assert not may("get", "", "secrets", namespace), "there are no meshes"
    finally:
        assert run("uninstall", "mesh", *place).returncode == 0


def test_the_certificate_is_kept_over_upgrades(
    kubeconfig: Path, kube: Client, namespace: str, chart: Path
) -> None:
    from lightkube.resources.core_v1 import Secret

    place = ["--namespace", namespace, "--kubeconfig", kubeconfig]
    assert run("install", "mesh", chart, *place).returncode == 0
    try:
        before = kube.get(Secret, "mesh-shardmesh-webhook-tls", namespace=namespace).data
        assert run("upgrade", "mesh", chart, *place, "--set", "operator.logLevel=debug").returncode == 0
        assert kube.get(Secret, "mesh-shardmesh-webhook-tls", namespace=namespace).data == before
    finally:
        assert run("uninstall", "mesh", *place).returncode == 0


def _pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    if document["kind"] == "Pod":
        return [document["spec"]]
    template = document.get("spec", {}).get("template") if document["kind"] == "Deployment" else None
    return [template["spec"]] if template else []


def _same(path: str, node: dict[str, Any], root: dict[str, Any], value: Any) -> None:
    found = {**root["definitions"][node["$ref"].rsplit("/", 1)[1]], **node} if "$ref" in node else node
    if "properties" not in found:
        assert found.get("description"), f"{path} has no description"
        return
    known = set(found["properties"]) - {"global"}
    assert known == set(value), path
    for name in known:
        _same(f"{path}.{name}", found["properties"][name], root, value[name])
