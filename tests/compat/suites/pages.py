"""The suites' part of docs/compatibility.md, and the rows that it is made of.

Law: rows are kept in `kept.json`, so that a run of one suite replaces its own row only. A row is what a run
printed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.compat.conformance.knowing import PASSED, SKIPPED
from tests.compat.homes import ROOT
from tests.compat.suites.catalogue import SUITES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.compat.suites.places import Result

KEPT = Path(__file__).with_name("kept.json")
PAGE = ROOT / "docs" / "compatibility.md"
TITLE = "## Test suites of other projects"
_HEAD = f"""{TITLE}

These run against one node over plain HTTP. They are tests that other projects wrote for themselves,
unmodified and at the version given, and programs of other projects under heavy load, where this project's
harness checks the results (icechunk, deltalake, lance, restic, rclone). `make compat SUITES=DIR` runs them
(below). *Expected* tests do not pass, each for the reason given; a run fails if another test fails, and if
one of these passes. *Skipped* tests are those that the suite itself leaves out here.

| suite | what is run | passed | expected | skipped |
|---|---|---|---|---|
"""
_CHECKOUTS = """
### To run them

DIR is a folder of checkouts at these tags. Without it, only the suites that come as packages run.

<!-- not run: needs other projects' repositories -->
```bash
{clones}
make compat SUITES=DIR
python -m tests.compat.suites --suites DIR --suite s3fs
```
"""
_REASONS = """
### Why some tests do not pass

| suite | tests | reason |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What a run of a suite gave. `expected` is test → reason of those that failed as expected."""

    version: str
    about: str
    passed: int
    skipped: int
    expected: dict[str, str]

    @classmethod
    def of(cls, result: Result, reasons: Mapping[str, str], about: str, commit: str = "") -> Self:
        seen = list(result.outcomes.values())
        failed = {name for name, what in result.outcomes.items() if what not in {PASSED, SKIPPED}}
        expected = {name: why for name, why in sorted(reasons.items()) if name in failed}
        version = f"{result.version} ({commit})" if commit else result.version
        return cls(version, about, seen.count(PASSED), seen.count(SKIPPED), expected)


def keep(at: Path, name: str, row: Row) -> dict[str, Row]:
    """Put the row in place of the suite's last; all rows that there are."""
    rows = kept(at) | {name: row}
    at.write_text(json.dumps({name: asdict(row) for name, row in sorted(rows.items())}, indent=1) + "\n")
    return rows


def kept(at: Path) -> dict[str, Row]:
    """Rows by the name of their suite."""
    return {name: Row(**told) for name, told in json.loads(at.read_text()).items()} if at.exists() else {}


def with_suites(page: str, rows: Mapping[str, Row]) -> str:
    """The page with its last part, the suites', as the rows are now."""
    before = page.partition(f"\n{TITLE}\n")[0].rstrip("\n")
    return f"{before}\n\n{section(rows)}" if rows else f"{before}\n"


def section(rows: Mapping[str, Row]) -> str:
    """The suites' part of the page."""
    clones = "\n".join(suite.clone for suite in SUITES if suite.repository)
    text = _HEAD
    for name, row in sorted(rows.items()):
        counts = f"{row.passed:,} | {len(row.expected)} | {row.skipped}"
        text += f"| {name} {row.version} | {_cell(row.about)} | {counts} |\n"
    if any(row.expected for row in rows.values()):
        text += _REASONS
    for name, row in sorted(rows.items()):
        by_reason = defaultdict(list)
        for test, why in row.expected.items():
            by_reason[why].append(test)
        for why, tests in by_reason.items():
            names = ", ".join(f"`{_cell(test)}`" for test in tests)
            text += f"| {name} | {names} | {_cell(why)} |\n"
    return text + _CHECKOUTS.format(clones=clones)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
