"""The cache of a node: pieces of origin objects, and copies of what other nodes hold.

Law: losing cached data costs time, never data. Each piece is fetched once for all waiters. The policies
of `meshd.origins.eviction` decide in one process of the node what stays. Buckets and their semantics
belong to `meshd.origins`.
"""
