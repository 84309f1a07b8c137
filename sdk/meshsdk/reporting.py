"""Reports of a loader to the nodes, a header on requests that it sends anyway (`meshwire.loaderreports`)."""

from __future__ import annotations

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
        self._sent = (0, 0.0, 0.0)
        self._due = 0.0

    def __repr__(self) -> str:
        return f"<Reporter {self._name}>"

    def headers(self) -> Mapping[str, str]:
        """What to put on a request: mostly nothing."""
        now = time.monotonic()
        if now < self._due:
            return {}
        stats = self._stats()
        samples, waited, seconds = self._sent
        self._sent, self._due = (stats.samples, stats.waited, stats.seconds), now + _EVERY
        passed = max(stats.seconds - seconds, 0.0)
        report = LoaderReport(
            self._name, stats.samples - samples, min(max(stats.waited - waited, 0.0), passed), passed
        )
        return {HEADER: report.to_header()}
