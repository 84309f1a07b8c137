"""From received frames to what the training loop gets: arrays, tensors, or tensors on a GPU.

Law: one small class a kind; `begin` starts whatever takes time, `finish` gives the batch. torch is
imported here only, and only when tensors are asked for.
Invariant: a frame's memory is held until nothing, a running copy included, reads it.
"""

from __future__ import annotations

from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from meshsdk.arenas import HostMemory, PinnedMemory
from meshsdk.batches import Ragged, make_batch
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.arenas import Memory
    from meshsdk.batches import Batch
    from meshsdk.deliveries import Frame


class Stage(Protocol):
    """`ahead`: how many frames may be begun before the first of them is finished. `memory`: of the arena."""

    ahead: int
    memory: Memory

    def begin(self, frame: Frame, epoch: int) -> Any: ...

    def finish(self, begun: Any) -> Batch: ...

    def close(self) -> None:
        """Waits for copies under way."""


class NumpyStage:
    """Arrays that are views of the arena."""

    ahead = 0

    def __init__(self) -> None:
        self.memory: Memory = HostMemory()

    def begin(self, frame: Frame, epoch: int) -> Batch:
        return make_batch(frame, epoch, lambda array: array)

    def finish(self, begun: Batch) -> Batch:
        return begun

    def close(self) -> None:
        """Nothing is under way."""


class TorchStage:
    """CPU tensors that are views of the arena: their storage holds the array, which holds the slot."""

    ahead = 0

    def __init__(self) -> None:
        import torch

        self.memory: Memory = HostMemory()
        self._convert = torch.from_numpy

    def begin(self, frame: Frame, epoch: int) -> Batch:
        batch = make_batch(frame, epoch, self._convert)
        return _with_host(batch, self._convert)

    def finish(self, begun: Batch) -> Batch:
        return begun

    def close(self) -> None:
        """Nothing is under way."""


class CudaStage:
    """Tensors on a GPU, copied from pinned memory on a stream of their own while the GPU computes.

    Two frames are under way at most. Not run: no GPU was at hand when this was written.
    """

    ahead = 1

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
        self._held: deque[tuple[Any, Frame]] = deque()

    def begin(self, frame: Frame, epoch: int) -> tuple[Batch, Any]:
        """Starts the copies; the frame is held until their event has passed."""
        with self._torch.cuda.stream(self._stream):
            batch = make_batch(frame, epoch, self._copy)
            copied = self._torch.cuda.Event()
            copied.record(self._stream)
        self._held.append((copied, frame))
        return _with_host(batch, self._torch.from_numpy), copied

    def _copy(self, array: Any) -> Any:
        return self._torch.from_numpy(array).to(self._device, non_blocking=True)

    def finish(self, begun: tuple[Batch, Any]) -> Batch:
        """The consumer's stream waits for the copy; the CPU does not."""
        batch, copied = begun
        current = self._torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for value in batch.values():
            for tensor in (value.data, value.offsets) if isinstance(value, Ragged) else (value,):
                tensor.record_stream(current)
        while self._held and self._held[0][0].query():
            self._held.popleft()
        return batch

    def close(self) -> None:
        while self._held:
            self._held.popleft()[0].synchronize()


def _with_host(batch: Batch, convert: Any) -> Batch:
    """Positions and status as tensors, too."""
    batch.positions = convert(batch.positions)
    batch.status = convert(batch.status)
    return batch


def make_stage(device: str | None, output: str | None) -> Stage:
    """The stage for `device=` and `output=`.

    Tensors when torch is installed, or asked for, or a device is named; else arrays. Raises
    ConfigurationError.
    """
    if output not in (None, "torch", "numpy"):
        raise ConfigurationError(
            f"output={output!r}: use 'torch', 'numpy', or None to take torch if installed"
        )
    installed = find_spec("torch") is not None
    if output == "numpy" or (output is None and device in (None, "cpu") and not installed):
        if device not in (None, "cpu"):
            raise ConfigurationError(f"output='numpy' stays in host memory: leave device={device!r} out")
        return NumpyStage()
    if not installed:
        raise ConfigurationError("torch is not installed: pip install 'shardmesh[torch]', or output='numpy'")
    if device is None or device == "cpu":
        return TorchStage()
    if device == "cuda" or device.startswith("cuda:"):
        return CudaStage(device)
    raise ConfigurationError(f"device={device!r}: use 'cpu', 'cuda' or 'cuda:N'")
