"""The loader of a training process: prefetching, output stages, position and statistics.

Law: a batch is an address, so any failure is retried on any node. `loader` imports `datasets` and
`client`, not the adapters. `mesh doctor` and traces are hooks of the optional package `meshtools`.
"""
