"""Offline tools: fsck and index rebuild.

Law: a tool locks the data directory exclusively; it never runs while a daemon does.
"""
