"""The op library as its users meet it: plain values for the wire, and the reference of docs/ops.md.

Law: nothing is told here that the registry does not say, so that page, `mesh op` and node agree.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from meshd.transform import chains, registry
from meshwire.declarations import is_user_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.transform.parameters import Parameter
    from meshd.transform.registry import OpDefinition

assert chains  # importing it registers the built-in ops

SUBJECTS = {
    "decoding": "Images",
    "resizing": "Images",
    "flipping": "Images",
    "geometry": "Images",
    "colours": "Images",
    "policies": "Images",
    "mixing": "Images, mixed within a batch",
    "layouts": "Images",
    "encoding": "Images",
    "texts": "Text",
    "tokens": "Text",
    "sequences": "Text",
    "arrays": "Arrays",
    "containers": "Arrays",
    "zarrs": "Arrays",
    "features": "Arrays",
    "windows": "Arrays",
    "columns": "Arrays",
    "casting": "Arrays",
    "labels": "Labels",
}
"""Headings of the reference by module; one that is missing has its own name as the heading."""


def library(more: Sequence[OpDefinition] = ()) -> list[dict[str, Any]]:
    """Every op in its latest version, by name, in short; then `more`."""
    return [
        {
            "op": found.name,
            "version": found.version,
            "summary": found.summary,
            "takes": found.takes,
            "gives": found.gives,
            "arguments": [parameter.name for parameter in found.parameters],
        }
        for found in (*registry.latest(), *more)
    ]


def describe(found: OpDefinition) -> dict[str, Any]:
    """All there is to know about an op, as plain JSON values."""
    return {
        "op": found.name,
        "version": found.version,
        "versions": [found.version] if is_user_op(found.name) else registry.versions(found.name),
        "summary": found.summary,
        "takes": found.takes,
        "gives": found.gives,
        "refuses": found.refuses,
        "random": found.random,
        "mixes": found.mixes,
        "arguments": [_argument(parameter) for parameter in found.parameters],
        **({"inputs": list(found.inputs)} if found.joins else {}),
    }


def _argument(parameter: Parameter) -> dict[str, Any]:
    told: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind, "required": parameter.required}
    return told if parameter.required else told | {"default": parameter.default}


def reference() -> str:
    """The generated part of docs/ops.md."""
    by_heading: dict[str, list[OpDefinition]] = {}
    order = list(SUBJECTS)
    found = sorted(
        registry.latest(),
        key=lambda op: order.index(op.subject) if op.subject in SUBJECTS else len(order),
    )
    for op in found:
        by_heading.setdefault(SUBJECTS.get(op.subject, op.subject.capitalize()), []).append(op)
    return "\n".join(f"### {heading}\n\n{_table(ops)}\n" for heading, ops in by_heading.items())


def _table(ops: Sequence[OpDefinition]) -> str:
    lines = ["| op | takes → gives | arguments | a sample is bad when |", "|---|---|---|---|"]
    for op in ops:
        arguments = "<br>".join(map(_told, op.parameters)) or "–"
        cells = (f"`{op.name}` {_version(op)}", f"{op.takes} → {op.gives}", arguments, op.refuses or "–")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", *(f"- `{op.name}`: {op.summary}" for op in ops)]
    return "\n".join(lines)


def _version(op: OpDefinition) -> str:
    return op.version + (" (draws)" if op.random else "")


def _told(parameter: Parameter) -> str:
    default = "" if parameter.required else f" = {json.dumps(parameter.default, ensure_ascii=False)}"
    return f"`{parameter.name}{default}`: {parameter.kind}"
