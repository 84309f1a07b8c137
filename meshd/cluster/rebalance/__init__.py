"""Anti-entropy and rebalancing: compare with peers, fetch missing items, drop what other nodes own.

Law: every step can be interrupted and repeated. Nothing is dropped before its owners hold it.
"""
