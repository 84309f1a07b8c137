"""What the checks of the CUDA path run on: a GPU, or nothing but the CPU, to try the checks themselves.

Seam: `Ground`. Law: `busy` keeps a stream from going on for a while without the CPU's waiting; on a ground
that cannot, it does nothing.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from meshsdk.client.arena import HostMemory
from meshsdk.loader.output_stage import CudaCopyStream

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshsdk.client.arena import Memory
    from meshsdk.loader.output_stage import DeviceCopyStream


class Ground(Protocol):
    """`device` for `mesh.Loader`; `real`: there is a GPU."""

    device: str
    real: bool

    def lane(self) -> DeviceCopyStream: ...

    def busy(self, seconds: float, lane: DeviceCopyStream | None = None) -> None:
        """The consumer's stream, or a lane's, has other things to do for a while."""

    def wait(self) -> None:
        """Until everything that was told is done."""


class Gpu:
    """The GPU `device`. Its clock is measured once, in cycles a second of `torch.cuda._sleep`."""

    real = True

    def __init__(self, device: str) -> None:
        self.device = device
        self._cycles = 0.0

    def lane(self) -> DeviceCopyStream:
        return CudaCopyStream(self.device)

    def busy(self, seconds: float, lane: DeviceCopyStream | None = None) -> None:
        if not self._cycles:
            self._cycles = self._measured()
        with contextlib.nullcontext() if lane is None else lane.working():
            torch.cuda._sleep(int(seconds * self._cycles))

    def _measured(self) -> float:
        """Once two readings agree: the first brings the kernel there, and a GPU that was idle is slow at
        first."""
        cycles, before = 50_000_000, 0.0
        for _ in range(50):
            self.wait()
            began = time.monotonic()
            torch.cuda._sleep(cycles)
            self.wait()
            rate = cycles / (time.monotonic() - began)
            if abs(rate - before) < 0.05 * rate:
                break
            before = rate
        return rate

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


@dataclass
class PromptMark:
    """Always passed: what it stands for was done when it was told."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is to be waited for."""


@dataclass
class PromptLane:
    """Copies at once."""

    memory: Memory = field(default_factory=HostMemory)
    device: Any = "cpu"

    def working(self) -> Any:
        return contextlib.nullcontext()

    def copy(self, array: Any) -> Any:
        return torch.from_numpy(array).clone()

    def mark(self) -> Any:
        return PromptMark()

    def join(self, mark: Any, tensors: Iterable[Any]) -> None:
        """There is but one order."""


class Rehearsal:
    """The CPU: tries the checks, and says nothing of CUDA."""

    device, real = "cpu", False

    def lane(self) -> DeviceCopyStream:
        return PromptLane()

    def busy(self, seconds: float, lane: DeviceCopyStream | None = None) -> None:
        """The CPU is never asked to do nothing."""

    def wait(self) -> None:
        """Everything is done."""
