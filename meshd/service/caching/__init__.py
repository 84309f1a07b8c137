"""What a node keeps of what it can have again: pieces of origins' objects, copies of what other nodes hold.

Law: losing any of it costs time, not data. Each piece is fetched once for all who wait; what stays is decided
by `meshd.cache`'s policies in one process of the node. What buckets with origins mean is `backed`'s.
"""
