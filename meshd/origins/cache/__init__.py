"""The cache of a node: pieces of origin objects, and copies of data that other nodes store.

Losing cached data costs time, never data. Each piece is fetched once for all waiters. The policies of
`meshd.origins.eviction` decide, in one process of the node, what stays. Buckets and their semantics belong
to `meshd.origins`.
"""
