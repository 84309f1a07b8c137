"""Jobs that write archives: tars, TFRecords and zips; and jobs that take archives apart.

Law: a shard is written by one pass over its files, in the plan's order; a file keeps its bytes and its name.
"""
