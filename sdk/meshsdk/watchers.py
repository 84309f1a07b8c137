"""Who watches a loader: its page for `mesh top`, its trace, a profiler's ranges.

Law: made when the first loop begins, again in a forked child; a watcher that cannot be had is left out.
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from meshsdk.traces.chrome import LIMIT, ChromeTrace, TakenError
from meshsdk.traces.ranges import Ranges, nvtx_of

if TYPE_CHECKING:
    from meshsdk.loaders import Loader
    from meshsdk.observing import Observer

TRACE_LIMIT: Final = LIMIT
TRACE_VARIABLE: Final = "MESH_TRACE"
PAGE_VARIABLE: Final = "MESH_TOP"
"""`off`: no page."""


class Watchers:
    """One a loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)
        self._pid = 0
        self._usual: list[Observer] = []
        self._trace: Observer | None = None

    def __repr__(self) -> str:
        return f"<Watchers {self._usual}, {self._trace}>"

    def present(self) -> tuple[Observer, ...]:
        """Those of this process, for a loop that begins."""
        loader = self._loader()
        if loader is not None and self._pid != os.getpid():
            self._pid = os.getpid()
            self._usual = _usual(loader)
            self._trace = None
            path = os.environ.get(TRACE_VARIABLE, "")
            if path:
                self._trace = _next_free(loader, Path(path))
        return (*self._usual, *(() if self._trace is None else (self._trace,)))

    def trace(self, path: str | os.PathLike[str] | None, limit: int) -> None:
        """A trace, or none any more."""
        self.present()
        if self._trace is not None:
            self._trace.close()
            self._trace = None
        loader = self._loader()
        if path is not None and loader is not None:
            self._trace = _traced(loader, Path(path), limit)

    def close(self) -> None:
        """Idempotent."""
        if self._pid == os.getpid():
            for watcher in (*self._usual, *(() if self._trace is None else (self._trace,))):
                watcher.close()
        self._pid, self._usual, self._trace = 0, [], None


def _usual(loader: Loader) -> list[Observer]:
    found: list[Observer] = []
    if os.environ.get(PAGE_VARIABLE, "") != "off":
        from meshsdk.tops.pages import describe, open_page

        source, plan = loader.dataset.snapshot.source, loader.plan.hash
        job = describe(loader.rank, loader.world, source, plan, loader.global_batch, loader.report)
        page = open_page(job, len(loader))
        found += [] if page is None else [page]
    nvtx = nvtx_of(sys.modules.get("torch"))
    found += [] if nvtx is None else [Ranges(nvtx)]
    return found


def _next_free(loader: Loader, path: Path) -> ChromeTrace:
    """A trace of its own for each loader at work: all of them are told the same path."""
    number, own = 1, path
    while True:
        try:
            return _traced(loader, own, LIMIT)
        except TakenError:
            number += 1
            own = path.with_name(f"{path.stem}.{number}{path.suffix}")


def _traced(loader: Loader, path: Path, limit: int) -> ChromeTrace:
    if loader.world > 1:
        path = path.with_name(f"{path.stem}.rank{loader.rank}{path.suffix}")
    name = loader.report or loader.dataset.snapshot.source
    return ChromeTrace(path, rank=loader.rank, world=loader.world, name=name, limit=limit)
