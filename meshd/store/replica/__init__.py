"""Replica side of the store: changes between nodes, their application, and the inventory for comparison.

Law: a replica assigns no stamps; it enters what the primary has committed.
"""
