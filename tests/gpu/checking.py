"""Checks of the CUDA path: what is claimed of it, tried.

Law: a check returns what it saw, raises AssertionError when that is not as claimed, and LeftOut when this
machine cannot say. What is compared was computed on the GPU and is read once everything is over, so that a
check does not wait where a training job would not.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import meshsdk as mesh
from meshsdk import ops
from meshsdk.client.arena import Arena, PinnedMemory
from meshsdk.datasets.batch import Frame
from meshsdk.errors import ConfigurationError
from meshsdk.loader.output_stage import IMAGENET_MEAN, IMAGENET_STD, CudaCopyStream, DeviceStage, Normalize
from meshtools.doctor.measurement_runs import synchronize_gpu
from meshtools.top.gpus import read_gpus
from meshtools.traces.nvtx import nvtx_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.loader.output_stage import DeviceCopyStream
    from tests.gpu.grounds import Ground

Arrays = dict[str, np.ndarray]
ROWS, FRAME = 64, 1 << 20  # of a frame of the checks without a daemon


class LeftOut(Exception):
    """This machine cannot say; why."""


def _real(ground: Ground) -> None:
    if not ground.real:
        raise LeftOut("no GPU")


def received(arena: Arena, step: int, size: int = FRAME) -> Frame:
    """A frame whose bytes all say its step."""
    whole = np.frombuffer(arena.acquire_slot(size).view, np.uint8)
    whole[:] = step % 251
    rows: Arrays = {"__pos": np.arange(ROWS), "__status": np.zeros(ROWS, np.uint8)}
    return Frame(step, {"x": whole.reshape(ROWS, -1), **rows}, size)


def pinned(ground: Ground) -> str:
    """Memory of the arena is page-locked, a piece within it too, and takes what it says."""
    _real(ground)
    memory = PinnedMemory()
    slot = torch.from_numpy(memory.allocate(memory.capacity(3 << 20)))
    assert slot.is_pinned()
    assert slot[4096 + 64 :].is_pinned(), "a piece of a slot is not known as pinned: copies would wait"
    assert len(slot) == 4 << 20
    return "a slot and pieces of it"


def copies(ground: Ground, lane: DeviceCopyStream | None = None, frames: int = 200) -> str:
    """Slots are reused, device memory too, and every batch has its own bytes: with the consumer's stream late
    and each batch dropped at once."""
    lane = lane or ground.lane()
    arena = Arena(4 * lane.memory.capacity(FRAME), lane.memory)
    stage, sums = DeviceStage(lane), []
    for step in range(frames):
        batch = stage.finish(stage.begin(received(arena, step), 0))
        if step % 8 == 0:
            ground.busy(0.005)  # what follows on this stream is late; the lane goes on
        if step % 32 == 16:
            ground.busy(0.005, lane)  # copies are late: whose slot is free too early has other bytes by then
        sums.append(batch["x"].sum(dtype=torch.int64))
        del batch
    stage.close()
    ground.wait()
    wrong = [step for step, found in enumerate(sums) if int(found) != FRAME * (step % 251)]
    assert not wrong, f"{len(wrong)} of {frames} batches have other bytes than were received: {wrong[:5]}"
    assert arena.free_bytes() == arena.budget, "a slot did not come back"
    return f"{frames} batches through {arena.allocated >> 20} MiB, {arena.overflows} slots beyond"


def marks(ground: Ground) -> str:
    """A slot is held as long as its copy is under way, and free afterwards; nobody waits meanwhile."""
    _real(ground)
    lane = ground.lane()
    arena = Arena(8 * lane.memory.capacity(FRAME), lane.memory)
    stage = DeviceStage(lane)
    warm = stage.finish(stage.begin(received(arena, 0), 0))  # memory is locked
    int(warm["x"].sum(dtype=torch.int64))  # and the kernels are there: loading one waits for the GPU
    del warm
    ground.busy(0.0)
    ground.wait()
    ground.busy(0.5, lane)
    began = time.monotonic()
    batch = stage.finish(stage.begin(received(arena, 7), 0))
    total = batch["x"].sum(dtype=torch.int64)
    took = time.monotonic() - began
    held = arena.leased
    ground.wait()
    assert took < 0.4, f"the CPU waited {took:.2f} s for a copy that was to be made later"
    assert held > 0, "the slot was free before its copy was made"
    assert int(total) == FRAME * 7, "the consumer's stream did not wait for the copy"
    stage.close()
    assert arena.free_bytes() == arena.budget
    return f"{1000 * took:.1f} ms of CPU for a copy that was held up for 500 ms"


def normalised(ground: Ground) -> str:
    """(x / 255 - mean) / std, rounded once, channels last: as on the CPU in double precision; once its
    constants are there, the CPU waits for nothing."""
    images = torch.randint(0, 256, (8, 3, 64, 48), dtype=torch.uint8)
    mean, std = (
        torch.tensor(each, dtype=torch.float64).view(1, 3, 1, 1) for each in (IMAGENET_MEAN, IMAGENET_STD)
    )
    exact = (images.double() / 255 - mean) / std
    for dtype, unit in (("bfloat16", 2.0**-7), ("float16", 2.0**-10), ("float32", 2.0**-20)):
        stage = DeviceStage(lane := ground.lane(), Normalize(dtype=dtype))  # type: ignore[arg-type]
        for given in (images, images.permute(0, 2, 3, 1).contiguous()):
            rows: Arrays = {"__pos": np.arange(8), "__status": np.zeros(8, np.uint8)}
            frame = Frame(0, {"image": given.numpy(), **rows}, given.nbytes)
            for _ in range(2):
                found = stage.finish(stage.begin(frame, 0))["image"]
            error = (found.cpu().double() - exact).abs().max()
            assert error <= unit + 1e-6, f"{dtype}: wrong by {error}"
            assert found.is_contiguous(memory_format=torch.channels_last)
        if ground.real:
            pinned = lane.memory.allocate(images.nbytes).reshape(images.shape)
            frame = Frame(0, {"image": pinned, **rows}, images.nbytes)
            ground.busy(0.3, lane)
            began = time.monotonic()
            stage.finish(stage.begin(frame, 0))
            took = time.monotonic() - began
            assert took < 0.25, f"{dtype}: the CPU waited {took:.2f} s for the GPU"
        stage.close()
    return "bfloat16, float16, float32, from rows-channels-columns and channels-first"


def other_gpu(ground: Ground) -> str:
    """Batches go to the GPU that is named, whichever is the present one; a number too high is told."""
    _real(ground)
    count = torch.cuda.device_count()
    try:
        CudaCopyStream(f"cuda:{count}")
    except ConfigurationError:
        pass
    else:
        raise AssertionError(f"cuda:{count} was taken, of {count} GPUs")
    if count < 2:
        raise LeftOut("one GPU; a number too high is told")
    lane = CudaCopyStream("cuda:1")
    arena, stage = Arena(8 * FRAME, lane.memory), DeviceStage(lane)
    with torch.cuda.device(0):
        batch = stage.finish(stage.begin(received(arena, 3), 0))
    assert batch["x"].device == torch.device("cuda:1")
    assert int(batch["x"].sum(dtype=torch.int64)) == FRAME * 3
    stage.close()
    return "cuda:1 while cuda:0 is the present one"


def training(ground: Ground, dataset: mesh.Dataset) -> str:
    """A loader's batches on the device equal those on the CPU, over two epochs, resumed in the middle, with
    the GPU kept busy; memory does not grow."""
    plain = mesh.Loader(dataset, 8, seed=5)
    wanted = [(batch.positions.tolist(), batch["image"].clone()) for _ in range(2) for batch in plain]
    plain.close()
    device = mesh.Loader(dataset, 8, seed=5, device=ground.device, prefetch_bytes=1 << 20)
    found, place = [], {}
    for batch in device:
        found.append((batch.positions.tolist(), batch["image"].clone()))
        ground.busy(0.002)
        if len(found) == 3:
            place = device.state_dict()
            break
    assert torch.equal(device.at(3)["image"].cpu(), wanted[3][1])
    device.close()
    device = mesh.Loader(dataset, 8, seed=5, device=ground.device)
    device.load_state_dict(place)
    for _ in range(2):
        found += [(batch.positions.tolist(), batch["image"].clone()) for batch in device]
    ground.wait()
    assert [positions for positions, _ in found] == [positions for positions, _ in wanted]
    for (_, here), (_, there) in zip(found, wanted, strict=True):
        assert torch.equal(here.cpu(), there), "a batch on the device differs from the same on the CPU"
    device.close()
    grown = _growth(ground, dataset)
    return f"{len(found)} batches, the same; {grown >> 10} KiB more of the device after ten epochs more"


def _growth(ground: Ground, dataset: mesh.Dataset) -> int:
    """Bytes of the device after ten epochs more than after two."""
    taken = []
    with mesh.Loader(dataset, 8, device=ground.device) as loader:
        for epoch in range(12):
            for batch in loader:
                batch["image"].float().mean()
            ground.wait()
            if epoch in (1, 11):
                taken.append(torch.cuda.memory_reserved(ground.device) if ground.real else 0)
    assert taken[1] <= taken[0] + (32 << 20), f"{(taken[1] - taken[0]) >> 20} MiB more after ten epochs"
    return taken[1] - taken[0]


def nvtx(ground: Ground, dataset: mesh.Dataset) -> str:
    """torch's ranges are found once the GPU is used, and a loop can be run with them."""
    _real(ground)
    found = nvtx_of(torch)
    assert found is not None, "torch has no NVTX, or says it uses no GPU"
    found.range_end(found.range_start("mesh check"))
    with mesh.Loader(dataset, 8, device=ground.device) as loader:
        steps = sum(1 for _ in loader)
    return f"ranges of {steps} steps; look at them with: nsys profile -t nvtx,cuda python -m tests.gpu"


