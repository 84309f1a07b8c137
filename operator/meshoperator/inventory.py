"""What the planner looks at and what it returns: frozen values, no Kubernetes objects.

Law: data only. Sizes in bytes. Names are unique within their kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Spread = Literal["Zone", "Rack", "Host"]


@dataclass(frozen=True, slots=True)
class StorageNode:
    """A daemon that can hold copies. `accepting` is False while it is cordoned, drained or down; `keeping`:
    what it has stays all the same (it is cordoned, or away for a moment). `tier`: its best disks with room.
    `host`: the machine it runs on; empty: called like it."""

    name: str
    zone: str
    rack: str
    capacity: int
    used: int
    accepting: bool = True
    tier: str = ""
    host: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    keeping: bool = False


@dataclass(frozen=True, slots=True)
class Dataset:
    """Data to be placed: `copies` of `size` bytes, or one on every node (`full`). Higher `priority` is placed
    first. `more`: further copies at most, where many GPUs are far from the first ones."""

    name: str
    size: int
    copies: int = 1
    priority: int = 0
    full: bool = False
    spread: Spread = "Rack"
    near: bool = True
    more: int = 0
    selector: Mapping[str, str] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """GPUs that want a dataset, at a place: running training pods, summed. Without a `node`: pending ones,
    that may come to wherever GPUs are free."""

    dataset: str
    zone: str
    rack: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """GPUs of a Kubernetes node that nobody uses."""

    zone: str
    rack: str
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything the planner may know. `current`: dataset → names of the nodes that hold it. `moving`: those
    of which a copy is on its way by an earlier plan."""

    nodes: tuple[StorageNode, ...]
    datasets: tuple[Dataset, ...]
    demand: tuple[Demand, ...] = ()
    current: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    free_gpus: tuple[FreeGpus, ...] = ()
    moving: frozenset[str] = frozenset()


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
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """The planner's answer. `unplaced`: dataset → why a copy of it has no place. `deferred`: moves that are
    worth it and wait for bandwidth. `released`: (dataset, node) of copies that are no longer needed.
    `considered`: dataset → which nodes were out of the question, and why."""

    assignments: tuple[Assignment, ...]
    moves: tuple[Move, ...]
    unplaced: Mapping[str, str]
    deferred: tuple[Move, ...] = ()
    released: tuple[tuple[str, str], ...] = ()
    considered: Mapping[str, str] = field(default_factory=dict)
