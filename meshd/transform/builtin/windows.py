"""Windows of arrays, over any of their axes.

Law: a window lies whole in the array it is taken from; one that does not fit is a bad sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import FieldType
from meshd.transform.parameters import Parameter, choice, extents
from meshd.transform.registry import operation
from meshwire.documents import PlanError

if TYPE_CHECKING:
    import numpy.typing as npt

    from meshd.transform.parameters import Extents
    from meshwire.randomness import KeyedRandom


def _window(value: Any, path: str) -> Extents:
    """The window's extents along each axis of the array, null for all of it."""
    found = extents(value, path)
    if not found or 0 in found:
        raise PlanError(path, "expected a list of extents above 0, null for an axis that is taken whole")
    return found


@operation(
    "window",
    Parameter("extents", _window),
    Parameter("at", choice("random", "center", "first"), "random"),
    random=True,
    takes="an array",
    gives="the same dtype, of the window's extents",
    refuses="an axis shorter than the window",
)
@dataclass(frozen=True, slots=True)
class Window:
    """A window of the array along each axis: at a random place, in the middle, or at the beginning."""

    extents: Extents
    at: Literal["random", "center", "first"]

    def infer(self, field: FieldType) -> FieldType:
        if field.kind != "array" or field.layout or len(field.shape) != len(self.extents):
            raise ValueError(f"needs an array of {len(self.extents)} axes, not {field}")
        for axis, (wanted, extent) in enumerate(zip(self.extents, field.shape, strict=True)):
            if wanted is not None and extent is not None and wanted > extent:
                raise ValueError(f"axis {axis} has {extent}, less than the window's {wanted}")
        shape = (
            extent if wanted is None else wanted
            for wanted, extent in zip(self.extents, field.shape, strict=True)
        )
        return FieldType("array", field.dtype, tuple(shape))

    def apply(self, value: npt.NDArray[Any], random: KeyedRandom) -> npt.NDArray[Any]:
        places = []
        for axis, (wanted, extent) in enumerate(zip(self.extents, value.shape, strict=True)):
            if wanted is None:
                places.append(slice(None))
                continue
            room = extent - wanted
            if room < 0:
                raise BadSampleError(f"axis {axis} has {extent}, less than the window's {wanted}")
            first = {"first": 0, "center": room // 2}.get(self.at)
            start = random.integer(room + 1) if first is None else first
            places.append(slice(start, start + wanted))
        return np.ascontiguousarray(value[tuple(places)])