def nvml(ground: Ground) -> str:
    """`mesh top` sees the GPU, its memory, and this process on it."""
    _real(ground)
    seen = read_gpus()
    if find_spec("pynvml") is None:
        raise LeftOut(seen.why)
    assert seen.found, seen.why
    whole = [gpu for gpu in seen.found if not gpu.instance]
    name = torch.cuda.get_device_name(ground.device)
    assert any(name in gpu.name or gpu.name in name for gpu in whole), f"{name} is not among {whole}"
    told = [gpu for gpu in seen.found if os.getpid() in gpu.pids]
    memory = [gpu.memory for gpu in whole if gpu.memory]
    here = (
        f"this process on {told[0].index}" if told else "this process is not told of (a container's numbers)"
    )
    instances, size = len(seen.found) - len(whole), max(memory, default=0) >> 30
    return f"{len(whole)} GPUs, {instances} instances, {size} GiB; {here}"


def settled(ground: Ground) -> str:
    """`mesh doctor` waits for the GPU before it looks at the clock."""
    _real(ground)
    ground.wait()
    ground.busy(0.2)
    began = time.monotonic()
    synchronize_gpu(ground.device)
    took = time.monotonic() - began
    assert 0.1 < took < 1.0, f"{took:.2f} s for work of 0.2 s"
    return f"{1000 * took:.0f} ms for work of 200 ms"


