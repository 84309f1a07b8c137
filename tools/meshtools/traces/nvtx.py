"""NVTX ranges around a loop's waits and steps, for Nsight Systems.

Seam: `Nvtx` is anything with `range_start` and `range_end`; torch.cuda.nvtx has both if torch was built
with CUDA. Not run: no GPU was available when this was written.
Law: these ranges need not nest, so they never conflict with ranges of the program itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from meshsdk.loader_stats import Meter, Step


class Nvtx(Protocol):
    """A profiler's ranges."""

    def range_start(self, msg: str) -> Any: ...

    def range_end(self, range_id: Any) -> None: ...


class NvtxRanges:
    """An observer that keeps one range open: `mesh wait`, or `mesh step N` until the next wait."""

    def __init__(self, nvtx: Nvtx) -> None:
        self.pid = os.getpid()
        self._nvtx = nvtx
        self._open: Any = None

    def __repr__(self) -> str:
        return f"<NvtxRanges, {'one' if self._open is not None else 'none'} open>"

    def on_wait(self, now: float) -> None:
        del now
        self._begin("mesh wait")

    def on_batch(self, step: Step, meter: Meter) -> None:
        del meter
        self._begin(f"mesh step {step.step}")

    def on_end(self, now: float, meter: Meter) -> None:
        del now, meter
        self._end()

    def close(self) -> None:
        self._end()

    def _begin(self, name: str) -> None:
        self._end()
        self._open = self._nvtx.range_start(name)

    def _end(self) -> None:
        if self._open is not None:
            self._nvtx.range_end(self._open)
            self._open = None


def nvtx_of(torch: Any) -> Nvtx | None:
    """Returns torch's ranges; None if it has none, or this process uses no GPU. (To ask whether there is one
    would start CUDA, and a process that forks afterwards cannot use it in its children.)"""
    cuda = getattr(torch, "cuda", None)
    nvtx = getattr(cuda, "nvtx", None)
    if cuda is None or nvtx is None or not cuda.is_initialized():
        return None
    found: Nvtx | None = nvtx if hasattr(nvtx, "range_start") and hasattr(nvtx, "range_end") else None
    return found


def nvtx_ranges(torch: Any) -> NvtxRanges | None:
    """Returns the observer of a loader (entry point `nvtx`); None if `nvtx_of` finds no ranges."""
    nvtx = nvtx_of(torch)
    return None if nvtx is None else NvtxRanges(nvtx)
