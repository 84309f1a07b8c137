"""Advice and report: the cheapest fix of the longest stall, and the diagnosis as text and JSON.

Law: pure. A gain is an upper bound: how much faster the job would be without that stall. Arguments are
preferred to commands, and commands to hardware. The document has seconds, the table milliseconds.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from meshtools.doctor.measurement_runs import Network
from meshtools.doctor.stage_times import STALLS, TITLES, slowest_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshtools.doctor.stage_times import Split
    from meshwire.plan.plan_spec import PlanSpec


_WIDE: Final = ("float32", "float64")
_MOST_CONNECTIONS: Final = 16
_BUSY: Final = 0.8  # of a core: above it, the receiving thread is the limit
_CHECKING: Final = 0.1  # share of the client's CPU time that checksums take
MANY_SEEKS: Final = 0.3
"""Seeks per sample above which rotational disks seek too often. 1 is one for every sample."""
_REPORT_WIDTH: Final = 100  # characters
_FULL: Final = 0.5  # share of the time spent receiving: above it, more requests in flight do not help


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What the advice depends on. `dtypes`: bytes of a row by dtype; `ops`: seconds that the nodes spent on
    each op in the first run; `random`: random ops; `transforms`: transform processes of all nodes, `cores`:
    their processors (0: unknown); `origin`: whether the source's bucket has an origin; `seeks`: of the nodes'
    rotational disks in the first run, per sample that was read ahead; None if there was none."""

    spec: PlanSpec | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    ops: Mapping[str, float] = field(default_factory=dict)
    random: frozenset[str] = frozenset()
    transforms: int = 0
    cores: int = 0
    origin: bool = False
    connections: int = 4
    verify: bool = True
    network: Network = field(default_factory=Network)
    seeks: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """`stall`: the stall that the fix is for ("compute": the input needs no fix); `gain`: the upper bound of
    the speed-up, as a factor."""

    stall: str
    fix: str
    gain: float


def advise(found: Split, about: PlanFacts) -> Advice:
    """Returns the cheapest fix of the longest stall."""
    stall = found.dominant
    if stall == "network":
        return _network(found, about)
    if stall == "preprocessing":
        return _preprocessing(found, about)
    if stall == "fetch":
        return _fetch(found, about)
    return Advice("compute", "no stall is worth a change: the input keeps up with the training step", 1.0)


def _network(found: Split, about: PlanFacts) -> Advice:
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
            found, "network", 1 - _CHECKING, "Loader(…, verify=False): the client's CPU is the limit"
        )
    if network.receiving < _FULL * network.seconds and about.connections < _MOST_CONNECTIONS:
        count = min(2 * about.connections, _MOST_CONNECTIONS)
        return _advice(
            found,
            "network",
            about.connections / count,
            f"Loader(…, connections={count}): answers begin late, more requests can be in flight",
        )
    return _advice(
        found,
        "network",
        0.0,
        "a cache node on this host or rack (docs/cluster.md), or a faster link: this one is full",
    )


def _preprocessing(found: Split, about: PlanFacts) -> Advice:
    whole = sum(about.ops.values())
    first = _before_random(about)
    spared = sum(about.ops.get(op, 0.0) for op in first)
    if len(first) > 1 and spared > whole / 2:  # decoding alone would only enlarge what is read
        return _advice(
            found,
            "preprocessing",
            1 - spared / whole,
            f"store the result of {', '.join(first)} ({spared / whole:.0%} of the ops' time): train on a "
            "view with these ops, materialized once (mesh view create, mesh view materialize)",
        )
    if whole:
        op = max(about.ops, key=lambda name: about.ops[name])
        why = f"; {op} takes {about.ops[op] / whole:.0%} of the ops' time"
    else:
        why = ""
    if about.cores and about.transforms >= about.cores:
        return _advice(
            found,
            "preprocessing",
            0.5,
            f"as many cores again, in nodes with the role compute: each of the {about.cores} cores has a "
            f"transform "
            f"process{why}",
        )
    number = f" (now {about.transforms})" if about.transforms else ""
    most = f"{about.cores}, the number of cores" if about.cores else "the number of cores"
    left = max(0.5, about.transforms / about.cores) if about.cores else 0.5
    return _advice(
        found,
        "preprocessing",
        left,
        f"more transform processes: raise meshd serve --transform-workers{number} up to {most}, or add a "
        f"node with "
        f"the role compute{why}",
    )


def _before_random(about: PlanFacts) -> tuple[str, ...]:
    """Returns the ops whose result is the same in every epoch: those of each field before its first random
    one."""
    found: list[str] = []
    drawn: set[str] = set()
    for op in () if about.spec is None else about.spec.ops:
        if op.op in about.random or drawn.intersection(op.all_fields):
            drawn.update(op.all_fields)
        elif op.op not in found:
            found.append(op.op)
    return tuple(found)


