"""The loader of a training process: prefetching, output stages, position and statistics.

Law: a batch is an address, so any failure is retried on any node. `loader` imports `datasets`, `client`,
`top` and `traces`; it imports neither adapters nor `doctor`.
"""
