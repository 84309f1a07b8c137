"""Batches: received frames as fields by name, ragged fields, and single rows.

Law: fields are views of the frame's memory, never copies; holding a batch, a tensor or a slice keeps its
slot. A frame is accepted only if layout, length, step and, where requested, checksums are right.
Invariant: every field of a batch has `rows` rows, in the order of `positions`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from meshsdk.client.native_api import rows_request
from meshsdk.errors import ConfigurationError, CorruptFrameError, MeshError
from meshwire.frame import tensor_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from meshsdk.client.http_connection import Response
    from meshsdk.client.transport import Transport
    from meshsdk.meters import Arrival


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame: `arrays` are views of its lease. `origin` is how the node came by it: hit, joined,
    miss; `arrival` tells when what happened.
    """

    step: int
    arrays: Mapping[str, npt.NDArray[Any]]
    nbytes: int
    origin: str = ""
    arrival: Arrival | None = None


def open_frame(view: memoryview, step: int, *, verify: bool, origin: str = "") -> Frame:
    """The frame in `view`; raises CorruptFrameError when its layout, length or a checksum is wrong."""
    try:
        header = tensor_frame.parse_frame_header(view)
        _check_version(header.metadata.get("version", tensor_frame.FRAME_VERSION))
        if header.size != len(view) or header.metadata.get("step", str(step)) != str(step):
            raise CorruptFrameError(f"step {step}: a frame of another size or step than was asked for")
        if verify:
            tensor_frame.verify_frame(view, header)  # awscrt lets other threads run meanwhile
        return Frame(step, tensor_frame.tensor_views(view, header), len(view), origin)
    except tensor_frame.FrameError as error:
        raise CorruptFrameError(f"step {step}: {error}") from error


def _check_version(version: str) -> None:
    """Raises MeshError: to ask again would not help."""
    if version != tensor_frame.FRAME_VERSION:
        from meshwire.http_values.mesh_headers import RELEASE  # only who is refused asks

        raise MeshError(
            f"the node's frames are of version {version[:20]}, this SDK (release {RELEASE}) reads version "
            f"{tensor_frame.FRAME_VERSION}: upgrade shardmesh here to the node's release"
        )


def read_frame(response: Response, step: int = 0, *, verify: bool = True) -> Frame:
    """A frame read whole into memory of its own; raises CorruptFrameError (asked for again by the
    transport).
    """
    if not response.length:
        raise CorruptFrameError("the answer has no Content-Length")
    memory = np.empty(response.length, np.uint8)
    view = memory.data
    response.readinto(view)
    return open_frame(view, step, verify=verify, origin=response.headers.get("x-mesh-frame", ""))


_DATA, _OFFSETS, _SHAPES = ".data", ".offsets", ".shapes"


_UNEQUAL = (
    "its rows are of unequal length. Make them equal on the nodes (ops.resize, ops.center_crop, ops.pad_to), "
    "or take ragged[row], ragged.data and ragged.offsets"
)


@dataclass(frozen=True, slots=True, repr=False)
class Ragged:
    """Rows of unequal length: `ragged[i]` is `data[offsets[i]:offsets[i+1]]`, a view.

    Attributes:
        data: all rows' elements one after the other, [elements].
        offsets: int64[rows + 1], in elements.
        shapes: where rows have more than one dimension, int64[rows, dimensions], in host memory; else None.
    """

    data: Any
    offsets: Any
    shapes: Any = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Any:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"row {index} of {count}")
        index %= count
        row = self.data[int(self.offsets[index]) : int(self.offsets[index + 1])]
        return row if self.shapes is None else row.reshape(tuple(self.shapes[index].tolist()))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        lengths = self.offsets[1:] - self.offsets[:-1]
        span = f", {int(lengths.min())} to {int(lengths.max())} elements each" if len(self) else ""
        return f"Ragged({len(self)} rows of {self.data.dtype}{span})"

    if not TYPE_CHECKING:  # or checkers would let every name pass

        def __getattr__(self, name: str) -> NoReturn:
            """Only what is not there: it is no tensor."""
            hint = "" if name.startswith("_") else f": {_UNEQUAL}"
            raise AttributeError(f"a Ragged has no attribute {name!r}{hint}", name=name, obj=self)


