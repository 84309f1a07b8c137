"""Batches: received frames as fields by name, ragged fields, plain dictionaries, and single rows.

Law: fields are views of the frame's memory, never copies; holding a batch, a tensor or a slice keeps its
arena slot. A frame is accepted only if its layout, length, step and, if requested, its checksums are right.
Invariant: every field of a batch has `rows` rows, in the order of `positions`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from opcode import opmap
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from meshsdk.client.arena import no_memory
from meshsdk.client.native_api import rows_request
from meshsdk.errors import ConfigurationError, CorruptFrameError, MeshError
from meshwire.frame import tensor_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    import numpy.typing as npt

    from meshsdk.client.http_connection import Response
    from meshsdk.client.transport import Transport
    from meshsdk.loader_stats import Arrival


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame.

    `arrays` are views of its lease, `nbytes` is its size; `origin` is how the node obtained it (hit, joined,
    miss), and `arrival` has the times of its request.
    """

    step: int
    arrays: Mapping[str, npt.NDArray[Any]]
    nbytes: int
    origin: str = ""
    arrival: Arrival | None = None


def open_frame(view: memoryview, step: int, *, verify: bool, origin: str = "") -> Frame:
    """Parse the frame in `view`.

    Raises CorruptFrameError if its layout, length, step or a checksum is wrong, and MeshError for a frame of
    another version.
    """
    try:
        header = tensor_frame.parse_frame_header(view)
        _check_version(header.metadata.get("version", tensor_frame.FRAME_VERSION))
        if header.size != len(view) or header.metadata.get("step", str(step)) != str(step):
            raise CorruptFrameError(f"step {step}: the frame has another size or step than was requested")
        if verify:
            tensor_frame.verify_frame(view, header)  # awscrt releases the GIL for this
        return Frame(step, tensor_frame.tensor_views(view, header), len(view), origin)
    except tensor_frame.FrameError as error:
        raise CorruptFrameError(f"step {step}: {error}") from error


def _check_version(version: str) -> None:
    """Raise MeshError, which is not retried, for a frame of another version."""
    if version != tensor_frame.FRAME_VERSION:
        from meshwire.http_values.mesh_headers import RELEASE  # needed for this error only

        raise MeshError(
            f"the node sends frames of version {version[:20]}, but this SDK (release {RELEASE}) reads "
            f"version {tensor_frame.FRAME_VERSION}: upgrade shardmesh on this machine to the node's release"
        )


def read_frame(response: Response, step: int = 0, *, verify: bool = True) -> Frame:
    """Read a whole frame into newly allocated memory.

    Raises CorruptFrameError, after which the transport requests it again.
    """
    if not response.length:
        raise CorruptFrameError("the response has no Content-Length")
    try:
        memory = np.empty(response.length, np.uint8)
    except (MemoryError, ValueError) as error:
        raise no_memory(response.length) from error
    view = memory.data
    response.readinto(view)
    return open_frame(view, step, verify=verify, origin=response.headers.get("x-mesh-frame", ""))


_DATA, _OFFSETS, _SHAPES = ".data", ".offsets", ".shapes"
_UNPACK = opmap.get("UNPACK_SEQUENCE", -1)


_UNEQUAL = (
    "its rows have unequal lengths. Make them equal on the nodes (ops.resize, ops.center_crop, ops.pad_to), "
    "or use ragged[row], ragged.padded(), ragged.data and ragged.offsets"
)

_FILES = (
    ". If they are the bytes of files, map an op that reads them: ops.decode for images, ops.int_label for "
    "numbers, ops.text_label for class names, ops.json for a value of JSON"
)


