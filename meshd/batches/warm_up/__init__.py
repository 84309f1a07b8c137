"""Warm-up of the decoded cache: a node computes the prefixes of a plan's samples before training needs them.

Law: it works only while no row of a batch is waiting, and does not change the policy of the cache. A node's
task is its work for one job; none of its state outlives the coordinator.
"""
