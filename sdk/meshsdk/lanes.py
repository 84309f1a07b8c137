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
    """`memory`: what frames must be received into so that the lane can copy by itself. `device`: where they
    go, as torch says it."""

    memory: Memory
    device: Any

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

    Not run: no GPU was at hand when this was written (`python -m tests.gpu` does).
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
        self._stream = torch.cuda.Stream(_checked(torch, device))
        # With its number: "cuda" alone would be another GPU after the program's `set_device`.
        self.device = self._stream.device

    def working(self) -> AbstractContextManager[Any]:
        working: AbstractContextManager[Any] = self._torch.cuda.stream(self._stream)
        return working

    def copy(self, array: Any) -> Any:
        return self._torch.from_numpy(array).to(self.device, non_blocking=True)

    def mark(self) -> Any:
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self, mark: Any, tensors: Iterable[Any]) -> None:
        current = self._torch.cuda.current_stream(self.device)
        current.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(current)  # else its memory could be given to another copy too early

    def __repr__(self) -> str:
        return f"CudaLane({self.device})"


def _checked(torch: Any, device: str) -> Any:
    """torch's name of a GPU that is here. Raises ConfigurationError."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device={device!r}: use 'cpu', 'cuda' or 'cuda:N'") from error
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise ConfigurationError(
            f"device={device!r}: torch sees {count} GPUs here, the last is cuda:{count - 1}"
        )
    return found
