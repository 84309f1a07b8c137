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
from meshsdk.doctor.stages import split

if TYPE_CHECKING:
    from collections.abc import Callable

    from meshsdk.doctor.checkups import Network, Subject


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

    checkup = Checkup(subject, steps, begins=begins)
    for batch in checkup.batches():
        del batch
        if step_seconds:
            time.sleep(step_seconds)
    found = split(checkup.runs, subject.world)
    advice = advise(found, enquiry.circumstances(subject, checkup.network))
    notes = [] if step_seconds else ["nothing is computed: without a script or --step-time, AU means nothing"]
    return Diagnosis((found,), advice, steps, (*notes, *doubts(checkup.network)))


def doubts(network: Network) -> list[str]:
    """What is to be known about the figures."""
    if network.missed > 0:
        return [
            f"{network.missed} of {network.frames} prepared frames were not kept by the node: network and "
            "copy holds preprocessing, too; give the node more --frame-cache, or a smaller batch"
        ]
    return []
