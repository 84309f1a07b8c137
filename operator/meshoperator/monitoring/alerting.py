"""What a rule is: a figure that Prometheus derives, or a condition that wakes somebody.

Law: an alert names a condition somebody has to act on; its runbook is a section of docs/runbooks.md of the
same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["critical", "warning"]
SCRAPES: Final = 'job="shardmesh"'
RUNBOOKS: Final = "docs/runbooks.md"
"""What the links to runbooks begin with; the chart has a value for where your copy of the docs is."""


@dataclass(frozen=True, slots=True)
class Recording:
    """`record` is `level:metric:operation`, as Prometheus's guide has it."""

    record: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """`wait`: how long `expr` holds before anybody is told. `critical` wakes somebody, `warning` does not."""

    name: str
    expr: str
    wait: str
    severity: Severity
    summary: str
    description: str

    @property
    def runbook(self) -> str:
        """Where it is written what to do."""
        return f"{RUNBOOKS}#{self.name.lower()}"