@dataclass(frozen=True, slots=True, repr=False)
class Ragged:
    """A field whose rows have unequal lengths: `ragged[i]` is the view `data[offsets[i]:offsets[i+1]]`.

    `len(ragged)` counts the rows, and iterating yields them.

    Attributes:
        data: the elements of all rows, concatenated: [elements].
        offsets: int64[rows + 1], where each row begins, in elements.
        shapes: int64[rows, dimensions] in host memory if rows have more than one dimension; else None.
    """

    data: Any
    offsets: Any
    shapes: Any = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Any:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"no row {index}: the field has {count}")
        index %= count
        row = self.data[int(self.offsets[index]) : int(self.offsets[index + 1])]
        return row if self.shapes is None else row.reshape(tuple(self.shapes[index].tolist()))

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def padded(self, value: float = 0, length: int | None = None) -> tuple[Any, Any]:
        """Return (dense, counts): the rows as one tensor or array [rows, length, …], and int64[rows].

        `dense` is a copy, with `value` after the `counts[i]` elements of row i along its first axis.

        Arguments:
            value: what fills the rows.
            length: of the result. Default: the longest row.

        Raises ConfigurationError for a longer row, or if rows differ along another axis.
        """
        inner: tuple[int, ...] = ()
        if self.shapes is None:
            counts = np.diff(np.asarray(self._on_host(self.offsets)))
        else:
            filled = self.shapes[self.shapes.prod(1) > 0]  # a masked row has no other extent
            inner = tuple((filled[:1] if len(filled) else self.shapes).max(0, initial=0)[1:].tolist())
            if (filled[:, 1:] != np.array(inner, np.int64)).any():
                raise ConfigurationError(f"cannot pad rows that differ beyond their first axis: {_UNEQUAL}")
            counts = self.shapes[:, 0]
        longest = int(counts.max(initial=0))
        wide = longest if length is None else length
        if longest > wide:
            raise ConfigurationError(f"a row has {longest} elements, more than length={wide}: ops.truncate")
        places = np.arange(wide) < counts[:, None]
        shape = (len(self), wide, *inner)
        if isinstance(self.data, np.ndarray):
            made: Any = np.full(shape, value, self.data.dtype)
        else:
            torch = sys.modules["torch"]
            made, places = self.data.new_full(shape, value), torch.from_numpy(places).to(self.data.device)
            counts = torch.from_numpy(counts.astype(np.int64)).to(self.data.device)
        if len(self.data):
            made[places] = self.data.reshape(-1, *inner)
        return made, counts

    @staticmethod
    def _on_host(array: Any) -> Any:
        return array if isinstance(array, np.ndarray) else array.cpu()

    def __repr__(self) -> str:
        lengths = self.offsets[1:] - self.offsets[:-1]
        span = f", {int(lengths.min())} to {int(lengths.max())} elements each" if len(self) else ""
        return f"Ragged({len(self)} rows of {self.data.dtype}{span})"

    if not TYPE_CHECKING:  # otherwise type checkers would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, which explains that a ragged field is not a tensor."""
            hint = "" if name.startswith("_") else f": {_UNEQUAL}"
            if hint and self.shapes is None and str(self.data.dtype).rpartition(".")[2] == "uint8":
                hint += _FILES
            raise AttributeError(f"a Ragged has no attribute {name!r}{hint}", name=name, obj=self)


class Batch(Mapping[str, Any]):
    """This rank's rows of one global batch: a mapping from field names to tensors.

    `batch["image"]` is a tensor or array [rows, …], or a Ragged; `batch["image", "label"]` is a tuple of two.
    Like any mapping, a batch iterates over its names.

    A batch, a tensor or a slice of one keeps its slot in the loader's arena for as long as it is referenced;
    a `.clone()` does not.

    Attributes:
        positions: int64[rows], positions of the rows in the epoch; a copy in host memory.
        status: uint8[rows], 0 ok, 1 substituted, 2 masked, 3 padding; a copy in host memory.
        epoch: epoch of the rows, from 0.
        step: step in the epoch, counted from the loader's origin. The origin is the beginning of the epoch,
            unless the epoch was resumed with another batch size.
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
        """The number of samples in the batch, of this rank."""
        return len(self.positions)

    def __getitem__(self, name: str | tuple[str, ...]) -> Any:
        """Return a field; for several names a tuple, in their order. Raises KeyError."""
        if isinstance(name, tuple):
            return tuple(self[each] for each in name)
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; this batch has {', '.join(self._fields)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """Return the batch with its tensors on a torch device; positions and status stay in host memory.

        Trainers call this to move their inputs. A Loader with `device="cuda"` is faster: it copies ahead of
        time, from pinned memory. Raises ConfigurationError for numpy arrays.
        """
        moved = {name: _move_to_device(value, device, non_blocking) for name, value in self._fields.items()}
        return Batch(moved, self.positions, self.status, self.epoch, self.step)

    if not TYPE_CHECKING:  # as in Ragged

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError, with a hint for code that expects a tensor or attribute access."""
            hint = ""
            if not name.startswith("_"):
                if name in self._fields:
                    hint = f": write batch[{name!r}]"
                elif name in ("cuda", "pin_memory"):
                    hint = ": pass device='cuda' to the Loader, or write batch.to('cuda')"
            raise AttributeError(f"a Batch has no attribute {name!r}{hint}", name=name, obj=self)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the field names. Warns if the batch is unpacked like a tuple of tensors."""
        if is_unpacking(sys._getframe(1)):
            warnings.warn(_unpack_hint(tuple(self._fields)), stacklevel=2)
        return iter(self._fields)

    def __len__(self) -> int:
        """The number of fields, as for any mapping; `rows` counts the samples."""
        return len(self._fields)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {_shape(value)}" for name, value in self._fields.items())
        flagged = int((self.status != 0).sum())
        rows = f"{self.rows} ({flagged} flagged)" if flagged else str(self.rows)
        return f"Batch(epoch={self.epoch}, step={self.step}, rows={rows}, {shapes})"


def is_unpacking(frame: FrameType) -> bool:
    """Return whether `frame` is currently unpacking an iterable into two or more names (`a, b = batch`).

    It reads the caller's bytecode. This is for advice only: an interpreter or a debugger may hide it.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    return 0 <= at < len(code) - 1 and code[at] == _UNPACK and code[at + 1] >= 2


