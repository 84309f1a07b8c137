"""JSON APIs under `/-/`: batches, jobs, views, documents, ops, buckets, cluster, administration, health.

There is one module per API. A handler parses, calls one service and answers JSON; errors are documents with a
code, a message and help.
"""
