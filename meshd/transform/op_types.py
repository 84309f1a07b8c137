"""Types of the op library: field types, ops, and the definitions that the registry holds.

Law: types only, so that built-in ops and user-defined ops share them. Invariant: a field type without
None in its shape is delivered as one dense tensor, any other as ragged data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from meshd.transform.assets import asset, optional_asset

if TYPE_CHECKING:
    from meshd.transform.parameters import Parameter
    from meshwire.plan.keyed_random import KeyedRandom


Kind = Literal["bytes", "image", "array", "label"]
Layout = Literal["", "hwc", "chw", "boxes", "points", "video"]


@dataclass(frozen=True, slots=True)
class FieldType:
    """The type of a field. `shape` has None for extents that differ between samples.

    `layout`: of images, channels last ("hwc") or first ("chw"); of annotations that follow the geometry of an
    image, "boxes" [n, 4] or "points" [n, points, 3]; of videos, "video" […, height, width, channels]. `rate`:
    of a sound, whose first axis is time, in hertz.
    """

    kind: Kind
    dtype: str
    shape: tuple[int | None, ...]
    layout: Layout = ""
    rate: int = 0

    @property
    def fixed(self) -> tuple[int, ...] | None:
        """The shape if every sample has the same one, else None."""
        known = tuple(extent for extent in self.shape if extent is not None)
        return known if len(known) == len(self.shape) else None

    @property
    def pixel_layout(self) -> Layout:
        """The layout of an image, "" for all else."""
        return self.layout if self.layout in ("hwc", "chw") else ""

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample of a fixed type; 0 for a ragged one."""
        shape = self.fixed
        return 0 if shape is None else math.prod(shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        sizes = "×".join("?" if extent is None else str(extent) for extent in self.shape)
        rate = f" at {self.rate} Hz" if self.rate else ""
        return f"{self.kind}{f' ({self.layout})' if self.layout else ''} {self.dtype}[{sizes}]{rate}"


def describe_mismatch(field: FieldType, value: Any) -> str:
    """Say what an op returned instead of a value of its declared type `field`, and what helps; returns "" if
    the value matches."""
    if not (wrong := _mismatch(field, value)):
        return ""
    help_ = ""
    if isinstance(value, np.ndarray) and value.dtype.kind in "buif" and _fits(field.shape, value.shape):
        help_ = f': return it with .astype("{field.dtype}"), or declare {value.dtype}'
    return f"returned {wrong}, declared {field}{help_}"


def _mismatch(field: FieldType, value: Any) -> str:
    if isinstance(value, np.ndarray):
        right = value.dtype == field.dtype and _fits(field.shape, value.shape)
        return "" if right else f"{value.dtype}{list(value.shape)}"
    if isinstance(value, bytes):
        right = field.dtype == "uint8" and _fits(field.shape, (len(value),))
        return "" if right else f"{len(value)} bytes"
    plain = isinstance(value, int | float | np.generic) and not isinstance(value, bool)
    if plain and not field.shape:
        return ""
    return "" if field.kind not in _CHECKED else f"a {type(value).__name__}"


def _fits(promised: tuple[int | None, ...], shape: tuple[int, ...]) -> bool:
    if len(promised) != len(shape):
        return False
    return all(want is None or want == have for want, have in zip(promised, shape, strict=True))


_CHECKED = frozenset({"bytes", "image", "array", "label"})
BYTES = FieldType("bytes", "uint8", (None,))
LABEL = FieldType("label", "int64", ())


def image(
    height: int | None, width: int | None, channels: int, layout: Layout = "hwc", dtype: str = "uint8"
) -> FieldType:
    """Return an image type; height and width in pixels, None if they differ between samples."""
    shape = (channels, height, width) if layout == "chw" else (height, width, channels)
    return FieldType("image", dtype, shape, layout)


def check_image(field: FieldType) -> None:
    """Raises ValueError unless the type is an image with its channels last."""
    if field.layout != "hwc":
        what = "put it before to_chw" if field.layout == "chw" else "decode it first"
        raise ValueError(f"needs an image with its channels last, not {field}; {what}")


def channels_of(field: FieldType) -> int:
    """Return the channels of an image type, which are always known."""
    found = field.shape[0] if field.layout == "chw" else field.shape[2]
    assert found is not None
    return found


Complete = Callable[[Mapping[str, Any], Callable[[], bytes]], dict[str, Any]]
"""Maps (given arguments, reader of the first sample's bytes) to all arguments. Raises BadSampleError."""


class Operation(Protocol):
    """One op with its arguments. All samples share an instance; it holds no state."""

    def infer(self, field: FieldType) -> FieldType:
        """Return the type `apply` makes of a value of type `field`. Raises ValueError if unsupported."""
        ...

    def apply(self, value: Any, random: KeyedRandom) -> Any:
        """Return the value for one sample. Raises BadSampleError if the data is at fault."""
        ...


@runtime_checkable
class BoundToType(Protocol):
    """An op whose work depends on more of its input's type than the values show, such as the rate of a
    sound."""

    def bind(self, field: FieldType) -> Operation:
        """Return the op for values of type `field`, which `infer` accepts."""
        ...


@runtime_checkable
class NamesDraws(Protocol):
    """An op whose draws do not depend on its input."""

    def draws(self, random: KeyedRandom) -> Mapping[str, Any]:
        """Return what `apply` draws, as JSON values by name."""
        ...


class ImageSize(NamedTuple):
    """The size of an image in pixels; `scales`: whether it can be decoded at a smaller size."""

    height: int
    width: int
    scales: bool


@runtime_checkable
class WindowedDecoder(Protocol):
    """A first op that draws a window of an image and decodes only what the window needs.

    Its parts, so that the image can come from elsewhere; `apply` runs them in this order. A window is the
    op's own value; `shrink` is the reduction at which the image is decoded: 1, 2, 4 or 8.
    """

    def open(self, value: bytes) -> Any:
        """Return the image with its `size` (ImageSize), undecoded if possible. Raises BadSampleError."""
        ...

    def choose_window(self, size: ImageSize, random: KeyedRandom) -> tuple[Any, int]:
        """Return (window, shrink). Raises BadSampleError."""
        ...

    def needed_rows(self, window: Any, shrink: int) -> tuple[int, int]:
        """Return (first row, end) of the reduced image that the window needs; the end may be beyond it."""
        ...

    def decode_window(self, opened: Any, window: Any, shrink: int) -> Any:
        """Return the reduced image from its first row to the last one that the window needs, or further.

        Raises BadSampleError.
        """
        ...

    def decode_whole(self, opened: Any, shrink: int) -> Any:
        """Return the whole reduced image, an array [rows, columns, channels]. Raises BadSampleError."""
        ...

    def cut(self, rows: Any, window: Any, shrink: int, first: int) -> Any:
        """Return the window of the reduced image, of which `rows` begins with row `first`."""
        ...


class MixingOp(Operation, Protocol):
    """An op over the two rows of a pair (positions p and p ^ 1). `apply` handles a row without a partner."""

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The fields whose values are mixed by the weight; None: every label of the dataset."""
        ...

    def mix(self, value: Any, other: Any, random: KeyedRandom) -> tuple[Any, float]:
        """Return (the mixed value, the weight of `value` in it: 0…1).

        `random` is keyed by the pair, so both rows draw the same.
        """
        ...


class OpDefinition(msgspec.Struct, frozen=True):
    """An op in the registry. `random`: whether it draws (an op that does not gets no key of its own).

    `complete`: derives missing arguments from the dataset's first sample. For users: `takes` and `gives` are
    kinds with shapes and dtypes, `refuses` says what makes a sample bad, `subject` is the module's name.
    `inputs`: for a multi-field op, the names of the values that it takes. `moves`: whether its draws move the
    content to other places.
    """

    name: str
    version: str
    parameters: tuple[Parameter, ...]
    build: Callable[..., Operation]
    random: bool
    summary: str
    complete: Complete | None = None
    takes: str = ""
    gives: str = ""
    refuses: str = ""
    subject: str = ""
    inputs: tuple[str, ...] = ()
    moves: bool = False

    @property
    def assets(self) -> tuple[str, ...]:
        """The parameters whose values are assets."""
        return tuple(
            parameter.name for parameter in self.parameters if parameter.parse in (asset, optional_asset)
        )

    @property
    def is_multi_field(self) -> bool:
        """Whether it builds a `MultiFieldOp`."""
        return bool(self.inputs)

    @property
    def is_mixing(self) -> bool:
        """Whether it builds a `MixingOp`."""
        return hasattr(self.build, "mix")