def _move_to_device(value: Any, device: Any, non_blocking: bool) -> Any:
    if isinstance(value, Ragged):
        data, offsets = (_move_to_device(each, device, non_blocking) for each in (value.data, value.offsets))
        return Ragged(data, offsets, value.shapes)
    if not hasattr(value, "to"):
        raise ConfigurationError(
            "numpy arrays stay in host memory: pass output='torch' to the Loader to get tensors"
        )
    return value.to(device, non_blocking=non_blocking)


def _unpack_hint(fields: tuple[str, ...]) -> str:
    """Return the warning that says what to write instead of `for images, labels in loader`."""
    named = ", ".join(f'"{name}"' for name in fields)
    return (
        f"a Batch is a mapping: unpacking it gives the names of its fields ({named}), not their tensors. "
        f"Write `for ... in loader.as_tuples({named})`, or `batch[{named}]`, in the order you need"
    )


def _shape(value: Any) -> str:
    if isinstance(value, Ragged):
        return f"ragged {value.data.dtype} [{len(value)}]"
    return f"{value.dtype} {list(value.shape)}"


def split_frame(arrays: Mapping[str, Any], convert: Callable[[Any], Any]) -> tuple[dict[str, Any], Any, Any]:
    """Return (fields, positions, status) of a frame's tensors; `convert` is applied to the fields' arrays."""
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
    """Make the batch of a frame. Positions and status are copied: they are small and must not keep a slot."""
    fields, positions, status = split_frame(frame.arrays, convert)
    return Batch(fields, positions.copy(), status.copy(), epoch, frame.step)


POSITIONS, STATUS = "__pos", "__status"


def as_dict(batch: Batch) -> dict[str, Any]:
    """Return the batch as a plain dict: the fields in their order, then "__pos" and "__status".

    A ragged field becomes `NAME.data`, `NAME.offsets` and, if its rows have several dimensions,
    `NAME.shapes`. Nothing is copied.
    """
    plain: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(value, Ragged):
            plain[name] = value
            continue
        plain[f"{name}.data"], plain[f"{name}.offsets"] = value.data, value.offsets
        if value.shapes is not None:
            plain[f"{name}.shapes"] = value.shapes
    return {**plain, POSITIONS: batch.positions, STATUS: batch.status}


def as_tuple(batch: Batch, names: Sequence[str]) -> tuple[Any, ...]:
    """Return these fields of a batch as a tuple; "__pos" and "__status" are its positions and status."""
    rows = {POSITIONS: batch.positions, STATUS: batch.status}
    return tuple(rows[name] if name in rows else batch[name] for name in names)


_ROWS_A_REQUEST = 512


def fetch_rows(transport: Transport, plan: str, epoch: int, samples: Sequence[int]) -> list[dict[str, Any]]:
    """Fetch rows of a plan by sample index in stored order, each as a dict of numpy arrays and scalars."""
    rows: list[dict[str, Any]] = []
    for start in range(0, len(samples), _ROWS_A_REQUEST):
        asked = samples[start : start + _ROWS_A_REQUEST]
        frame = transport.call(rows_request(plan, epoch, asked), read_frame)
        fields, _, _ = split_frame(frame.arrays, lambda array: array)
        rows += [{name: _row(value, row) for name, value in fields.items()} for row in range(len(asked))]
    return rows


def _row(value: Any, row: int) -> Any:
    if isinstance(value, Ragged):
        return value[row]
    picked = value[row]
    return picked if isinstance(picked, np.ndarray) else picked[()]
