"""Replicated writes: the primary of a name commits locally, then replicates to every other owner.

Law: a write is acknowledged only when every node of the write set has it durably.
"""
