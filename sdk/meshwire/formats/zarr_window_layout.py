"""Windows over Zarr arrays as fields: how the bytes of one are put together, and turned into an array.

Law: the bytes of a window are a header and then one part for each slot of a grid of `counts` chunks, the
last axis fastest. The header is int64: the window's start along each axis, counted from the first chunk of
the grid; then the length of each slot's chunk, or -1 for one that is not stored or not needed, whose part
is as long as the header and ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshwire.formats.zarr_metadata import CODECS, MAX_AXES, MAX_CHUNK_BYTES, MAX_CODECS
from meshwire.strict_json import (
    PlanError,
    checked_choice,
    checked_integer,
    checked_number,
    checked_object,
    checked_text,
    join_path,
    required_field,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

ABSENT: Final = -1
MAX_SLOTS: Final = 1024
MAX_WINDOW_BYTES: Final = 1 << 30
_KINDS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
_STORED = tuple(f"{order}{kind}" for order in "<>" for kind in _KINDS)
_DELIVERED = tuple(np.dtype(kind).name for kind in _KINDS)
_NAMES = (
    "stored",
    "chunk",
    "axes",
    "codecs",
    "fill",
    "window",
    "counts",
    "dtype",
    "scale",
    "offset",
    "missing",
)


@dataclass(frozen=True)
class WindowLayout:
    """`stored`: dtype with byte order; `chunk`, `axes`, `codecs`, `fill`: as in `ZarrVariable`; `window`: the
    shape that is delivered, as `dtype`; `counts`: chunks along each axis of the grid.

    If `dtype` is of floats, numbers in `missing` become NaN and the others are multiplied by `scale` and
    moved by `offset`.
    """

    stored: str
    chunk: tuple[int, ...]
    axes: tuple[int, ...]
    codecs: tuple[dict[str, Any], ...]
    fill: float | int
    window: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: str
    scale: float = 1.0
    offset: float = 0.0
    missing: tuple[float, ...] = ()

    @cached_property
    def slots(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def header_bytes(self) -> int:
        return 8 * (len(self.window) + self.slots)

    def document(self) -> dict[str, Any]:
        """Return the layout as plain JSON values, for the argument of an op."""
        found = {name: getattr(self, name) for name in _NAMES}
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        fill = found["fill"]
        return found | {"fill": fill if isinstance(fill, int) or math.isfinite(fill) else str(fill)}


def parse_window_layout(value: Any, path: str) -> WindowLayout:
    """Parse the document. Raises PlanError."""
    given = checked_object(value, path, _NAMES)
    codecs = required_field(given, "codecs", path)
    if not isinstance(codecs, list) or len(codecs) > MAX_CODECS:
        raise PlanError(join_path(path, "codecs"), f"expected a list of at most {MAX_CODECS} codecs")
    for number, codec in enumerate(codecs):
        where = f"{join_path(path, 'codecs')}[{number}]"
        checked_choice(codec.get("id") if isinstance(codec, dict) else codec, where, sorted(CODECS))
    missing = given.get("missing", [])
    if not isinstance(missing, list) or len(missing) > 16:
        raise PlanError(join_path(path, "missing"), "expected a list of at most 16 numbers")
    found = WindowLayout(
        checked_choice(given.get("stored"), join_path(path, "stored"), _STORED),
        _extents(given, "chunk", path),
        _extents(given, "axes", path, low=0),
        tuple(codecs),
        _fill(given.get("fill", 0), join_path(path, "fill")),
        _extents(given, "window", path),
        _extents(given, "counts", path),
        checked_choice(given.get("dtype"), join_path(path, "dtype"), _DELIVERED),
        checked_number(given.get("scale", 1.0), join_path(path, "scale")),
        checked_number(given.get("offset", 0.0), join_path(path, "offset")),
        tuple(checked_number(each, join_path(path, "missing")) for each in missing),
    )
    axes = {len(found.chunk), len(found.axes), len(found.window), len(found.counts)}
    if len(axes) != 1 or sorted(found.axes) != list(range(len(found.axes))):
        raise PlanError(path, "chunk, axes, window and counts need one number for each axis")
    if found.slots > MAX_SLOTS:
        raise PlanError(path, f"a window of {found.slots} chunks; at most {MAX_SLOTS} are put together")
    size = np.dtype(found.stored).itemsize
    if math.prod(found.chunk) * size > MAX_CHUNK_BYTES or math.prod(found.window) * 8 > MAX_WINDOW_BYTES:
        raise PlanError(path, "a chunk or a window of more than 1 GiB")
    return found


def _extents(given: Mapping[str, Any], name: str, path: str, low: int = 1) -> tuple[int, ...]:
    value, where = required_field(given, name, path), join_path(path, name)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_AXES:
        raise PlanError(where, f"expected a list of 1…{MAX_AXES} extents")
    return tuple(
        checked_integer(item, f"{where}[{number}]", low, 1 << 40) for number, item in enumerate(value)
    )


def _fill(value: Any, path: str) -> float | int:
    if isinstance(value, str):
        return float(checked_choice(checked_text(value, path), path, ("nan", "inf", "-inf")))
    return value if type(value) is int else checked_number(value, path)
