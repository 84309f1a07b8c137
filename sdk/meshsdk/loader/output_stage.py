"""Output stages: frames become numpy arrays, torch tensors, or tensors on a GPU.

Law: one class a kind; `begin` starts slow work, `finish` returns the batch. torch is imported only where
tensors are requested. Images cross the bus as uint8 and are normalized on the device, in float32 with
one rounding. Only `CudaCopyStream` knows CUDA.
Invariant: a frame's memory is held until no reader remains, running copies included.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from meshsdk.client.arena import HostMemory, PinnedMemory
from meshsdk.datasets.batch import Batch, Ragged, make_batch
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from meshsdk.client.arena import Memory
    from meshsdk.datasets.batch import Frame


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class Normalize:
    """(x / 255 - mean) / std of a field of uint8 images, [rows, channels, height, width] in torch's
    channels-last order of memory, whichever order they came in.

    Arguments:
        field: which one.
        mean, std: a value a channel, of images from 0 to 1; ImageNet's if left out.
        dtype: "bfloat16", "float16" or "float32".
    """

    field: str = "image"
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            raise ConfigurationError("Normalize: mean and std have a value a channel each, std above 0")
        if self.dtype not in _DTYPES:
            raise ConfigurationError(f"Normalize: dtype={self.dtype!r} is none of {', '.join(_DTYPES)}")

    def __call__(self, images: Any) -> Any:
        """The normalised tensor of a uint8 one, on its device and present stream. Raises ConfigurationError
        when it is no batch of images of so many channels."""
        return Normalizer(self)(images)


class Normalizer:
    """A `Normalize` at work. Its constants are brought to a device once: that waits for all that the stream
    was told before, so it is nothing to do with every batch. On one stream a device."""

    def __init__(self, how: Normalize) -> None:
        self.how = how
        self._constants: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, images: Any) -> Any:
        import torch

        images = self._checked(images)
        scale, shift = self._constants_on(images.device)
        values = images.to(torch.float32, memory_format=torch.channels_last)
        values.mul_(scale).add_(shift)
        return values.to(getattr(torch, self.how.dtype), memory_format=torch.channels_last)

    def _checked(self, images: Any) -> Any:
        """They, with channels before rows."""
        import torch

        field, count = self.how.field, len(self.how.mean)
        if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
            raise ConfigurationError(
                f"normalize: {field!r} must be uint8 images of one size, four dimensions a batch: "
                "resize or crop them, and leave ops.normalize out"
            )
        if images.shape[1] != count and images.shape[3] == count:
            images = images.permute(0, 3, 1, 2)
        if images.shape[1] != count:
            raise ConfigurationError(
                f"normalize: {field!r} is {list(images.shape)}, mean and std have {count} channels"
            )
        return images

    def _constants_on(self, device: Any) -> tuple[Any, Any]:
        import torch

        if device not in self._constants:
            mean, std = self.how.mean, self.how.std
            scale = [1 / (255 * each) for each in std]
            shift = [-each / by for each, by in zip(mean, std, strict=True)]
            shape = (1, len(mean), 1, 1)
            self._constants[device] = (
                torch.tensor(scale, device=device).view(shape),
                torch.tensor(shift, device=device).view(shape),
            )
        return self._constants[device]


class CopyEvent(Protocol):
    """A point in a lane's work; an event of CUDA is one."""

    def query(self) -> bool:
        """Whether it has passed."""

    def synchronize(self) -> Any:
        """Waits until it has."""


class DeviceCopyStream(Protocol):
    """`memory`: what frames must be received into so that the lane can copy by itself. `device`: where they
    go, as torch says it."""

    memory: Memory
    device: Any

    def working(self) -> AbstractContextManager[Any]:
        """What torch is told within goes to the lane, not to the consumer's stream."""

    def copy(self, array: Any) -> Any:
        """Begins to copy; the tensor that will hold it."""

    def mark(self) -> CopyEvent:
        """Behind everything told so far."""

    def join(self, mark: Any, tensors: Iterable[Any]) -> None:
        """The consumer's stream waits for the mark; the CPU does not. It uses the tensors from then on."""


class CudaCopyStream:
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
        self._stream = torch.cuda.Stream(_checked_device(torch, device))
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


def _checked_device(torch: Any, device: str) -> Any:
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


class OutputStage(Protocol):
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

    def __init__(self, lane: DeviceCopyStream, normalize: Normalize | None = None) -> None:
        import torch

        self.memory: Memory = lane.memory
        self.device = lane.device
        self._lane = lane
        self._normalize = None if normalize is None else Normalizer(normalize)
        self._convert = torch.from_numpy
        self._held: deque[tuple[CopyEvent, Frame]] = deque()

    def begin(self, frame: Frame, epoch: int) -> tuple[Batch, CopyEvent]:
        """Starts the copies; the frame is held until their mark has passed."""
        self._let_go()
        with self._lane.working():
            try:
                batch = _normalized(make_batch(frame, epoch, self._lane.copy), self._normalize)
            finally:  # a copy that was begun before something failed reads the slot all the same
                copied = self._lane.mark()
                self._held.append((copied, frame))
        return _with_host(batch, self._convert), copied

    def finish(self, begun: tuple[Batch, CopyEvent]) -> Batch:
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


def make_stage(device: str | None, output: str | None, normalize: Normalize | None = None) -> OutputStage:
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
        return DeviceStage(CudaCopyStream(device), normalize)
    raise ConfigurationError(f"device={device!r}: use 'cpu', 'cuda' or 'cuda:N'")
