"""Split frames: each node sends the rows whose bytes it stores, and the client puts them in place.

Law: each part is a frame of its own: `__row`, the position of each row, then the tensors of the whole
frame. Every row comes in exactly one part; otherwise a FrameError is raised and the client requests the
whole frame.
Invariant: joined parts equal, byte for byte, the frame that one node would send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshwire.checksums.crc import crc32c
from meshwire.frame.tensor_frame import PAD_PREFIX, FrameError, frame_layout, header_size, parse_frame_header

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from meshwire.frame.tensor_frame import FrameHeader, FrameLayout, TensorSlot

    Fill = Callable[[memoryview], None]

ROW_TENSOR = "__row"
_PART, _ROWS = "part", "rows"
_SMALL = 16 << 10  # bytes per row; smaller rows are received together and copied


def part_metadata(whole: Mapping[str, str], version: int, rows: int) -> dict[str, str]:
    """Return the metadata of a part: that of the whole frame, the map version it is based on, and the
    number of rows of the whole."""
    return {**whole, _PART: str(version), _ROWS: str(rows)}


def whole_layout(part: FrameHeader, rows: int) -> FrameLayout:
    """Return the layout of the whole frame of `rows` rows, given the header of one of its parts. Raises
    FrameError."""
    if part.metadata.get(_ROWS) != str(rows) or ROW_TENSOR not in part.tensors:
        raise FrameError(f"not a part of a frame of {rows} rows")
    metadata = {name: value for name, value in part.metadata.items() if name not in (_PART, _ROWS)}
    return frame_layout(
        ((slot.name, slot.dtype, (rows, *slot.shape[1:])) for slot in _columns(part)), metadata
    )


def _columns(header: FrameHeader) -> list[TensorSlot]:
    """Return the tensors of a part that also belong to the whole frame. Raises FrameError."""
    count = _count(header)
    found = [
        slot
        for name, slot in header.tensors.items()
        if name != ROW_TENSOR and not name.startswith(PAD_PREFIX)
    ]
    for slot in found:
        if not slot.shape or slot.shape[0] != count:
            raise FrameError(f"tensor {slot.name[:60]!r} of a part does not have one row per position")
    return found


def _count(header: FrameHeader) -> int:
    slot = header.tensors.get(ROW_TENSOR)
    if slot is None or slot.dtype != "I64" or len(slot.shape) != 1:
        raise FrameError("the part does not list its rows")
    return slot.shape[0]


class SplitFrameReader:
    """Assembles a frame of `rows` rows of a step from its parts, in memory that `lease` returns once the
    size is known. Discard it after a FrameError."""

    def __init__(self, rows: int, step: int, lease: Callable[[int], memoryview]) -> None:
        self._rows, self._step, self._lease = rows, str(step), lease
        self._layout: FrameLayout | None = None
        self._frame = memoryview(b"")
        self._taken = np.zeros(rows, dtype=np.bool_)

    def __repr__(self) -> str:
        return f"Joining({int(self._taken.sum())} of {self._rows} rows)"

    @property
    def started(self) -> bool:
        """Whether memory was leased."""
        return self._layout is not None

    def read_part(self, size: int, fill: Fill, *, verify: bool) -> None:
        """Receive a part of `size` bytes; `fill` writes the next bytes into the buffer it is given. Raises
        FrameError and whatever `fill` raises."""
        header = _read_header(size, fill)
        if header.metadata.get("step") != self._step:
            raise FrameError("the part belongs to another step than the requested one")
        sums = header.checksums() if verify else {}
        for name, slot in header.tensors.items():
            if name == ROW_TENSOR:
                places = self._places(header, slot, fill, sums)
            elif name.startswith(PAD_PREFIX) or not slot.nbytes:
                fill(memoryview(bytearray(slot.nbytes)))
            else:
                self._receive(slot, places, fill, sums.get(name))

    def _places(
        self, header: FrameHeader, slot: TensorSlot, fill: Fill, sums: Mapping[str, int]
    ) -> npt.NDArray[np.int64]:
        data = bytearray(slot.nbytes)
        fill(memoryview(data))
        _check(slot, crc32c(data), sums.get(ROW_TENSOR))
        places = np.frombuffer(data, "<i8").astype(np.int64)
        if len(places) and not (places[0] >= 0 and places[-1] < self._rows and (np.diff(places) > 0).all()):
            raise FrameError("the rows of a part are out of order or beyond the end of the frame")
        if self._taken[places].any():
            raise FrameError("a row came in two parts")
        self._taken[places] = True
        found = whole_layout(header, self._rows)
        if not len(places):
            return places
        if self._layout is None:
            self._layout, self._frame = found, self._lease(found.size)
        elif self._layout.header != found.header:
            raise FrameError("two parts belong to different frames")
        return places

    def _receive(
        self, slot: TensorSlot, places: npt.NDArray[np.int64], fill: Fill, expected: int | None
    ) -> None:
        """Receive the rows of a tensor: large rows directly into place, small ones through a buffer."""
        assert self._layout is not None
        width, target = slot.nbytes // len(places), self._layout.tensors[slot.name].offset
        crc = 0
        if width < _SMALL:
            data = bytearray(slot.nbytes)
            fill(memoryview(data))
            crc = crc32c(data)
            rows = np.frombuffer(self._frame, np.uint8, width * self._rows, target).reshape(self._rows, width)
            rows[places] = np.frombuffer(data, np.uint8).reshape(-1, width)
        else:
            for place in places.tolist():
                row = self._frame[target + place * width : target + (place + 1) * width]
                fill(row)
                crc = crc32c(row, crc) if expected is not None else 0
        _check(slot, crc, expected)

    def tensor_views(self) -> tuple[dict[str, npt.NDArray[Any]], int]:
        """Return the whole frame: its tensors by name, as views of the memory, and its size in bytes.
        Raises FrameError if rows are missing."""
        if self._layout is None or not self._taken.all():
            raise FrameError(f"{self!r}: no node sent the missing rows")
        return {
            name: slot.view(self._frame) for name, slot in self._layout.tensors.items()
        }, self._layout.size


def _read_header(size: int, fill: Fill) -> FrameHeader:
    first = bytearray(8)
    if size < len(first):
        raise FrameError("the part is too short to be a frame")
    fill(memoryview(first))
    length = header_size(first)
    if length > size:
        raise FrameError("the part ends inside its header")
    text = bytearray(length)
    text[:8] = first
    fill(memoryview(text)[8:])
    header = parse_frame_header(text)
    if header.size != size or next(iter(header.tensors), "") != ROW_TENSOR:
        raise FrameError(
            "the part does not have its stated size, or does not begin with the positions of its rows"
        )
    _columns(header)
    return header


def _check(slot: TensorSlot, crc: int, expected: int | None) -> None:
    if expected is not None and crc != expected:
        raise FrameError(f"tensor {slot.name[:60]!r} of a part does not match its checksum")
