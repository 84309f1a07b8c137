"""Features of `tf.Example` that are numbers.

Law: a feature of another kind, or of another number of values, is a bad sample, never cut or filled up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshd.transform.builtin.texts import check_bytes
from meshd.transform.errors import BadSampleError
from meshd.transform.fieldtypes import LABEL, FieldType
from meshd.transform.parameters import Parameter, choice, told, whole
from meshd.transform.registry import operation
from meshwire.examples import ExampleError, numbers

if TYPE_CHECKING:
    from meshwire.randomness import KeyedRandom

FeatureType = Literal["integer", "integers", "number", "numbers"]
_MAX_LENGTH = 1 << 24


@operation(
    "feature",
    Parameter("type", choice("integer", "integers", "number", "numbers")),
    Parameter("length", told(whole(0, _MAX_LENGTH), "how many values there are; 0: samples differ"), 0),
    takes="bytes of a feature of numbers, of a dataset of kind tfrecord",
    gives='int64 ("integer"), int64 [n] ("integers"), float32 ("number"), float32 [n] ("numbers")',
    refuses="a feature of bytes or of the other kind of numbers, or of another number of values; over 16 MiB",
)
@dataclass(frozen=True, slots=True)
class FeatureNumbers:
    """The numbers of a `tf.Example`'s feature: exactly one, or a list; with a `length` the list is dense."""

    type: FeatureType
    length: int

    def infer(self, field: FieldType) -> FieldType:
        check_bytes(field)
        if self.type == "integer":
            return LABEL
        if self.type == "number":
            return FieldType("array", "float32", ())
        return FieldType("array", "int64" if self.type == "integers" else "float32", (self.length or None,))

    def apply(self, value: bytes, random: KeyedRandom) -> Any:
        try:
            found = numbers(value)
        except ExampleError as error:
            raise BadSampleError(f"no feature of numbers: {error}") from error
        if found.dtype != ("int64" if self.type.startswith("integer") else "float32"):
            raise BadSampleError(f"a feature of {found.dtype}, not of {self.type}")
        wanted = self.length if self.type.endswith("s") else 1
        if wanted and found.size != wanted:
            raise BadSampleError(f"a feature of {found.size} values, not of {wanted}")
        if self.type.endswith("s"):
            return found
        return int(found[0]) if self.type == "integer" else found[0]
