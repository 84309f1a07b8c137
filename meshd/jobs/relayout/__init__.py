"""Relayout: loose objects are put next to each other on rotational disks, in the order of their keys.

Law: only places change, never a version, an ETag or a time; what lies well already is not touched.
"""
