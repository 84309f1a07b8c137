"""Transforms: ops on samples, chains of ops, and the pool of worker processes that runs them.

Law: an op is a pure, deterministic function of bytes, arguments and keyed randomness. This package
knows nothing of HTTP or the store, and of plan positions only the randomness key: rows arrive as files,
offsets and lengths. Only `builtin` imports image codecs.
"""
