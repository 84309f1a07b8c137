"""Relayout: stores loose objects next to each other on rotational disks, in the order of their keys.

Law: only the location of bytes changes, never a version, an ETag or a time; objects in order are not moved.
"""
