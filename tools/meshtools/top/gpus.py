"""GPUs of this machine, read from NVIDIA's management library (NVML); MIG instances separately.

Seam: `Nvml` is the part of the library in use, as `pynvml` (package nvidia-ml-py) spells it; tests use a
recorded one.
Law: a value that the GPU does not support is None, never a guess. Not run with a driver: no GPU was
available.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
_TEMPERATURE: Final = 0  # NVML_TEMPERATURE_GPU
_MOST: Final = 64


class Nvml(Protocol):
    """Functions of NVML; all raise `NVMLError`."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> Any: ...
    def nvmlShutdown(self) -> Any: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> Any: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Gpu:
    """`index`: 0, 1, …, or 0:2 for an instance of a GPU that MIG divides; `busy`: share of the time in which
    a kernel ran, 0…1; memory in bytes, power in watts, temperature in °C; `pids`: processes that compute
    on it."""

    index: str
    name: str
    uuid: str
    busy: float | None
    used: int | None
    memory: int | None
    watts: float | None
    celsius: int | None
    pids: tuple[int, ...] = ()
    instance: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"pids": list(self.pids)}


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of this machine, or the reason why they cannot be read."""

    found: tuple[Gpu, ...]
    why: str = ""


def read_gpus(nvml: Nvml | None = None) -> Gpus:
    """Reads the GPUs; opens the library and closes it."""
    if nvml is None:
        try:
            nvml = cast("Nvml", import_module("pynvml"))
        except ImportError:
            return Gpus((), "nvidia-ml-py is not installed: run pip install 'shardmesh[gpu]'")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus((), f"no NVIDIA driver answers ({error})")
    try:
        return Gpus(tuple(_all(nvml)))
    except nvml.NVMLError as error:
        return Gpus((), f"the NVIDIA driver fails ({error})")
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _all(nvml: Nvml) -> list[Gpu]:
    found = []
    for number in range(min(nvml.nvmlDeviceGetCount(), _MOST)):
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        instances = _instances(nvml, handle, number)
        found += [_gpu(nvml, handle, str(number)), *instances]
    return found


def _instances(nvml: Nvml, handle: Any, number: int) -> list[Gpu]:
    mode = _ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if not mode:
        return []
    found = []
    for place in range(min(_ask(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0, _MOST)):
        instance = _ask(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place))
        if instance is not None:  # an unused slot
            found.append(_gpu(nvml, instance, f"{number}:{place}", instance=True))
    return found


def _gpu(nvml: Nvml, handle: Any, index: str, *, instance: bool = False) -> Gpu:
    memory = _ask(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    rates = _ask(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    power = _ask(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    processes = _ask(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    return Gpu(
        index,
        _text(_ask(nvml, lambda: nvml.nvmlDeviceGetName(handle))),
        _text(_ask(nvml, lambda: nvml.nvmlDeviceGetUUID(handle))),
        None if rates is None else rates.gpu / 100,
        None if memory is None else int(memory.used),
        None if memory is None else int(memory.total),
        None if power is None else power / 1000,
        _ask(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE)),
        tuple(sorted(int(process.pid) for process in processes)),
        instance,
    )


def _ask(nvml: Nvml, ask: Callable[[], T]) -> T | None:
    """Returns the answer; None if this GPU does not support the request."""
    try:
        return ask()
    except nvml.NVMLError:
        return None


def _text(found: str | bytes | None) -> str:
    """Returns a name as text: older versions of the package return bytes."""
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found or "?"
