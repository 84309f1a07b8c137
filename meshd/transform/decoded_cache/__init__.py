"""Decoded cache: the results of the ops before a chain's first random op, kept on disk for later epochs.

Law: a batch has the same bytes with and without it. An entry is a function of the snapshot, the sample, the
field and the ops, and is verified when read; whatever is wrong with it makes it a miss. The coordinator has
the index and decides (`cache`, `policy`); transform processes read and append entries (`row_prefixes`,
`segment_files`). Nothing survives a restart of the node.
"""