class Batch(Mapping[str, Any]):
    """This rank's rows of one global batch, a mapping: `batch["image"]` is a tensor or array [rows, …], or a
    Ragged; `batch["image", "label"]` is a tuple of two. As of any mapping, iterating it gives names.

    Keeping a batch, a tensor or a slice of one keeps its slot of the loader's arena; `.clone()` does not.

    Attributes:
        positions: int64[rows], which positions of the epoch; in host memory, a copy.
        status: uint8[rows], 0 ok, 1 substituted, 2 masked, 3 pad; in host memory, a copy.
        epoch: of the rows, from 0.
        step: from the loader's origin on (the epoch's beginning, unless it was resumed with another batch
        size).
    """

    __slots__ = ("_fields", "epoch", "positions", "status", "step")

    def __init__(self, fields: Mapping[str, Any], positions: Any, status: Any, epoch: int, step: int) -> None:
        self._fields = fields
        self.positions = positions
        self.status = status
        self.epoch = epoch
        self.step = step

    @property
    def rows(self) -> int:
        """Samples in it, of this rank."""
        return len(self.positions)

    def __getitem__(self, name: str | tuple[str, ...]) -> Any:
        """A field; of several names a tuple, in their order. Raises KeyError."""
        if isinstance(name, tuple):
            return tuple(self[each] for each in name)
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; this batch has {', '.join(self._fields)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """This batch with its tensors on a device of torch's, as trainers move what they are given; positions
        and status stay in host memory. A Loader with `device="cuda"` copies ahead instead, from pinned
        memory.

        Raises ConfigurationError for arrays.
        """
        moved = {name: _moved(value, device, non_blocking) for name, value in self._fields.items()}
        return Batch(moved, self.positions, self.status, self.epoch, self.step)

    if not TYPE_CHECKING:  # as of Ragged

        def __getattr__(self, name: str) -> NoReturn:
            """Only what is not there: a batch is no tuple of tensors, and no tensor."""
            hint = ""
            if not name.startswith("_"):
                if name in self._fields:
                    hint = f": write batch[{name!r}]"
                elif name in ("cuda", "pin_memory"):
                    hint = ": a Loader with device='cuda' has batches there; else write batch.to('cuda')"
            raise AttributeError(f"a Batch has no attribute {name!r}{hint}", name=name, obj=self)

    def __iter__(self) -> Iterator[str]:
        """The fields' names. Warns where they are unpacked, as tensors of a tuple would be."""
        from meshsdk.datasets.unpack_warning import is_unpacking  # a loop over batches never asks

        if is_unpacking(sys._getframe(1)):
            warnings.warn(_unpacked(tuple(self._fields)), stacklevel=2)
        return iter(self._fields)

    def __len__(self) -> int:
        """The number of fields, as of any mapping; `rows` counts the samples."""
        return len(self._fields)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {_shape(value)}" for name, value in self._fields.items())
        flagged = int((self.status != 0).sum())
        rows = f"{self.rows} ({flagged} flagged)" if flagged else str(self.rows)
        return f"Batch(epoch={self.epoch}, step={self.step}, rows={rows}, {shapes})"


def _moved(value: Any, device: Any, non_blocking: bool) -> Any:
    if isinstance(value, Ragged):
        data, offsets = (_moved(each, device, non_blocking) for each in (value.data, value.offsets))
        return Ragged(data, offsets, value.shapes)
    if not hasattr(value, "to"):
        raise ConfigurationError(
            "arrays of numpy stay in host memory: a Loader with output='torch' has tensors"
        )
    return value.to(device, non_blocking=non_blocking)


def _unpacked(fields: tuple[str, ...]) -> str:
    """What to write in place of `for images, labels in loader`."""
    named = ", ".join(f'"{name}"' for name in fields)
    return (
        f"a Batch is a mapping: unpacked, it gives the names of its fields ({named}), not their tensors. "
        f"Write `for ... in loader.as_tuples({named})`, or `batch[{named}]`, in the order you want"
    )


def _shape(value: Any) -> str:
    if isinstance(value, Ragged):
        return f"ragged {value.data.dtype} [{len(value)}]"
    return f"{value.dtype} {list(value.shape)}"


def split_frame(arrays: Mapping[str, Any], convert: Callable[[Any], Any]) -> tuple[dict[str, Any], Any, Any]:
    """(fields, positions, status) of a frame's tensors; `convert` is applied to the fields' arrays."""
    fields: dict[str, Any] = {}
    for name, array in arrays.items():
        stem, _, part = name.rpartition(".")
        ragged = stem + _DATA in arrays and stem + _OFFSETS in arrays
        if name.startswith("__") or (ragged and part in ("offsets", "shapes")):
            continue
        if ragged and part == "data":
            shapes = arrays.get(stem + _SHAPES)
            kept = None if shapes is None else shapes.copy()
            fields[stem] = Ragged(convert(array), convert(arrays[stem + _OFFSETS]), kept)
        else:
            fields[name] = convert(array)
    return fields, arrays["__pos"], arrays["__status"]


def make_batch(frame: Frame, epoch: int, convert: Callable[[Any], Any]) -> Batch:
    """The batch of a frame. Positions and status are copied: they are small, and must not keep a slot."""
    fields, positions, status = split_frame(frame.arrays, convert)
    return Batch(fields, positions.copy(), status.copy(), epoch, frame.step)


_ROWS_A_REQUEST = 512


def fetch_rows(transport: Transport, plan: str, epoch: int, samples: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of a plan, by number of sample: numpy arrays and scalars by field."""
    rows: list[dict[str, Any]] = []
    for start in range(0, len(samples), _ROWS_A_REQUEST):
        rows += _fetched(transport, plan, epoch, samples[start : start + _ROWS_A_REQUEST])
    return rows


def _fetched(transport: Transport, plan: str, epoch: int, samples: Sequence[int]) -> list[dict[str, Any]]:
    frame = transport.call(rows_request(plan, epoch, samples), read_frame)
    fields, _, _ = split_frame(frame.arrays, lambda array: array)
    return [{name: _row(value, row) for name, value in fields.items()} for row in range(len(samples))]


def _row(value: Any, row: int) -> Any:
    if isinstance(value, Ragged):
        return value[row]
    picked = value[row]
    return picked if isinstance(picked, np.ndarray) else picked[()]
