"""Output stages: turn frames into numpy arrays, torch tensors, or tensors on a GPU.

Law: there is one class per kind of output; `begin` starts slow work and `finish` returns the batch. torch is
imported only if tensors are requested. Images cross the bus as uint8 and are normalized on the device, in
float32 with one rounding. Only `CudaCopyStream` uses CUDA.
Invariant: a frame's memory is held until nothing reads it any more, including copies in progress.
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
    """Normalizes a field of uint8 images to (x / 255 − mean) / std, on the device of the batch.

    Pass it as `normalize=` to a Loader, or call it with a tensor. The result is [rows, channels, height,
    width] in torch's channels-last memory format, whichever order the images had.

    Arguments:
        field: name of the field.
        mean, std: one value per channel, for images scaled to 0…1. Default: those of ImageNet.
        dtype: "bfloat16", "float16" or "float32".

    Raises ConfigurationError for invalid values.
    """

    field: str = "image"
    mean: Sequence[float] = IMAGENET_MEAN
    std: Sequence[float] = IMAGENET_STD
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean or min(self.std) <= 0:
            raise ConfigurationError("Normalize: mean and std need one value per channel each, with std > 0")
        if self.dtype not in _DTYPES:
            raise ConfigurationError(f"Normalize: dtype={self.dtype!r}: use one of {', '.join(_DTYPES)}")

    def __call__(self, images: Any) -> Any:
        """Return the normalized tensor of a uint8 tensor, on its device and the current stream.

        Raises ConfigurationError if it is not a batch of images with as many channels as `mean`.
        """
        return Normalizer(self)(images)


class Normalizer:
    """Applies a `Normalize`; used on one stream per device.

    The constants are copied to a device only once, because that copy waits for all earlier work of the
    stream.
    """

    def __init__(self, how: Normalize) -> None:
        self.how = how
        self._constants: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, images: Any) -> Any:
        import torch

        images = self._check_images(images)
        scale, shift = self._constants_on(images.device)
        values = images.to(torch.float32, memory_format=torch.channels_last)
        values.mul_(scale).add_(shift)
        return values.to(getattr(torch, self.how.dtype), memory_format=torch.channels_last)

    def _check_images(self, images: Any) -> Any:
        """Check the images and return them with the channels first."""
        import torch

        field, count = self.how.field, len(self.how.mean)
        if not isinstance(images, torch.Tensor) or images.dtype != torch.uint8 or images.dim() != 4:
            raise ConfigurationError(
                f"normalize: {field!r} must be uint8 images of one size, in batches of four dimensions: "
                "resize or crop them, and leave ops.normalize out"
            )
        if images.shape[1] != count and images.shape[3] == count:
            images = images.permute(0, 3, 1, 2)
        if images.shape[1] != count:
            raise ConfigurationError(
                f"normalize: {field!r} has the shape {list(images.shape)}, but mean and std have {count} "
                "channels"
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
    """A point in the work of a copy stream, such as a CUDA event."""

    def query(self) -> bool:
        """Return whether the stream has passed this point."""

    def synchronize(self) -> Any:
        """Wait until the stream has passed this point."""


class DeviceCopyStream(Protocol):
    """A stream that copies frames to a device while the device computes.

    `memory`: the kind of memory to receive frames into, so that copies are asynchronous; `device`: the
    target, as a torch device.
    """

    memory: Memory
    device: Any

    def working(self) -> AbstractContextManager[Any]:
        """Return a context in which torch operations go to this stream, not to the consumer's."""

    def copy(self, array: Any) -> Any:
        """Start to copy an array; return the tensor that will hold it."""

    def mark(self) -> CopyEvent:
        """Return an event after all work queued so far."""

    def join(self, mark: Any, tensors: Iterable[Any]) -> None:
        """Make the consumer's stream, not the CPU, wait for the mark; it then owns the tensors."""


class CudaCopyStream:
    """A separate CUDA stream that copies from pinned memory.

    The test suite does not cover this class without a GPU; run `python -m tests.gpu` for that.
    """

    def __init__(self, device: str) -> None:
        import torch

        if not torch.cuda.is_available():
            raise ConfigurationError(
                f"device={device!r}: torch finds no GPU; use device='cpu', or check the driver with "
                "nvidia-smi"
            )
        self.memory: Memory = PinnedMemory()
        self._torch = torch
        self._stream = torch.cuda.Stream(_checked_device(torch, device))
        # With its index: plain "cuda" would mean another GPU after the program calls `set_device`.
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
            tensor.record_stream(current)  # otherwise its memory could be reused by another copy too early

    def __repr__(self) -> str:
        return f"CudaCopyStream({self.device})"


