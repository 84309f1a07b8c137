"""The op `zarr_window`: a window of a Zarr array, put together from the chunks that it touches.

Law: a window equals the same slice of the whole array, whatever the chunks are. Sizes are known before a
chunk is decoded, and nothing larger is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.transform.builtin.text import check_bytes
from meshd.transform.builtin.zarr_codecs import decode_chunk, require_codecs
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import FieldType
from meshd.transform.parameters import Parameter, with_description
from meshd.transform.registry import operation
from meshwire.formats.zarr_window_layout import ABSENT, parse_window_layout

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshwire.formats.zarr_window_layout import WindowLayout
    from meshwire.plan.keyed_random import KeyedRandom

_layout = with_description(parse_window_layout, "the layout that `mesh.open_zarr` computes")


@operation(
    "zarr_window",
    Parameter("layout", _layout),
    takes="bytes of a window, from a dataset of mesh.open_zarr",
    gives="the numbers in the window, or what they stand for (scale, offset, missing values)",
    refuses="damaged, or of another size than the metadata says",
)
@dataclass(frozen=True, slots=True)
class ZarrWindow:
    """A window of a variable of a Zarr array (version 2 or 3, or references to a NetCDF or HDF5 file), put
    together from the chunks that it touches. `mesh.open_zarr` adds it."""

    layout: WindowLayout

    def __post_init__(self) -> None:
        require_codecs(self.layout.codecs)

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return FieldType("array", self.layout.dtype, self.layout.window)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        layout = self.layout
        head, axes = layout.header_bytes, len(layout.window)
        if len(value) < head:
            raise BadSampleError(f"a window of {len(value)} bytes has no header of {head}")
        header = np.frombuffer(value, "<i8", axes + layout.slots)
        starts, lengths = header[:axes], header[axes:]
        room = np.multiply(layout.counts, layout.chunk)
        if (starts < 0).any() or (starts + layout.window > room).any() or (lengths < ABSENT).any():
            raise BadSampleError("the header of a window is damaged")
        found = np.full(layout.window, layout.fill, np.dtype(layout.stored).newbyteorder("="))
        at = head
        for place, length in zip(product(*map(range, layout.counts)), lengths.tolist(), strict=True):
            part = value[at : at + (head if length == ABSENT else length)]
            at += len(part)
            if length != ABSENT:
                self._copy(found, place, starts, part)
        if at != len(value):
            raise BadSampleError(f"a window of {len(value)} bytes; its header says {at}")
        return self._meaning(found)

    def _copy(self, window: npt.NDArray[Any], place: tuple[int, ...], starts: Any, part: bytes) -> None:
        """Copy what the window shares with the chunk at `place` of the grid."""
        inside, outside = [], []
        for number, extent, start, size in zip(
            place, self.layout.chunk, starts.tolist(), window.shape, strict=True
        ):
            low, high = max(start, number * extent), min(start + size, (number + 1) * extent)
            if low >= high:
                return
            inside.append(slice(low - number * extent, high - number * extent))
            outside.append(slice(low - start, high - start))
        window[tuple(outside)] = self._chunk(part)[tuple(inside)]

    def _chunk(self, part: bytes) -> npt.NDArray[Any]:
        layout = self.layout
        kind = np.dtype(layout.stored)
        size = int(np.prod(layout.chunk, dtype=np.int64)) * kind.itemsize
        numbers = np.frombuffer(decode_chunk(layout.codecs, part, size), kind)
        stored = numbers.reshape([layout.chunk[axis] for axis in layout.axes])
        return stored.transpose(np.argsort(layout.axes))

    def _meaning(self, found: npt.NDArray[Any]) -> npt.NDArray[Any]:
        layout = self.layout
        if np.dtype(layout.dtype).kind != "f":
            return found.astype(layout.dtype, copy=False)
        lost = np.isin(found, layout.missing) if layout.missing else None
        if (layout.scale, layout.offset) != (1.0, 0.0):
            found = found.astype(np.float64) * layout.scale + layout.offset
        made = found.astype(layout.dtype)
        if lost is not None:
            made[lost] = np.nan
        return made
