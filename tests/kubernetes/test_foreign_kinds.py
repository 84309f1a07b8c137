"""Objects of cert-manager and the Prometheus Operator that chart, operator and docs make, judged by models of
these projects' definitions: types, patterns, what is required; and fields that are unknown."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import yaml

from meshoperator.cluster_model import Cluster
from meshoperator.planners.manifests import cluster_manifests
from meshoperator.resources import MeshClusterSpec, parse
from tests.kubernetes.control_plane import ROOT
from tests.kubernetes.test_chart import rendered
from tests.kubernetes.world import mesh_cluster
from tests.support.required import required_module

pydantic = required_module("pydantic")
MODELS = {
    "cert-manager.io/v1": "cloudcoil.models.cert_manager.v1",
    "monitoring.coreos.com/v1": "cloudcoil.models.prometheus_operator.v1",
}
MONITORED = {"monitoring": {"serviceMonitor": True, "labels": {"release": "p"}}}
VALUES: dict[str, dict[str, Any]] = {
    "self-signed": MONITORED | {"webhook": {"certificates": {"source": "cert-manager"}}},
    "issued": {
        "webhook": {"certificates": {"source": "cert-manager", "issuerRef": {"name": "i", "kind": "Issuer"}}}
    },
}


def check(document: dict[str, Any]) -> None:
    """Raises pydantic.ValidationError, and ValueError for a field that is unknown."""
    name = MODELS[document["apiVersion"]]
    model = getattr(required_module(name), document["kind"])
    found = model.model_validate(document, strict=True).model_dump(
        by_alias=True, exclude_unset=True, mode="json"
    )
    kept, given = (
        {name: value for name, value in each.items() if name != "metadata"} for each in (found, document)
    )
    if kept != given:
        raise ValueError(f"unknown fields: {kept} of {given}")


@cache
def of_the_chart(name: str) -> list[dict[str, Any]]:
    apis = ("ServiceMonitor", "PrometheusRule")
    flags = [flag for api in apis for flag in ("--api-versions", f"monitoring.coreos.com/v1/{api}")]
    return [each for each in rendered(VALUES[name], *flags) if each["apiVersion"] in MODELS]


def of_the_operator(**spec: Any) -> list[dict[str, Any]]:
    whole = parse(MeshClusterSpec, mesh_cluster(1, metrics={"serviceMonitor": True}, **spec)["spec"])
    cluster = Cluster("mesh", "ns", "uid", whole)
    return [each for each in cluster_manifests(cluster, settled=True) if each["apiVersion"] in MODELS]


def of_the_docs() -> list[dict[str, Any]]:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    return [each for each in blocks if each.get("apiVersion") in MODELS]


def test_what_the_chart_makes() -> None:
    kinds = set()
    for values in VALUES:
        for document in of_the_chart(values):
            check(document)
            kinds.add(document["kind"])
    assert kinds == {"Certificate", "Issuer", "ServiceMonitor", "PrometheusRule"}


def test_what_the_operator_and_the_docs_make() -> None:
    plain, secured = of_the_operator(), of_the_operator(s3={"tls": {"secretRef": {"name": "t"}}})
    assert [each["kind"] for each in (*plain, *secured)] == ["ServiceMonitor"] * 2
    assert [each["kind"] for each in of_the_docs()] == ["Certificate"]
    for document in (*plain, *secured, *of_the_docs()):
        check(document)


def test_what_is_wrong_is_found() -> None:
    (monitor,), (certificate,) = of_the_operator(), of_the_docs()
    rules = next(each for each in of_the_chart("self-signed") if each["kind"] == "PrometheusRule")
    wrong: list[tuple[dict[str, Any], list[Any], Any]] = [
        (monitor, ["spec", "endpoints", 0, "interval"], "soon"),
        (monitor, ["spec", "endpoints", 0, "intervall"], "15s"),
        (monitor, ["spec", "selector"], None),
        (certificate, ["spec", "secretName"], 3),
        (certificate, ["spec", "dnsName"], "a"),
        (rules, ["spec", "groups", 0, "rules", 0, "for"], "long"),
    ]
    for document, (*path, last), value in wrong:
        broken = copy.deepcopy(document)
        place: Any = broken
        for each in path:
            place = place[each]
        place[last] = value
        with pytest.raises(ValueError, match=r"validation error|unknown fields"):
            check(broken)
