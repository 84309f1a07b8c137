"""From received frames to what the training loop gets: arrays, tensors, or tensors on a GPU.

Law: one small class a kind; `begin` starts whatever takes time, `finish` gives the batch. torch is
imported only when tensors are asked for.
Invariant: a frame's memory is held until nothing, a running copy included, reads it.
"""

from __future__ import annotations

from collections import deque
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from meshsdk.arenas import HostMemory
from meshsdk.batches import Batch, Ragged, make_batch
from meshsdk.errors import ConfigurationError
from meshsdk.lanes import CudaLane
from meshsdk.normalizing import Normalize, Normalizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.arenas import Memory
    from meshsdk.frames import Frame
    from meshsdk.lanes import Lane, Mark


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
    """CPU tensors that are views of the arena: their storage holds the array, which holds the slot. What is
    normalised is a tensor of its own."""

    ahead = 0

    def __init__(self, normalize: Normalize | None = None) -> None:
        import torch

        self.memory: Memory = HostMemory()
        self._convert = torch.from_numpy
        self._normalize = None if normalize is None else Normalizer(normalize)

    def begin(self, frame: Frame, epoch: int) -> Batch:
        batch = _normalized(make_batch(frame, epoch, self._convert), self._normalize)
        return _with_host(batch, self._convert)

    def finish(self, begun: Batch) -> Batch:
        return begun

    def close(self) -> None:
        """Nothing is under way."""


class DeviceStage:
    """Tensors on a device, copied and normalised by a lane of its own while the device computes.

    Two frames are under way at most. A slot is free again when the mark behind its copy has passed.
    """

    ahead = 1

    def __init__(self, lane: Lane, normalize: Normalize | None = None) -> None:
        import torch

        self.memory: Memory = lane.memory
        self.device = lane.device
        self._lane = lane
        self._normalize = None if normalize is None else Normalizer(normalize)
        self._convert = torch.from_numpy
        self._held: deque[tuple[Mark, Frame]] = deque()

    def begin(self, frame: Frame, epoch: int) -> tuple[Batch, Mark]:
        """Starts the copies; the frame is held until their mark has passed."""
        self._let_go()
        with self._lane.working():
            try:
                batch = _normalized(make_batch(frame, epoch, self._lane.copy), self._normalize)
            finally:  # a copy that was begun before something failed reads the slot all the same
                copied = self._lane.mark()
                self._held.append((copied, frame))
        return _with_host(batch, self._convert), copied

    def finish(self, begun: tuple[Batch, Mark]) -> Batch:
        """The consumer's stream waits for the copy; the CPU does not."""
        batch, copied = begun
        self._lane.join(copied, list(_tensors(batch)))
        self._let_go()
        return batch

    def _let_go(self) -> None:
        while self._held and self._held[0][0].query():
            self._held.popleft()

    def close(self) -> None:
        while self._held:
            self._held[0][0].synchronize()
            self._held.popleft()

    def __repr__(self) -> str:
        return f"DeviceStage({self._lane!r}, {len(self._held)} frames held)"


def _tensors(batch: Batch) -> Iterator[Any]:
    for value in batch.values():
        yield from (value.data, value.offsets) if isinstance(value, Ragged) else (value,)


def _normalized(batch: Batch, normalizer: Normalizer | None) -> Batch:
    if normalizer is None:
        return batch
    fields, name = dict(batch), normalizer.how.field
    if name not in fields:
        raise ConfigurationError(f"normalize: no field {name!r}; this batch has {', '.join(fields)}")
    fields[name] = normalizer(fields[name])
    return Batch(fields, batch.positions, batch.status, batch.epoch, batch.step)


def _with_host(batch: Batch, convert: Any) -> Batch:
    """Positions and status as tensors, too."""
    batch.positions = convert(batch.positions)
    batch.status = convert(batch.status)
    return batch


def device_name(device: Any) -> str | None:
    """`device=` as a name: torch's own are taken, too. Raises ConfigurationError."""
    if device is None or isinstance(device, str):
        return device
    if type(device).__module__ == "torch" and type(device).__name__ == "device":
        return str(device)
    raise ConfigurationError(f"device={device!r}: use 'cpu', 'cuda' or 'cuda:N', or a torch.device")


def make_stage(device: str | None, output: str | None, normalize: Normalize | None = None) -> Stage:
    """The stage for `device=`, `output=` and `normalize=`.

    Tensors when torch is installed, or asked for, or a device is named; else arrays. Raises
    ConfigurationError.
    """
    if normalize is not None and not isinstance(normalize, Normalize):
        raise ConfigurationError(f"normalize={normalize!r}: give mesh.Normalize('image')")
    if output not in (None, "torch", "numpy"):
        raise ConfigurationError(
            f"output={output!r}: use 'torch', 'numpy', or None to take torch if installed"
        )
    installed = find_spec("torch") is not None
    if output == "numpy" or (output is None and device in (None, "cpu") and not installed):
        if device not in (None, "cpu"):
            raise ConfigurationError(f"output='numpy' stays in host memory: leave device={device!r} out")
        if normalize is not None:
            raise ConfigurationError("normalize= makes tensors: install torch, and leave output='numpy' out")
        return NumpyStage()
    if not installed:
        raise ConfigurationError("torch is not installed: pip install 'shardmesh[torch]', or output='numpy'")
    if device is None or device == "cpu":
        return TorchStage(normalize)
    if device == "cuda" or device.startswith("cuda:"):
        return DeviceStage(CudaLane(device), normalize)
    raise ConfigurationError(f"device={device!r}: use 'cpu', 'cuda' or 'cuda:N'")
