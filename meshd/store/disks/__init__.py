"""Disks of a store: layout, locks, startup recovery, health monitoring and replacement.

Law: a marker identifies a disk; nothing is removed from a disk that does not belong to this index.
"""
