"""The custom resources: what is made of their types is up to date, examples are whole, errors name fields."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from meshoperator.resources import (
    KINDS,
    MeshCluster,
    MeshClusterSpec,
    MeshViewSpec,
    ResourceError,
    parse,
    plain,
)
from meshoperator.resources.crd_generator import definition

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
from kubernetes_pages import ROOT, pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshoperator.resources import Kind

EXAMPLES = ROOT / "helm" / "examples"


def example(kind: Kind) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{kind.name.lower()}.yaml").read_text())
    return document


@pytest.mark.parametrize(("path", "text"), pages().items(), ids=lambda value: getattr(value, "name", ""))
def test_what_is_generated_is_up_to_date(path: Path, text: str) -> None:
    assert path.read_text() == text, f"{path.name} is stale: run `make reference`"


def test_nothing_else_lies_among_the_crds() -> None:
    folder = ROOT / "helm" / "shardmesh" / "crds"
    assert {path for path in pages() if path.parent == folder} == set(folder.iterdir())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_has_an_example_that_is_understood(kind: Kind) -> None:
    document = example(kind)
    assert document["kind"] == kind.name
    spec = parse(kind.spec, document["spec"])
    assert parse(kind.spec, plain(spec)) == spec


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_schemas_are_structural_and_say_what_fields_are(kind: Kind) -> None:
    version = definition(kind)["spec"]["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    for part in ("spec", "status"):
        for path, node in _nodes(part, root["properties"][part]):
            assert not {"$ref", "anyOf", "allOf", "nullable", "title"} & node.keys(), path
            assert "type" in node, path
            assert "[]" in path or "{}" in path or node.get("description"), f"{path} has no description"
            assert part == "spec" or "default" not in node, f"{path}: a status has no defaults"
            bounded = {"array": "maxItems"}.get(node["type"])
            assert bounded is None or bounded in node, f"{path}: CEL's costs want {bounded}"
    assert version["subresources"] == {"status": {}}
    for column in version["additionalPrinterColumns"]:
        assert _is_there(root, column["jsonPath"]), column


def test_errors_name_the_field() -> None:
    spec = example(MeshCluster)["spec"]
    with pytest.raises(ResourceError, match=r"Expected `int` <= 8.*clusterspec\.copies"):
        parse(MeshClusterSpec, spec | {"copies": 9})
    with pytest.raises(ResourceError, match=r"Invalid enum value 40000.*clusterspec\.slots"):
        parse(MeshClusterSpec, spec | {"slots": 40_000})
    with pytest.raises(ResourceError, match="missing required field `nodePools`"):
        parse(MeshClusterSpec, {"image": "x"})


def test_a_view_is_the_document_that_daemons_take() -> None:
    spec: dict[str, Any] = {
        "clusterRef": "m",
        "bucket": "photos",
        "kind": "shards",
        "definition": {"count": 7},
    }
    assert parse(MeshViewSpec, spec).document() == {"kind": "shards", "count": 7}
    spec = {"clusterRef": "m", "bucket": "photos", "kind": "transform", "ops": [{"op": "decode"}]}
    assert parse(MeshViewSpec, spec).document() == {"kind": "transform", "ops": [{"op": "decode"}]}


def _nodes(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, each in node.get("properties", {}).items():
        yield from _nodes(f"{path}.{name}", each)
    for key, suffix in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(node.get(key), dict):
            yield from _nodes(path + suffix, node[key])


def _is_there(root: dict[str, Any], path: str) -> bool:
    node = root
    for step in path.removeprefix(".").split("[?")[0].split("."):
        if step == "creationTimestamp":
            return True
        if step not in node.get("properties", {}) and step != "metadata":
            return False
        node = node["properties"].get(step, {"properties": {}})
    return True
