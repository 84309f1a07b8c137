"""From a split and the circumstances to the cheapest fix of the longest stall, and what it would win.

Law: pure. A gain is what the split says a job without (that part of) the stall would do: an upper bound.
Cheapest first: an argument, then a command, then hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from meshsdk.doctor.checkups import Network
from meshsdk.doctor.stages import TITLES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshsdk.doctor.stages import Split
    from meshwire.plans import PlanSpec

_WIDE: Final = ("float32", "float64")
_MOST_CONNECTIONS: Final = 16
_BUSY: Final = 0.8  # of a core: the thread that receives is what limits
_CHECKING: Final = 0.1  # of the client's CPU time is checksums
_FULL: Final = 0.5  # of its time something is being received: more questions would not have more come


@dataclass(frozen=True, slots=True)
class Circumstances:
    """`spec` and field `dtypes` (bytes a row by dtype) of the plan; `ops`: seconds the nodes spent on each op
    in the first run; `random`: ops that draw; `transforms`: the processes of the nodes; `origin`: whether the
    source lies at another store."""

    spec: PlanSpec | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    ops: Mapping[str, float] = field(default_factory=dict)
    random: frozenset[str] = frozenset()
    transforms: int = 0
    origin: bool = False
    connections: int = 4
    verify: bool = True
    network: Network = field(default_factory=Network)


@dataclass(frozen=True, slots=True)
class Advice:
    """`stall`: what it is about ("compute": nothing is to be done about data); `gain`: at most so many times
    as fast."""

    stall: str
    fix: str
    gain: float


def advise(found: Split, about: Circumstances) -> Advice:
    """The cheapest fix of the longest stall."""
    stall = found.dominant
    if stall == "network":
        return _network(found, about)
    if stall == "preprocessing":
        return _preprocessing(found, about)
    if stall == "fetch":
        return _fetch(found, about)
    return Advice("compute", "no stall is worth a change: the input keeps up with the training step", 1.0)


def _network(found: Split, about: Circumstances) -> Advice:
    whole, wide = sum(about.dtypes.values()), sum(about.dtypes.get(name, 0) for name in _WIDE)
    network = about.network
    if whole and wide > whole / 2:
        left = (whole - wide * 3 / 4) / whole
        return _advice(
            found,
            "network",
            left,
            "send narrow types: leave the conversion to floats out of the plan; "
            "Loader(…, normalize=mesh.Normalize(FIELD)) does it on the device",
        )
    if network.seconds and network.cpu > _BUSY * network.seconds and about.verify:
        return _advice(
            found, "network", 1 - _CHECKING, "Loader(…, verify=False): the client's CPU is what limits"
        )
    if network.receiving < _FULL * network.seconds and about.connections < _MOST_CONNECTIONS:
        count = min(2 * about.connections, _MOST_CONNECTIONS)
        return _advice(
            found,
            "network",
            about.connections / count,
            f"Loader(…, connections={count}): answers begin late, more questions can be under way",
        )
    return _advice(
        found,
        "network",
        0.0,
        "a cache node on this host or rack (docs/cluster.md), or a faster link: this one is full",
    )


def _preprocessing(found: Split, about: Circumstances) -> Advice:
    whole = sum(about.ops.values())
    first = _before_random(about)
    spared = sum(about.ops.get(op, 0.0) for op in first)
    if len(first) > 1 and spared > whole / 2:  # decoding alone would make more to read
        return _advice(
            found,
            "preprocessing",
            1 - spared / whole,
            f"keep the result of {', '.join(first)} ({spared / whole:.0%} of the ops' time): a view with "
            "these ops, materialized once (mesh view create, mesh view materialize), as the dataset",
        )
    if whole:
        op = max(about.ops, key=lambda name: about.ops[name])
        why = f"; {op} takes {about.ops[op] / whole:.0%} of the ops' time"
    else:
        why = ""
    number = f" (now {about.transforms})" if about.transforms else ""
    return _advice(
        found,
        "preprocessing",
        0.5,
        f"twice the transform processes: meshd serve --transforms{number} up to the cores, or a node of "
        f"role compute{why}",
    )


def _before_random(about: Circumstances) -> tuple[str, ...]:
    """Ops that give the same in every epoch: those of a field up to the first that draws."""
    found: list[str] = []
    drawn: set[str] = set()
    for op in () if about.spec is None else about.spec.ops:
        if op.op in about.random or drawn.intersection(op.every):
            drawn.update(op.every)
        elif op.op not in found:
            found.append(op.op)
    return tuple(found)


def _fetch(found: Split, about: Circumstances) -> Advice:
    if about.origin:
        return _advice(
            found,
            "fetch",
            0.0,
            f"mesh prefetch {about.source}: bring it from its origin before the job begins",
        )
    if about.spec is not None and about.spec.shuffle.kind == "global":
        return _advice(
            found,
            "fetch",
            0.5,
            "shuffle=mesh.Blocks(shards=64): disks then read in order (the gain is a guess)",
        )
    return _advice(
        found, "fetch", 0.0, "more memory or faster disks on the nodes, or more nodes: reading is what limits"
    )


def _advice(found: Split, stall: str, left: float, fix: str) -> Advice:
    return Advice(stall, fix, found.without(stall, left))


def sentence(found: Split, advice: Advice) -> str:
    """The finding in words."""
    if advice.stall == "compute":
        share = "" if not found.compute else f" (AU {found.au:.0%})"
        return f"{advice.fix}{share}"
    return (
        f"{TITLES[advice.stall]} is the dominant stall: {found.share(advice.stall):.0%} of a step; "
        f"cheapest fix, up to {advice.gain:.2f}× as fast: {advice.fix}"
    )
