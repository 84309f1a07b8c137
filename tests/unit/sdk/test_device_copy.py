"""Copies to a device that take their time: no slot is written before its copy was made. No CUDA here: a lane
that copies late, by address, as a GPU's would."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import types
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from meshsdk.client.arena import Arena, HostMemory, PinnedMemory, slot_size
from meshsdk.datasets.batch import Frame
from meshsdk.errors import ConfigurationError
from meshsdk.loader import torch_iterable
from meshsdk.loader.output_stage import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    CudaCopyStream,
    DeviceStage,
    Normalize,
    Normalizer,
    TorchStage,
    make_stage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meshsdk.client.arena import Memory
    from meshsdk.loader.output_stage import CopyEvent, DeviceCopyStream

Arrays = dict[str, np.ndarray]


@dataclass
class LateLane:
    """Copies only when somebody waits, or `run` is called; knows addresses and keeps nothing alive."""

    memory: Memory = field(default_factory=HostMemory)
    device: Any = "late"
    made: int = 0
    told: int = 0
    _waiting: deque[tuple[Any, int, int]] = field(default_factory=deque)
    _inside: bool = False

    @contextlib.contextmanager
    def working(self) -> Any:
        self._inside = True
        yield
        self._inside = False

    def copy(self, array: Any) -> Any:
        assert self._inside
        tensor = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype)
        self._waiting.append((tensor, array.ctypes.data, array.nbytes))
        self.told += 1
        return tensor

    def mark(self) -> LateMark:
        return LateMark(self, self.told)

    def run(self, until: int) -> None:
        while self.made < until:
            tensor, address, size = self._waiting.popleft()
            ctypes.memmove(tensor.data_ptr(), address, size)
            self.made += 1

    def join(self, mark: Any, tensors: Iterable[Any]) -> None:
        """The consumer's stream would wait; the copy is still to be made."""


@dataclass
class LateMark:
    lane: LateLane
    number: int

    def query(self) -> bool:
        return self.lane.made >= self.number

    def synchronize(self) -> None:
        self.lane.run(self.number)


def lane_and_mark_are_what_the_seam_says(
    lane: LateLane, mark: LateMark
) -> tuple[DeviceCopyStream, CopyEvent]:
    return lane, mark


def received(arena: Arena, step: int) -> Frame:
    """A frame of 64 rows whose bytes all say its step."""
    lease = arena.acquire_slot(4096)
    whole = np.frombuffer(lease.view, np.uint8)
    whole[:] = step
    arrays: Arrays = {"x": whole.reshape(64, 64), "__pos": np.arange(64), "__status": np.zeros(64, np.uint8)}
    return Frame(step, arrays, 4096)


def test_a_slot_is_not_written_before_its_copy_was_made() -> None:
    lane, arena = LateLane(), Arena(8 * slot_size(4096))
    stage = DeviceStage(lane)
    batches = [stage.finish(stage.begin(received(arena, step), 0)) for step in range(6)]
    assert arena.free_bytes() == 2 * slot_size(4096)  # six slots are held: no copy was made yet
    lane.run(3)
    batches += [stage.finish(stage.begin(received(arena, step), 0)) for step in range(6, 8)]
    assert arena.free_bytes() == 3 * slot_size(4096)  # three of eight are free again
    stage.close()
    assert arena.free_bytes() == 8 * slot_size(4096)
    assert [set(batch["x"].flatten().tolist()) for batch in batches] == [{step} for step in range(8)]
    assert "0 frames held" in repr(stage)


def test_a_slot_is_held_though_what_follows_its_copy_fails() -> None:
    lane, arena = LateLane(), Arena(8 * slot_size(4096))
    stage = DeviceStage(lane, Normalize("x"))
    with pytest.raises(ConfigurationError, match="uint8 images"):
        stage.begin(received(arena, 1), 0)
    assert arena.leased > 0
    lane.run(1)
    with pytest.raises(ConfigurationError, match="uint8 images"):
        stage.begin(received(arena, 2), 0)
    gc.collect()  # of the failures' stacks
    assert arena.free_bytes() == arena.budget - slot_size(4096)
    stage.close()
    assert arena.free_bytes() == arena.budget


