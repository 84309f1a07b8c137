"""The table of docs/sources.md: all kinds of source, and of each a test that opens one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshsdk.open_dataset import KINDS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "sources.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in PAGE.splitlines() if "`tests/" in line
]


def test_every_kind_has_a_row() -> None:
    told = {kind for row in ROWS for kind in re.findall(r"`(\w+)`", row[1])}
    assert told | {"auto"} == set(KINDS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:30])
def test_every_row_has_a_test_that_opens_such_a_source(row: list[str]) -> None:
    (path,) = re.findall(r"`(tests/[\w/]+\.py)`", row[-1])
    text = (ROOT / path).read_text()
    assert re.search(r"\bopen(_\w+)?\(", text)
    assert "def test_" in text
    for kind in re.findall(r"`(\w+)`", row[1]):
        assert kind in ("objects", "tar") or f'kind="{kind}"' in text or f'"{kind}"' in text
