"""Buckets backed by an origin: read-through cache, write-through and write-back.

Cached data can always be fetched again. Data that the origin lacks stays in the durable store until the
origin has it.
"""
