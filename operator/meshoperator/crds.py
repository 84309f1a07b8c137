"""The CustomResourceDefinitions, made of the typed specs. Pure.

Law: a kind has one schema, and this makes it: structural, defaults where the specs have them, CEL where the
specs have rules, a description everywhere.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from meshoperator.resources import GROUP, KINDS, VERSION
from meshoperator.resources.common import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshoperator.resources.common import Column, Kind, Rule

HEADER: Final = "# Made of operator/meshoperator/resources by `make reference`; not to be edited.\n"
_WITHIN: Final = ("items", "additionalProperties")
_TYPES: Final = {bool: "boolean", int: "integer", str: "string"}


def crds() -> dict[str, str]:
    """File name → the definition as YAML."""
    return {
        f"{kind.plural}.yaml": HEADER
        + yaml.safe_dump(definition(kind), sort_keys=False, width=110, allow_unicode=True)
        for kind in KINDS
    }


def definition(kind: Kind) -> dict[str, Any]:
    """The CustomResourceDefinition of a kind."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{GROUP}",
            "annotations": {"helm.sh/resource-policy": "keep"},
            "labels": {"app.kubernetes.io/part-of": "shardmesh"},
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": ["mesh"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    "schema": {"openAPIV3Schema": schema(kind)},
                }
            ],
        },
    }


def schema(kind: Kind) -> dict[str, Any]:
    """The whole object's schema."""
    spec = _with_defaults(_Schemas(kind.spec).root())
    status = _without_defaults(_Schemas(kind.status).root())
    whole: dict[str, Any] = {
        "description": kind.summary,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
    return whole | _validations(kind.rules)


def _column(column: Column) -> dict[str, Any]:
    found = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return found | ({"priority": 1} if column.wide else {})


def _validations(rules: tuple[Rule, ...]) -> dict[str, Any]:
    return {"x-kubernetes-validations": [rule._asdict() for rule in rules]} if rules else {}


def _with_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """Rules are judged over defaults, too, which nobody completes by the ones within: it is done here."""
    properties = node.get("properties", {})
    for each in (*properties.values(), *(node[key] for key in _WITHIN if isinstance(node.get(key), dict))):
        _with_defaults(each)
    if properties and isinstance(node.get("default"), dict):
        inner = {name: each["default"] for name, each in properties.items() if "default" in each}
        node["default"] = inner | node["default"]
    return node


def _without_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """A status says what was seen; what was not seen is not in it."""
    node.pop("default", None)
    within = [node[key] for key in _WITHIN if isinstance(node.get(key), dict)]
    for each in (*node.get("properties", {}).values(), *within):
        _without_defaults(each)
    return node


class _Schemas:
    """JSON schema as msgspec makes it → structural schema as Kubernetes wants it: no references, no null."""

    def __init__(self, part: type[Part]) -> None:
        (self._root,), self._parts = msgspec.json.schema_components([part], ref_template="{name}")
        self._rules = {each.__name__: each.rules for each in _subclasses(Part)}

    def root(self) -> dict[str, Any]:
        return self._structural(self._root)

    def _structural(self, node: Mapping[str, Any]) -> dict[str, Any]:
        node = self._resolved(node)
        found = {key: value for key, value in node.items() if key not in _DROPPED and value is not None}
        if isinstance(node.get("default"), tuple):
            found["default"] = list(node["default"])
        if "enum" in node:
            found = {"type": _TYPES[type(node["enum"][0])], **found}
        if "properties" in node:
            found["properties"] = {name: self._structural(each) for name, each in node["properties"].items()}
        for key in _WITHIN:
            if isinstance(node.get(key), dict):
                found[key] = self._structural(node[key])
        if not found.get("required", True):
            del found["required"]
        return found

    def _resolved(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """`node` with what it refers to within it; words of its own win."""
        found = {key: value for key, value in node.items() if key not in ("anyOf", "allOf", "$ref")}
        every = chain(node.get("anyOf", ()), node.get("allOf", ()))
        others = [each for each in every if each != {"type": "null"}]
        if "$ref" in node:
            others.append({"$ref": node["$ref"]})
        for other in others:
            name = other.get("$ref")
            if name is None:
                found = self._resolved(other) | found
            else:
                found = self._parts[name] | _validations(self._rules[name]) | found
        return found


_DROPPED: Final = ("title", "prefixItems")


def _subclasses(part: type[Part]) -> Iterator[type[Part]]:
    yield part
    for each in part.__subclasses__():
        yield from _subclasses(each)