def test_constants_are_brought_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.tensor(…, device=)` waits for all that the stream was told."""
    brought: list[Any] = []
    tensor = torch.tensor

    def counted(values: Any, **more: Any) -> Any:
        brought.append(values)
        return tensor(values, **more)

    monkeypatch.setattr("torch.tensor", counted)
    normalizer = Normalizer(Normalize())
    for _ in range(3):
        normalizer(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
    assert len(brought) == 2


def test_locked_memory_is_counted_as_torch_rounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PinnedMemory()
    assert memory.capacity(38_535_168) == 64 << 20
    assert memory.capacity(64 << 20) == 64 << 20
    monkeypatch.setattr(memory, "allocate", HostMemory().allocate)
    arena = Arena(128 << 20, memory)
    leases = [arena.acquire_slot(38_535_168) for _ in range(3)]
    assert ([lease.capacity for lease in leases], arena.overflows) == ([64 << 20] * 3, 1)


class Cuda:
    """torch.cuda, as far as a lane asks it: two GPUs, of which the program takes the second in the end."""

    def __init__(self) -> None:
        self.present, self.told = 0, list[tuple[Any, ...]]()

    def Stream(self, device: Any) -> Any:
        number = self.present if device.index is None else device.index
        return types.SimpleNamespace(device=torch.device("cuda", number))

    def current_stream(self, device: Any) -> Any:
        assert device.index is not None, "which GPU's stream that is changes with the program's set_device"
        return types.SimpleNamespace(wait_event=lambda mark: self.told.append(("waits", device.index, mark)))


def test_a_lane_keeps_to_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "Stream": cuda.Stream,
        "current_stream": cuda.current_stream,
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    lane = CudaCopyStream("cuda")
    cuda.present = 1
    tensor = types.SimpleNamespace(record_stream=lambda _: cuda.told.append(("recorded",)))
    lane.join("the mark", [tensor, tensor])
    assert cuda.told == [("waits", 0, "the mark"), ("recorded",), ("recorded",)]
    assert repr(lane) == "CudaCopyStream(cuda:0)"
    assert repr(CudaCopyStream("cuda:1")) == "CudaCopyStream(cuda:1)"
    with pytest.raises(ConfigurationError, match="torch finds 2 GPUs, the last is cuda:1"):
        CudaCopyStream("cuda:2")
    with pytest.raises(ConfigurationError, match="use 'cpu', 'cuda' or 'cuda:N'"):
        CudaCopyStream("cuda:first")


def test_workers_of_a_loader_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = types.SimpleNamespace(id=0, num_workers=2, seed=0)
    monkeypatch.setattr(torch_iterable, "get_worker_info", lambda: worker)
    loader: Any = types.SimpleNamespace(device="cuda:0", _moves=0, _followers=set())
    with pytest.raises(ConfigurationError, match="Leave num_workers out"):
        iter(torch_iterable.LoaderIterable(loader))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("order", ["chw", "hwc"])
def test_images_are_normalised_in_channels_last_order(dtype: Any, order: str) -> None:
    images = torch.randint(0, 256, (4, 3, 10, 12), dtype=torch.uint8)
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (IMAGENET_MEAN, IMAGENET_STD))
    exact = (images.double() / 255 - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    given = images if order == "chw" else images.permute(0, 2, 3, 1).contiguous()
    found = Normalize(dtype=dtype)(given)
    assert found.dtype == getattr(torch, dtype)
    assert found.shape == images.shape
    assert found.is_contiguous(memory_format=torch.channels_last)
    # One rounding: half a unit of the last place of values below 4, and float32's own error.
    unit = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-20}[dtype]
    assert (found.double() - exact).abs().max() <= unit + 1e-6


def test_the_stage_normalises_one_field_and_leaves_the_others() -> None:
    images = np.full((2, 4, 4, 3), 128, np.uint8)
    rows: Arrays = {"__pos": np.arange(2), "__status": np.zeros(2, np.uint8)}
    arrays: Arrays = {"image": images, "label": np.arange(2), **rows}
    stage = TorchStage(Normalize("image", mean=(0.5,) * 3, std=(0.5,) * 3, dtype="float16"))
    batch = stage.finish(stage.begin(Frame(3, arrays, 0), 1))
    assert (batch["image"].shape, batch["image"].dtype) == ((2, 3, 4, 4), torch.float16)
    assert batch["image"].float().max().item() == pytest.approx(128 / 255 * 2 - 1, abs=1e-4)
    assert batch["label"].tolist() == [0, 1]
    assert (batch.epoch, batch.step, batch.rows) == (1, 3, 2)
    with pytest.raises(ConfigurationError, match="no field 'pixels'; this batch has image, label"):
        TorchStage(Normalize("pixels")).begin(Frame(0, arrays, 0), 0)


def test_what_cannot_be_normalised_is_told() -> None:
    normalize = Normalize()
    for wrong in (torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, dtype=torch.uint8)):
        with pytest.raises(ConfigurationError, match="uint8 images of one size"):
            normalize(wrong)
    with pytest.raises(ConfigurationError, match="3 channels"):
        normalize(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    with pytest.raises(ConfigurationError, match="one value per channel"):
        Normalize(mean=(0.5,), std=(1.0, 1.0))
    with pytest.raises(ConfigurationError, match="int8"):
        Normalize(dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="normalize="):
        make_stage(None, "numpy", normalize)
