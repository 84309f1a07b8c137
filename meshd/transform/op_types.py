"""Types of the op library: field types, ops, and the definitions that the registry holds.

Law: types only, so that built-in ops and user-defined ops share them. Invariant: a field type without
None in its shape is delivered as one dense tensor, any other as ragged data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from meshd.transform.assets import asset

if TYPE_CHECKING:
    from meshd.transform.parameters import Parameter
    from meshwire.plan.keyed_random import KeyedRandom


Kind = Literal["bytes", "image", "array", "label"]
Layout = Literal["", "hwc", "chw"]


@dataclass(frozen=True, slots=True)
class FieldType:
    """`shape`: None where samples differ. `layout`: of images only; channels last ("hwc") or first
    ("chw").
    """

    kind: Kind
    dtype: str
    shape: tuple[int | None, ...]
    layout: Layout = ""

    @property
    def fixed(self) -> tuple[int, ...] | None:
        """The shape when every sample has the same one, else None."""
        known = tuple(extent for extent in self.shape if extent is not None)
        return known if len(known) == len(self.shape) else None

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample of a fixed type; 0 for a ragged one."""
        shape = self.fixed
        return 0 if shape is None else math.prod(shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        sizes = "×".join("?" if extent is None else str(extent) for extent in self.shape)
        return f"{self.kind}{f' ({self.layout})' if self.layout else ''} {self.dtype}[{sizes}]"


def mismatch(field: FieldType, value: Any) -> str:
    """What is wrong with a value that should be of type `field`; "" when nothing is."""
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


def image(height: int | None, width: int | None, channels: int, layout: Layout = "hwc") -> FieldType:
    """An uint8 image; height and width in pixels, None when they differ from sample to sample."""
    shape = (channels, height, width) if layout == "chw" else (height, width, channels)
    return FieldType("image", "uint8", shape, layout)


def channels_of(field: FieldType) -> int:
    """Channels of an image type: always known."""
    found = field.shape[0] if field.layout == "chw" else field.shape[2]
    assert found is not None
    return found


Complete = Callable[[Mapping[str, Any], Callable[[], bytes]], dict[str, Any]]
"""(arguments given, reader of the first sample's bytes) → all arguments. Raises BadSampleError."""


class Operation(Protocol):
    """One op with its arguments. Instances are shared by all samples and hold no state."""

    def infer(self, field: FieldType) -> FieldType:
        """The type `apply` makes of a value of type `field`. Raises ValueError when it takes none such."""
        ...

    def apply(self, value: Any, random: KeyedRandom) -> Any:
        """The value for one sample. Raises BadSampleError when the data is at fault."""
        ...


class MixingOp(Operation, Protocol):
    """An op over the two rows of a pair (positions p and p ^ 1). Its `apply` is for a row that is
    alone."""

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The fields whose values go with the weight; None: every label of the dataset."""
        ...

    def mix(self, value: Any, other: Any, random: KeyedRandom) -> tuple[Any, float]:
        """(the mixed value, the weight of `value` in it: 0…1). `random` is keyed by the pair: both rows
        draw the same.
        """
        ...


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """An op as the registry holds it. `random`: whether it draws (others get no key of their own);
    `complete`: finds arguments left out in the dataset's first sample. For its users: `takes` and `gives`
    are kinds with shapes and dtypes, `refuses` is what makes a sample bad, `subject` the module's name.
    `inputs`: the names of the values it takes together, where there are several.
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

    @property
    def assets(self) -> tuple[str, ...]:
        """The parameters whose values are assets."""
        return tuple(parameter.name for parameter in self.parameters if parameter.parse is asset)

    @property
    def is_multi_field(self) -> bool:
        """Whether what it builds is over the values of several fields (`joining.Joining`)."""
        return bool(self.inputs)

    @property
    def is_mixing(self) -> bool:
        """Whether what it builds is a Mixing."""
        return hasattr(self.build, "mix")
