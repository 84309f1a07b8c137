"""Shard views: small objects served as tar files or TFRecords, assembled while they are sent.

Law: nothing is stored. A layout maps every member to its shard and offset; large members are sent from
their extents.
"""
