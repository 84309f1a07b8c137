"""A diagnosis, for a person and for a program.

Law: what is printed was measured or follows from it; seconds in the document, milliseconds in the table.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from meshsdk.doctor.advising import sentence
from meshsdk.doctor.stages import STALLS, slowest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshsdk.doctor.advising import Advice
    from meshsdk.doctor.stages import Split

_WITH: Final = {
    "compute": "compute ceiling (batches in memory)",
    "network": "+ network and copy",
    "preprocessing": "+ preprocessing on the nodes",
    "fetch": "+ fetch of the sources",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Of one job: a split a rank, what to do, and what is to be known about the figures."""

    ranks: Sequence[Split]
    advice: Advice
    steps: int
    notes: Sequence[str] = ()

    @property
    def split(self) -> Split:
        """That of the job: of its slowest rank."""
        return slowest(self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """For programs: seconds of a step, shares of it, samples a second."""
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
            "finding": sentence(found, self.advice),
            "notes": list(self.notes),
        }


def text(found: Diagnosis, width: int = 100) -> str:
    """A table and what follows from it."""
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
    Console(file=out, width=width).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join([*lines, "", *_words(found)])


def _words(found: Diagnosis) -> list[str]:
    split = found.split
    lines = []
    if split.computes:
        lines.append(
            f"AU {split.au:.1%}: so much of its time the job computes; it could do {split.ceiling:,.0f}/s"
        )
    lines.append(sentence(split, found.advice))
    if len(found.ranks) > 1:
        even = min(found.ranks, key=lambda each: each.step)
        lines.append(
            f"{len(found.ranks)} ranks; the figures are the slowest one's, the fastest has "
            f"{1000 * even.step:.1f} ms a step"
        )
    return [*lines, *(f"note: {note}" for note in found.notes)]