def _checked_device(torch: Any, device: str) -> Any:
    """Return the torch device of a GPU that exists. Raises ConfigurationError."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device={device!r}: use 'cpu', 'cuda' or 'cuda:N'") from error
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise ConfigurationError(f"device={device!r}: torch finds {count} GPUs, the last is cuda:{count - 1}")
    return found


class OutputStage(Protocol):
    """Turns frames into batches.

    `ahead`: how many further frames may be begun before the first one is finished; `memory`: the kind of
    memory for the arena.
    """

    ahead: int
    memory: Memory

    def begin(self, frame: Frame, epoch: int) -> Any: ...

    def finish(self, begun: Any) -> Batch: ...

    def close(self) -> None:
        """Wait for copies in progress."""


class NumpyStage:
    """Makes numpy arrays that are views of the arena."""

    ahead = 0

    def __init__(self) -> None:
        self.memory: Memory = HostMemory()

    def begin(self, frame: Frame, epoch: int) -> Batch:
        return make_batch(frame, epoch, lambda array: array)

    def finish(self, begun: Batch) -> Batch:
        return begun

    def close(self) -> None:
        """Do nothing: no copy is ever in progress."""


class TorchStage:
    """Makes CPU tensors that are views of the arena: their storage holds the array, which holds the slot.

    A normalized field is a new tensor.
    """

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
        """Do nothing: no copy is ever in progress."""


class DeviceStage:
    """Makes tensors on a device, copied and normalized by a separate stream while the device computes.

    At most two frames are in progress. A slot is released when the stream has passed the mark after its copy.
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
        """Start the copies; the frame is held until their mark has passed."""
        self._let_go()
        with self._lane.working():
            try:
                batch = _normalized(make_batch(frame, epoch, self._lane.copy), self._normalize)
            finally:  # copies that started before a failure still read the slot
                copied = self._lane.mark()
                self._held.append((copied, frame))
        return _with_host(batch, self._convert), copied

    def finish(self, begun: tuple[Batch, CopyEvent]) -> Batch:
        """Return the batch; the consumer's stream waits for the copies, the CPU does not."""
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
    """Convert positions and status to tensors as well."""
    batch.positions = convert(batch.positions)
    batch.status = convert(batch.status)
    return batch


def device_name(device: Any) -> str | None:
    """Return the name of `device=`, which may be a `torch.device`. Raises ConfigurationError."""
    if device is None or isinstance(device, str):
        return device
    if type(device).__module__ == "torch" and type(device).__name__ == "device":
        return str(device)
    raise ConfigurationError(f"device={device!r}: use 'cpu', 'cuda' or 'cuda:N', or a torch.device")


def make_stage(device: str | None, output: str | None, normalize: Normalize | None = None) -> OutputStage:
    """Return the stage for `device=`, `output=` and `normalize=`.

    It makes tensors if torch is installed or requested or a device is named; else arrays. Raises
    ConfigurationError.
    """
    if normalize is not None and not isinstance(normalize, Normalize):
        raise ConfigurationError(f"normalize={normalize!r}: pass mesh.Normalize('image')")
    if output not in (None, "torch", "numpy"):
        raise ConfigurationError(
            f"output={output!r}: use 'torch', 'numpy', or None for torch if it is installed"
        )
    installed = find_spec("torch") is not None
    if output == "numpy" or (output is None and device in (None, "cpu") and not installed):
        if device not in (None, "cpu"):
            raise ConfigurationError(f"output='numpy' stays in host memory: leave device={device!r} out")
        if normalize is not None:
            raise ConfigurationError("normalize= makes tensors: install torch, and leave output='numpy' out")
        return NumpyStage()
    if not installed:
        raise ConfigurationError(
            "torch is not installed: pip install 'shardmesh[torch]', or pass output='numpy'"
        )
    if device is None or device == "cpu":
        return TorchStage(normalize)
    if device == "cuda" or device.startswith("cuda:"):
        return DeviceStage(CudaCopyStream(device), normalize)
    raise ConfigurationError(f"device={device!r}: use 'cpu', 'cuda' or 'cuda:N'")
