"""Where a training job's time goes, found by leaving one stage after the other out (DS-Analyzer's method).

Law: measures the job's own loop over the job's own batches; nothing of the job is edited. What is told is
measured in this run, by differences; what is guessed is told as a guess.
"""

from typing import Final

VARIABLE: Final = "MESH_DOCTOR"
"""In the environment of a script that is looked into: the folder where it finds what to do, and reports."""
