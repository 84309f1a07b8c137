"""The ops `decode_dicom` and `dicom_volume`: pixels of DICOM files, and DICOM series as volumes.

Law: the slices of a series are in the order of its parts, and all have the same size. The slices of a volume,
and the frames of a file, are treated as frames of a video: image ops transform all of them alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshd.transform.builtin.dicom_files import FORMATS, DicomReader, load_library
from meshd.transform.builtin.text import check_bytes
from meshd.transform.errors import BadSampleError
from meshd.transform.op_types import image
from meshd.transform.parameters import (
    Parameter,
    choice,
    dtype,
    dtype_or_none,
    flag,
    whole,
    whole_or_none,
    with_description,
)
from meshd.transform.registry import operation
from meshd.transform.video_frames import MAX_VIDEO_BYTES, changed_frames, fuse_frames, stack_frames, video
from meshwire.strict_json import PlanError, checked_number, shown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from meshd.transform.builtin.dicom_files import Values
    from meshd.transform.op_types import FieldType
    from meshd.transform.registry import Operation
    from meshd.transform.video_frames import FrameOp
    from meshwire.plan.keyed_random import KeyedRandom

MAX_SLICES = 4096
_MISSING = -1


def _window(value: Any, path: str) -> tuple[float, float] | None:
    """[center, width] of the window on display, or null."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise PlanError(path, f"expected [center, width] or null, got {shown_value(value)}")
    return checked_number(value[0], path, -1e9, 1e9), checked_number(value[1], path, 1e-6, 1e9)


def _bool_or_none(value: Any, path: str) -> bool | None:
    """true, false or null."""
    return None if value is None else flag(value, path)


_VALUES = Parameter("values", choice("modality", "stored", "display"), "modality")
_WINDOW = Parameter("window", _window, None)


def _delivered_dtype(values: Values, stored: str, channels: int) -> str:
    """Return the dtype that is delivered of files with such values."""
    if channels == 3 or values == "display":
        return "uint8"
    return "float32" if values == "modality" else stored


def _frame(
    reader: DicomReader, number: int, values: Values, dtype: str, window: tuple[float, float] | None
) -> npt.NDArray[Any]:
    if values == "stored" or reader.channels == 3:
        found = reader.stored(number)
    elif values == "display":
        found = reader.display(number, window)
    else:
        found = reader.modality(number).astype(np.float32)
    if found.dtype != dtype:
        raise BadSampleError(f"values of {found.dtype}, the plan says {dtype}")
    return found


@operation(
    "decode_dicom",
    _VALUES,
    _WINDOW,
    Parameter("frames", _bool_or_none, None),
    Parameter("dtype", dtype_or_none, None),
    Parameter("channels", whole_or_none(1, 3), None),
    takes=f"bytes of {FORMATS}",
    gives="an image: `dtype` [h, w, `channels`]; with `frames`, a video: [frames, h, w, `channels`]",
    refuses="not such a file, truncated, deflated, or in a transfer syntax without a decoder; "
    "colours of more than 8 bits; another dtype or number of channels; several frames, without `frames`",
)
@dataclass(frozen=True, slots=True)
class DecodeDicom:
    """The pixels of a DICOM file. "modality": in the units of the modality, such as Hounsfield units, as
    float32 (rescale slope and intercept, of each frame its own, or a LUT); "stored": as stored; "display":
    uint8 as a viewer shows them, through `window` or the file's own, with MONOCHROME1 inverted. Colours are
    RGB of uint8. With `frames`, all frames in the file's order. Without `frames`, `dtype` and `channels`, a
    plan takes them from the dataset's first sample."""

    values: Values
    window: tuple[float, float] | None
    frames: bool | None
    dtype: str | None
    channels: int | None

    def __post_init__(self) -> None:
        load_library()

    @staticmethod
    def complete(args: Mapping[str, Any], first: Callable[[], bytes]) -> dict[str, Any]:
        """Return the arguments, with frames, dtype and channels of the first sample unless given.

        Raises BadSampleError.
        """
        given = {name: value for name, value in args.items() if value is not None}
        if {"frames", "dtype", "channels"} <= given.keys():
            return given
        reader = DicomReader(first())
        delivered = _delivered_dtype(given.get("values", "modality"), reader.dtype, reader.channels)
        return {"frames": reader.frames > 1, "dtype": delivered, "channels": reader.channels} | given

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        if self.frames is None or self.dtype is None or self.channels not in (1, 3):
            raise ValueError('needs frames, dtype and channels here, such as false, "float32" and 1')
        size = (None, None, self.channels)
        return video((None,), size, self.dtype) if self.frames else image(*size, dtype=self.dtype)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        return self.decode(value, random, ())

    def decode(self, value: bytes, random: KeyedRandom, following: Sequence[FrameOp]) -> npt.NDArray[Any]:
        """See `FramesDecoder.decode`."""
        assert self.dtype is not None
        reader, dtype = DicomReader(value), self.dtype
        if reader.channels != self.channels:
            raise BadSampleError(f"it has {reader.channels} channels, the plan says {self.channels}")
        if not self.frames and reader.frames > 1:
            raise BadSampleError(f"it has {reader.frames} frames: pass frames=True")
        made = (_frame(reader, number, self.values, dtype, self.window) for number in range(reader.frames))
        if not self.frames:
            return next(made)
        return stack_frames(changed_frames(made, following, random), reader.frames)

    def fuse(self, following: Operation) -> Operation | None:
        return fuse_frames(self, following) if self.frames else None


