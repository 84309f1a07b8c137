"""Documentation of the op library: JSON for the API and the `mesh op` command, Markdown for docs/ops.md.

Law: all content comes from the registry, so page, command and node agree.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from meshd.transform import op_chain, registry
from meshwire.plan.op_declarations import is_user_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.transform.parameters import Parameter
    from meshd.transform.registry import OpDefinition

assert op_chain  # importing it registers the built-in ops

HEADINGS = {
    "decode": "Images",
    "encode": "Images",
    "resize": "Images",
    "geometry": "Images",
    "right_angles": "Images",
    "augmentation": "Images",
    "mixup": "Images, mixed within a batch",
    "annotations": "Boxes and keypoints",
    "sound": "Sound",
    "spectra": "Sound",
    "video": "Video",
    "text": "Text",
    "token_sequences": "Text",
    "chat": "Text",
    "array_files": "Arrays",
    "zarr_rows": "Arrays",
    "zarr_windows": "Arrays",
    "dicom": "Medical images",
    "nifti": "Medical images",
    "slides": "Medical images",
    "array_ops": "Arrays",
    "labels": "Labels",
}
"""Headings of the reference by module; a module without an entry has its own name as the heading."""


def list_ops(more: Sequence[OpDefinition] = ()) -> list[dict[str, Any]]:
    """Return a short description of the latest version of every op, sorted by name, then of `more`."""
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


def describe_op(found: OpDefinition) -> dict[str, Any]:
    """Return the full description of an op, as plain JSON values."""
    return {
        "op": found.name,
        "version": found.version,
        "versions": [found.version] if is_user_op(found.name) else registry.versions(found.name),
        "summary": found.summary,
        "takes": found.takes,
        "gives": found.gives,
        "refuses": found.refuses,
        "random": found.random,
        "mixes": found.is_mixing,
        "arguments": [_argument(parameter) for parameter in found.parameters],
        **({"inputs": list(found.inputs)} if found.is_multi_field else {}),
    }


def _argument(parameter: Parameter) -> dict[str, Any]:
    told: dict[str, Any] = {"name": parameter.name, "kind": parameter.kind, "required": parameter.required}
    return told if parameter.required else told | {"default": parameter.default}


def render_reference() -> str:
    """Return the generated part of docs/ops.md."""
    by_heading: dict[str, list[OpDefinition]] = {}
    order = list(HEADINGS)
    found = sorted(
        registry.latest(),
        key=lambda op: order.index(op.subject) if op.subject in HEADINGS else len(order),
    )
    for op in found:
        by_heading.setdefault(HEADINGS.get(op.subject, op.subject.capitalize()), []).append(op)
    return "\n".join(f"### {heading}\n\n{_table(ops)}\n" for heading, ops in by_heading.items())


def _table(ops: Sequence[OpDefinition]) -> str:
    lines = ["| op | takes → gives | arguments | a sample is bad when |", "|---|---|---|---|"]
    for op in ops:
        arguments = "<br>".join(map(_parameter_cell, op.parameters)) or "–"
        cells = (f"`{op.name}` {_version(op)}", f"{op.takes} → {op.gives}", arguments, op.refuses or "–")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", *(f"- `{op.name}`: {op.summary}" for op in ops)]
    return "\n".join(lines)


def _version(op: OpDefinition) -> str:
    return op.version + (" (random)" if op.random else "")


def _parameter_cell(parameter: Parameter) -> str:
    default = "" if parameter.required else f" = {json.dumps(parameter.default, ensure_ascii=False)}"
    return f"`{parameter.name}{default}`: {parameter.kind}"
