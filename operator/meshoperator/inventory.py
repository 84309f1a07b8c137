"""What the planner looks at and what it returns: frozen values, no Kubernetes objects.

Law: data only. Sizes in bytes. Names are unique within their kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class StorageNode:
    """A daemon that can hold copies. `accepting` is False while it is cordoned, drained or down."""

    name: str
    zone: str
    rack: str
    capacity: int
    used: int
    accepting: bool = True


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data to be placed: `copies` of `size` bytes. Higher `priority` is placed first."""

    name: str
    size: int
    copies: int = 1
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    """GPUs that want a dataset, at a place: running or pending training pods, summed."""

    dataset: str
    zone: str
    rack: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything the planner may know. `current`: dataset → names of the nodes that hold it."""

    nodes: tuple[StorageNode, ...]
    datasets: tuple[Dataset, ...]
    demand: tuple[Demand, ...] = ()
    current: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One copy's place, and why a person should find that reasonable."""

    dataset: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """Bring a copy of `dataset` to `target`; from `source` it goes afterwards (None: it is one more copy)."""

    dataset: str
    source: str | None
    target: str
    size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """The planner's answer. `unplaced`: dataset → why a copy of it has no place."""

    assignments: tuple[Assignment, ...]
    moves: tuple[Move, ...]
    unplaced: Mapping[str, str]
