"""Jobs that write archives (tar, TFRecord, zip) and jobs that extract them.

Law: a shard is written in one pass over its files, in plan order. Files keep their bytes and their
names.
"""