def _plain(data: bytes) -> DicomReader:
    """Open a slice. Raises BadSampleError."""
    reader = DicomReader(data)
    if reader.channels != 1 or reader.frames != 1:
        raise BadSampleError("has colours or several frames")
    return reader


def _size(value: Any, path: str) -> tuple[int | None, int | None]:
    """[rows, columns], with null for what differs between samples."""
    if not isinstance(value, list) or len(value) != 2:
        raise PlanError(path, f"expected [rows, columns], got {shown_value(value)}")
    rows, columns = (whole_or_none(1, 1 << 16)(item, path) for item in value)
    return rows, columns


@operation(
    "dicom_volume",
    Parameter("slots", whole(1, MAX_SLICES)),
    Parameter("slices", whole_or_none(1, MAX_SLICES), None),
    Parameter("size", with_description(_size, "[rows, columns], null for what differs"), (None, None)),
    _VALUES,
    _WINDOW,
    Parameter("dtype", dtype, "float32"),
    takes="bytes of the files of a series, from a dataset of mesh.open_dicom",
    gives="a video: `dtype` [slices, h, w, 1]",
    refuses="a slice that `decode_dicom` refuses, with colours, frames or another size than the first; "
    f"over {MAX_VIDEO_BYTES >> 20} MiB",
)
@dataclass(frozen=True, slots=True)
class DicomVolume:
    """The slices of a DICOM series as a volume, each decoded as `decode_dicom` does. `mesh.open_dicom` adds
    it."""

    slots: int
    slices: int | None
    size: tuple[int | None, int | None]
    values: Values
    window: tuple[float, float] | None
    dtype: str

    def __post_init__(self) -> None:
        load_library()

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        return video((self.slices,), (*self.size, 1), self.dtype)

    def apply(self, value: bytes, random: KeyedRandom) -> npt.NDArray[Any]:
        return self.decode(value, random, ())

    def decode(self, value: bytes, random: KeyedRandom, following: Sequence[FrameOp]) -> npt.NDArray[Any]:
        """See `FramesDecoder.decode`."""
        lengths = np.frombuffer(value[: 8 * self.slots], "<i8")
        there = lengths[lengths != _MISSING]
        at = 8 * self.slots
        ends = at + np.cumsum(there)
        if lengths.size < self.slots or not there.size or (there < 0).any() or ends[-1] > len(value):
            raise BadSampleError("the header of a series is damaged")
        parts = [value[end - size : end] for size, end in zip(there.tolist(), ends.tolist(), strict=True)]

        def slices() -> Any:
            for number, part in enumerate(parts):
                try:
                    yield _frame(_plain(part), 0, self.values, self.dtype, self.window)
                except BadSampleError as error:
                    raise BadSampleError(f"slice {number}: {error.reason}") from error

        return stack_frames(changed_frames(slices(), following, random), len(parts))

    def fuse(self, following: Operation) -> Operation | None:
        return fuse_frames(self, following)
