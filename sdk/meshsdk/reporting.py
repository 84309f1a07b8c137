"""Reports of a loader to the nodes, a header on requests that it sends anyway (`meshwire.loaderreports`)."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from meshsdk.errors import ConfigurationError
from meshwire.loaderreports import HEADER, NAME, LoaderReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshsdk.meters import LoaderStats

_EVERY: Final = 1.0  # seconds between reports, at least


class Reporter:
    """Makes the headers of one loader, from whichever thread asks."""

    def __init__(self, name: str, stats: Callable[[], LoaderStats]) -> None:
        if NAME.fullmatch(name) is None:
            raise ConfigurationError(
                f"report={name!r}: a name of up to 63 letters, digits and . _ - /, under which metrics show "
                "this job"
            )
        self._name, self._stats = name, stats
        self._sent: LoaderStats | None = None
        self._due = 0.0

    def __repr__(self) -> str:
        return f"<Reporter {self._name}>"

    def headers(self) -> Mapping[str, str]:
        """What to put on a request: mostly nothing."""
        now = time.monotonic()
        if now < self._due:
            return {}
        stats = self._stats()
        before, self._sent, self._due = self._sent, stats, now + _EVERY

        def gained(figure: str, most: float) -> float:
            since = float(getattr(before, figure)) if before is not None else 0.0
            return min(max(float(getattr(stats, figure)) - since, 0.0), most)

        samples = stats.samples - (before.samples if before is not None else 0)
        seconds = gained("seconds", math.inf)
        waited = gained("waited", seconds)
        preprocessing = gained("preprocessing", waited)
        fetch = gained("fetch", waited - preprocessing)
        report = LoaderReport(self._name, samples, waited, seconds, preprocessing, fetch)
        return {HEADER: report.to_header()}
