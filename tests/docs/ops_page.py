"""The generated part of docs/ops.md; run as a program it writes it.

make reference
"""

from __future__ import annotations

from pathlib import Path

from meshd.transform.op_docs import render_reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ops.md"
BEGIN, END = "<!-- begin: written by tests/docs/ops_page.py -->\n", "<!-- end -->"


def written(page: str) -> str:
    """The page with its generated part as the registry has it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"docs/ops.md has lost its mark {BEGIN!r}"
    assert end, f"docs/ops.md has lost its mark {END!r}"
    return f"{before}{begin}\n{render_reference()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
