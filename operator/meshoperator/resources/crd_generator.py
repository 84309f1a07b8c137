"""CustomResourceDefinitions generated from the typed specs, and their reference page. Pure.

Law: a kind has one schema, generated here: structural, with the specs' defaults, CEL rules and a description
on every field. The reference page comes from the same schema.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from meshoperator.resources import GROUP, KINDS, VERSION
from meshoperator.resources.spec_types import Part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meshoperator.resources.spec_types import Column, Kind, Rule


HEADER: Final = "# Generated from operator/meshoperator/resources by `make reference`; do not edit.\n"
_WITHIN: Final = ("items", "additionalProperties")
_TYPES: Final = {bool: "boolean", int: "integer", str: "string"}


def crds() -> dict[str, str]:
    """Return the definitions as YAML, by file name."""
    return {
        f"{kind.plural}.yaml": HEADER
        + yaml.safe_dump(definition(kind), sort_keys=False, width=110, allow_unicode=True)
        for kind in KINDS
    }


def definition(kind: Kind) -> dict[str, Any]:
    """Return the CustomResourceDefinition of a kind."""
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
    """Return the schema of the whole object."""
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
    """Complete defaults of objects by the defaults inside them: the API server does not, and evaluates rules
    over them."""
    properties = node.get("properties", {})
    for each in (*properties.values(), *(node[key] for key in _WITHIN if isinstance(node.get(key), dict))):
        _with_defaults(each)
    if properties and isinstance(node.get("default"), dict):
        inner = {name: each["default"] for name, each in properties.items() if "default" in each}
        node["default"] = inner | node["default"]
    return node


def _without_defaults(node: dict[str, Any]) -> dict[str, Any]:
    """Drop defaults: a status contains only what was observed."""
    node.pop("default", None)
    within = [node[key] for key in _WITHIN if isinstance(node.get(key), dict)]
    for each in (*node.get("properties", {}).values(), *within):
        _without_defaults(each)
    return node


class _Schemas:
    """Turns msgspec's JSON schema into Kubernetes' structural schema, without references and null."""

    def __init__(self, part: type[Part]) -> None:
        (self._root,), self._parts = msgspec.json.schema_components([part], ref_template="{name}")
        self._rules = {each.__name__: each.rules for each in _subclasses(Part)}

    def root(self) -> dict[str, Any]:
        return self._structural(self._root)

    def _structural(self, node: Mapping[str, Any]) -> dict[str, Any]:
        node = self._inline_reference(node)
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

    def _inline_reference(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return `node` with its reference inlined; its own keywords override."""
        found = {key: value for key, value in node.items() if key not in ("anyOf", "allOf", "$ref")}
        every = chain(node.get("anyOf", ()), node.get("allOf", ()))
        others = [each for each in every if each != {"type": "null"}]
        if "$ref" in node:
            others.append({"$ref": node["$ref"]})
        for other in others:
            name = other.get("$ref")
            if name is None:
                found = self._inline_reference(other) | found
            else:
                found = self._parts[name] | _validations(self._rules[name]) | found
        return found


_DROPPED: Final = ("title", "prefixItems")


def _subclasses(part: type[Part]) -> Iterator[type[Part]]:
    yield part
    for each in part.__subclasses__():
        yield from _subclasses(each)


_HEAD: Final = f"""# Custom resources

The resources of `{GROUP}/{VERSION}`, generated from the operator's own types by `make reference`. All are
namespaced and in the category `mesh`: `kubectl get mesh` shows them together. **bold**: required.
*set once*: cannot be changed later. `helm/examples/` has an example of each.
"""


def reference() -> str:
    """Return the whole page."""
    return "\n".join([_HEAD, *(line for kind in KINDS for line in _kind(kind))])


def _kind(kind: Kind) -> Iterator[str]:
    whole = schema(kind)
    columns = ", ".join(column.name + (" (wide)" if column.wide else "") for column in kind.columns)
    yield f"## {kind.name}\n"
    yield f"{kind.summary} Short name `{kind.short}`. Columns: {columns}.\n"
    yield from _rules("", whole)
    for part in ("spec", "status"):
        yield f"| `{part}` | type | default | |"
        yield "|---|---|---|---|"
        yield from _fields("", whole["properties"][part])
        yield ""
        yield from _rules(part, whole["properties"][part])


def _fields(path: str, node: dict[str, Any]) -> Iterator[str]:
    needed = node.get("required", ())
    for name, each in node.get("properties", {}).items():
        full = f"{path}.{name}" if path else name
        shown = f"**`{full}`**" if name in needed else f"`{full}`"
        yield f"| {shown} | {_type(each)} | {_default(each)} | {_words(each)} |"
        if name == "conditions":
            continue  # those of metav1.Condition
        inner, suffix = (each["items"], "[]") if each.get("type") == "array" else (each, "")
        yield from _fields(full + suffix, inner)


def _type(node: dict[str, Any]) -> str:
    if "enum" in node:
        return " · ".join(f"`{value}`" for value in node["enum"])
    if node["type"] == "array":
        return f"list of {_type(node['items'])}"
    if node["type"] == "object" and "properties" not in node:
        return "map" if "additionalProperties" in node else "any object"
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f"{low}–{high}"
    return f"integer ≥ {low}" if low is not None else str(node["type"])


def _default(node: dict[str, Any]) -> str:
    value = node.get("default")
    if value is None or value in ([], {}) or isinstance(value, dict):
        return ""
    if isinstance(value, list):
        return ", ".join(f"`{each}`" for each in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _words(node: dict[str, Any]) -> str:
    once = any(rule["rule"] == "self == oldSelf" for rule in node.get("x-kubernetes-validations", ()))
    text = node.get("description", "").replace("|", "\\|").replace("\n", " ")
    return f"{text} *set once*" if once else text


def _rules(path: str, node: dict[str, Any]) -> Iterator[str]:
    found = list(_messages(path, node))
    if found:
        yield "Also rejected:\n"
        yield from (f"- {message}" for message in found)
        yield ""


def _messages(path: str, node: dict[str, Any]) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", ()):
        if rule["rule"] != "self == oldSelf":
            yield rule["message"]
    if not path:
        return  # the object's own parts need no words
    for name, each in node.get("properties", {}).items():
        yield from _messages(f"{path}.{name}", each)
        if isinstance(each.get("items"), dict):
            yield from _messages(f"{path}.{name}[]", each["items"])