def _fetch(found: Split, about: PlanFacts) -> Advice:
    if about.origin:
        return _advice(
            found,
            "fetch",
            0.0,
            f"mesh prefetch {about.source}: load it from its origin before the job begins",
        )
    if _seeks_often(about):
        return _advice(found, "fetch", 0.5, f"{_fewer_seeks(about)} (the gain is an estimate)")
    if about.spec is not None and about.spec.shuffle.kind == "global":
        return _advice(
            found,
            "fetch",
            0.5,
            "shuffle=mesh.Blocks(shards=64): disks then read in order (the gain is an estimate)",
        )
    return _advice(
        found, "fetch", 0.0, "more memory or faster disks on the nodes, or more nodes: reading is the limit"
    )


def _seeks_often(about: PlanFacts) -> bool:
    return about.seeks is not None and about.seeks > MANY_SEEKS


def _fewer_seeks(about: PlanFacts) -> str:
    """Returns what makes rotational disks seek less for this plan."""
    memory = "a larger meshd serve --read-ahead"
    if about.spec is not None and about.spec.shuffle.kind == "none":
        return f"{memory}, or rewrite the data in the order of its keys (mesh shard)"
    place = f" {about.source}" if about.source else ""
    return f"shuffle=mesh.Blocks(…) as `mesh preflight{place}` proposes, or {memory}"


def disk_notes(about: PlanFacts) -> list[str]:
    """Returns the seeks per sample of the nodes' rotational disks, and above MANY_SEEKS what to do."""
    if about.seeks is None:
        return []
    message = f"rotational disks of the nodes: {about.seeks:.2g} seeks per sample"
    return [f"{message}: {_fewer_seeks(about)}" if _seeks_often(about) else message]


def _advice(found: Split, stall: str, left: float, fix: str) -> Advice:
    return Advice(stall, fix, found.without(stall, left))


def advice_sentence(found: Split, advice: Advice) -> str:
    """Returns the finding as a sentence."""
    if advice.stall == "compute":
        share = "" if not found.compute else f" (AU {found.au:.0%})"
        return f"{advice.fix}{share}"
    return (
        f"{TITLES[advice.stall]} is the dominant stall: {found.share(advice.stall):.0%} of a step; "
        f"cheapest fix, up to {advice.gain:.2f}× as fast: {advice.fix}"
    )


_WITH: Final = {
    "compute": "compute ceiling (batches in memory)",
    "network": "+ network and copy",
    "preprocessing": "+ preprocessing on the nodes",
    "fetch": "+ fetch of the sources",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a job. `ranks`: the split of each rank; `notes`: what limits the figures."""

    ranks: Sequence[Split]
    advice: Advice
    steps: int
    notes: Sequence[str] = ()

    @property
    def split(self) -> Split:
        """The split of the job, which is that of its slowest rank."""
        return slowest_rank(self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis for programs: times in seconds per step, shares of a step, samples per
        second."""
        found = self.split
        stages = ("compute", *STALLS)
        return {
            "ranks": len(self.ranks),
            "steps": self.steps,
            "step_seconds": round(found.step, 6),
            "seconds": {stage: round(getattr(found, stage), 6) for stage in stages},
            "shares": {stage: round(found.share(stage), 4) for stage in stages},
            "samples_per_second": round(found.rate, 2),
            "ceiling_samples_per_second": round(found.ceiling, 2),
            "au": round(found.au, 4),
            "dominant": self.advice.stall,
            "fix": self.advice.fix,
            "gain": round(self.advice.gain, 3),
            "finding": advice_sentence(found, self.advice),
            "notes": list(self.notes),
        }


def render_report(found: Diagnosis) -> str:
    """Returns the table and the conclusions as text."""
    from rich.console import Console
    from rich.table import Table

    split = found.split
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("a step with")
    for title in ("takes", "samples/s", "stall", "of the step"):
        table.add_column(title, justify="right")
    reached = 0.0
    for stage in ("compute", *STALLS):
        seconds = getattr(split, stage)
        reached += seconds
        rate = f"{split.rows / reached:,.0f}" if reached > split.step / 1000 else "–"
        stall = "" if stage == "compute" else f"{1000 * seconds:.1f} ms"
        table.add_row(_WITH[stage], f"{1000 * reached:.1f} ms", rate, stall, f"{split.share(stage):.0%}")
    out = io.StringIO()
    Console(file=out, width=_REPORT_WIDTH).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([*lines, "", *_words(found)])


def _words(found: Diagnosis) -> list[str]:
    split = found.split
    lines = []
    if split.computes:
        lines.append(
            f"AU {split.au:.1%}: the share of its time that the job computes; without stalls it would reach "
            f"{split.ceiling:,.0f} samples/s"
        )
    lines.append(advice_sentence(split, found.advice))
    if len(found.ranks) > 1:
        even = min(found.ranks, key=lambda each: each.step)
        lines.append(
            f"{len(found.ranks)} ranks: the figures are those of the slowest; the fastest takes "
            f"{1000 * even.step:.1f} ms per step"
        )
    return [*lines, *(f"note: {note}" for note in found.notes)]
