"""Warm-up of the decoded cache: a node makes the prefixes of a plan's samples before training needs them.

Law: it works only while no row of a batch waits, and never changes what the cache would keep. A node's task
is its work for one job; it has no state that outlives the coordinator.
"""
