"""What the registry holds of an op, and what an op is.

Law: types alone, so that every kind of op can be made of them: those the node comes with, and users' own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from meshd.transform.assets import asset

if TYPE_CHECKING:
    from meshd.transform.fieldtypes import FieldType
    from meshd.transform.parameters import Parameter
    from meshwire.randomness import KeyedRandom

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


class Mixing(Operation, Protocol):
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
    def joins(self) -> bool:
        """Whether what it builds is over the values of several fields (`joining.Joining`)."""
        return bool(self.inputs)

    @property
    def mixes(self) -> bool:
        """Whether what it builds is a Mixing."""
        return hasattr(self.build, "mix")
