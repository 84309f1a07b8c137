"""What the decoded cache knows of a plan: its measured prefixes, and the choice for each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.transform.decoded_cache.policy import Candidate
    from meshd.transform.decoded_cache.sample_set import SampleSet
    from meshd.transform.decoded_cache.tables import Table


@dataclass(slots=True)
class FieldChoice:
    """The prefix of one field that is kept; `tables` by variant."""

    steps: int
    digests: dict[int, str] = field(default_factory=dict)
    tables: dict[int, Table] = field(default_factory=dict)


@dataclass(slots=True)
class PlanState:
    """What is known of a plan's prefixes. `fields`: the choices, None while its rows are measured."""

    samples: SampleSet
    measured: int = 0
    candidates: dict[int, dict[tuple[int, int, str], Candidate]] = field(default_factory=dict)
    fields: list[FieldChoice | None] | None = None

    @property
    def tables(self) -> Iterator[Table]:
        """All tables of its fields."""
        for choice in self.fields or ():
            if choice is not None:
                yield from choice.tables.values()
