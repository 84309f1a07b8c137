"""Jobs: bulk work that the coordinator process runs in the background, such as writing shards or a view.

Law: the output of a job is a function of its document and of the source pinned in its plan. Each output
is written completely or not at all and records its source digest, so that a job killed at any moment
resumes without loss or duplication. A job has the current rights of the user who started it.
"""
