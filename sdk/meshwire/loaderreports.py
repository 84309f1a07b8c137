"""What a loader tells the node it asks: how much it handed on, and how long its job waited for it.

Law: one header of a request for a frame, so that reports cost no requests of their own; increments since the
last report, so that nodes only add. A report that cannot be read is no report, never an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

HEADER: Final = "x-mesh-loader"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_FORM = re.compile(
    r"name=([^;]{1,63});samples=([0-9]{1,12});waited=([0-9]{1,7}\.[0-9]{3});seconds=([0-9]{1,7}\.[0-9]{3})"
    r"(?:;preprocessing=([0-9]{1,7}\.[0-9]{3});fetch=([0-9]{1,7}\.[0-9]{3}))?"
)
_ROUNDED: Final = 0.0011  # seconds: each figure is rounded by itself


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """Since the report before: rows handed on, seconds of the training loop, of these seconds waited, and of
    those because of nodes' `preprocessing` or `fetch`."""

    name: str
    samples: int
    waited: float
    seconds: float
    preprocessing: float = 0.0
    fetch: float = 0.0

    @property
    def stalls(self) -> dict[str, float]:
        """`waited` by what it was for."""
        network = max(self.waited - self.preprocessing - self.fetch, 0.0)
        return {"network": network, "preprocessing": self.preprocessing, "fetch": self.fetch}

    def to_header(self) -> str:
        """As it is sent."""
        return (
            f"name={self.name};samples={self.samples};waited={self.waited:.3f};seconds={self.seconds:.3f};"
            f"preprocessing={self.preprocessing:.3f};fetch={self.fetch:.3f}"
        )


def parse_report(header: str | None) -> LoaderReport | None:
    """The report of a header, None where there is none or it makes no sense."""
    found = None if header is None else _FORM.fullmatch(header)
    if found is None or NAME.fullmatch(found[1]) is None:
        return None
    seconds = (float(text or 0) for text in found.groups()[2:])
    report = LoaderReport(found[1], int(found[2]), *seconds)
    known = report.preprocessing + report.fetch
    return report if report.waited <= report.seconds and known <= report.waited + _ROUNDED else None
