"""The generated part of docs/ops.md; run as a program it writes it.

make reference
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from meshd.transform import op_chain, registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.transform.parameters import Parameter
    from meshd.transform.registry import OpDefinition

assert op_chain  # importing it registers the built-in ops

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ops.md"
BEGIN, END = "<!-- begin: written by tests/docs/ops_page.py -->\n", "<!-- end -->"

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


def written(page: str) -> str:
    """The page with its generated part as the registry has it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"docs/ops.md has lost its mark {BEGIN!r}"
    assert end, f"docs/ops.md has lost its mark {END!r}"
    return f"{before}{begin}\n{render_reference()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
