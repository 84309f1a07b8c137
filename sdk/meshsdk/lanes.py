"""Ways from the arena to a device that copies by itself, while the CPU and the device do other things.

Law: a lane copies in the order it was told to; memory that is being copied is its user's to hold until the
mark set behind the copy has passed. The stage that keeps this law knows no CUDA; `CudaLane` is all that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from meshsdk.arenas import PinnedMemory
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from meshsdk.arenas import Memory


class Mark(Protocol):
    """A point in a lane's work; an event of CUDA is one."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> Any:
        """Waits until it has."""


class Lane(Protocol):
    """`memory`: what frames must be received into so that the lane can copy by itself."""

    memory: Memory

    def working(self) -> AbstractContextManager[Any]:
        """What torch is told within goes to the lane, not to the consumer's stream."""

    def copy(self, array: Any) -> Any:
        """Begins to copy; the tensor that will hold it."""

    def mark(self) -> Mark:
        """Behind everything told so far."""

    def join(self, mark: Any, tensors: Iterable[Any]) -> None:
        """The consumer's stream waits for the mark; the CPU does not. It uses the tensors from then on."""


class CudaLane:
    """A stream of its own on a GPU, from pinned memory.

    Not run: no GPU was at hand when this was written.
    """

    def __init__(self, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"device={device!r}: torch sees no GPU here; use device='cpu', "
                "or check the driver with nvidia-smi"
            )
        self.memory: Memory = PinnedMemory()
        self._torch = torch
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)

    def working(self) -> AbstractContextManager[Any]:
        working: AbstractContextManager[Any] = self._torch.cuda.stream(self._stream)
        return working

    def copy(self, array: Any) -> Any:
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)

    def mark(self) -> Any:
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self, mark: Any, tensors: Iterable[Any]) -> None:
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(current)  # else its memory could be given to another copy too early

    def __repr__(self) -> str:
        return f"CudaLane({self._device})"