def speed(ground: Ground) -> str:
    """How fast frames of 32 MiB get there, beside a plain copy from pinned memory. No bar."""
    _real(ground)
    lane, size, rounds = ground.lane(), 32 << 20, 32
    arena = Arena(6 * lane.memory.capacity(size), lane.memory)
    stage = DeviceStage(lane)
    frames = [received(arena, step, size) for step in range(4)]
    source = torch.from_numpy(lane.memory.allocate(size))
    target = torch.empty(size, dtype=torch.uint8, device=ground.device)

    def through() -> None:
        for number in range(rounds):
            stage.finish(stage.begin(frames[number % 4], 0))

    def bare() -> None:
        for _ in range(rounds):
            target.copy_(source, non_blocking=True)

    rates = {name: _rate(ground, work, rounds * size) for name, work in (("lane", through), ("bare", bare))}
    stage.close()
    return f"{rates['lane']:.1f} GB/s through the lane, {rates['bare']:.1f} GB/s bare"


def _rate(ground: Ground, work: Callable[[], None], size: int) -> float:
    best = 0.0
    for _ in range(3):
        ground.wait()
        began = time.monotonic()
        work()
        ground.wait()
        best = max(best, size / (time.monotonic() - began) / 1e9)
    return best


Check = Any
WITHOUT: tuple[Check, ...] = (pinned, copies, marks, normalised, other_gpu, settled, nvml, speed)
WITH: tuple[Check, ...] = (training, nvtx)
"""Checks without a daemon, and with one."""


def photographs(client: mesh.Client, count: int = 40) -> mesh.Dataset:
    """A dataset to train on."""
    import cv2

    client.create_bucket("gpu")
    for number in range(count):
        image = np.full((60 + number, 80, 3), (number * 5) % 256, np.uint8)
        client.put("gpu", f"train/{number:03}.jpg", bytes(cv2.imencode(".jpg", image)[1]))
    opened = mesh.open("s3://gpu/train", fields={"image": "jpg"}, client=client)
    return opened.map(ops.decode("image"), ops.random_resized_crop("image", 48), ops.to_chw("image"))
