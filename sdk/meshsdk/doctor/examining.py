"""A plan looked into from here: its batches taken as a training job would, with or without a step's compute.

Law: the batches of the very plan; what a step computes is emulated by waiting, as MLPerf Storage does.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from meshsdk.doctor.advising import advise
from meshsdk.doctor.checkups import Checkup
from meshsdk.doctor.circumstances import Enquiry
from meshsdk.doctor.showing import Diagnosis
from meshsdk.doctor.stages import TITLES, split

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.doctor.checkups import Subject

UNSURE = 0.1
"""A pace that is known less well is told so."""


def examine(
    subject: Subject,
    *,
    steps: int = 32,
    step_seconds: float = 0.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """The diagnosis of a plan; `step_seconds`: what a step would compute. Raises MeshError."""
    enquiry = Enquiry(subject.transport)

    def begins(run: str) -> None:
        enquiry.begins(run)
        progress(run)

    checkup = Checkup(subject, steps, alone=True, begins=begins)
    for batch in checkup.batches():
        del batch
        if step_seconds:
            time.sleep(step_seconds)
    found = split(checkup.runs, subject.world)
    advice = advise(found, enquiry.circumstances(subject, checkup.network))
    notes = [] if step_seconds else ["nothing is computed: without a script or --step-time, AU means nothing"]
    timed = max(run.steps for run in checkup.runs.values())
    return Diagnosis((found,), advice, timed, (*notes, *doubts(checkup)))


def doubts(checkup: Checkup) -> list[str]:
    """What is to be known about the figures. How long nothing takes need not be known."""
    network, found = checkup.network, []
    computes = split(checkup.runs).computes
    unsure = {
        name: run.doubt
        for name, run in checkup.runs.items()
        if run.doubt > UNSURE and (computes or name != "compute")
    }
    if unsure:
        told = ", ".join(f"{TITLES[name]} ±{doubt:.0%}" for name, doubt in unsure.items())
        found.append(
            f"steps vary a lot ({told} of a step with it): is the machine busy with other things? "
            "More --steps make it surer"
        )
    if network.missed > 0:
        found.append(
            f"{network.missed} of {network.frames} prepared frames were not kept by the node: network and "
            "copy holds preprocessing, too; give the node more --frame-cache, or a smaller batch"
        )
    return found
