"""Datasets: from a source and its fields to a pinned snapshot, one module per kind of source.

Law: a snapshot names the bytes of every sample by object, ETag and range, so a later change is detected
and never read as the old content. Indexes are created once per content. Reading a dataset requires read
access to all its objects.
"""
