"""Buckets backed by an origin: read-through cache, write-through and write-back.

Law: cached data can always be fetched again; data that the origin lacks stays in the durable store until
the origin has it.
"""
