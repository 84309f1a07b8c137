"""What a node computes on samples: ops, chains of ops, and the pool of processes that runs them.

Law: an op is a pure, deterministic function of (bytes, arguments, keyed randomness). Nothing here knows
plans' positions beyond the randomness' key, HTTP, or the store: rows come in as files, offsets and lengths.
Image codecs are imported by `builtin` and by nothing else in the daemon.
"""
