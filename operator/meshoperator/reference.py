"""The reference page of the custom resources, made of the same schemas as their definitions. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshoperator.crds import schema
from meshoperator.resources import GROUP, KINDS, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshoperator.resources.common import Kind

_HEAD: Final = f"""# Custom resources

The resources of `{GROUP}/{VERSION}`, made of the operator's own types by `make reference`. All are
namespaced and in the category `mesh`: `kubectl get mesh` shows them together. **bold**: has to be given.
*set once*: cannot be changed later. An example of each is in `helm/examples/`.
"""


def reference() -> str:
    """The whole page."""
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
            continue  # as metav1.Condition has them
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
        yield "Refused, besides what the types refuse:\n"
        yield from (f"- {message}" for message in found)
        yield ""


def _messages(path: str, node: dict[str, Any]) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", ()):
        if rule["rule"] != "self == oldSelf":
            yield rule["message"]
    if not path:
        return  # the parts of the object speak for themselves
    for name, each in node.get("properties", {}).items():
        yield from _messages(f"{path}.{name}", each)
        if isinstance(each.get("items"), dict):
            yield from _messages(f"{path}.{name}[]", each["items"])
