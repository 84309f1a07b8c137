"""Shard views: small objects as tars and TFRecords, put together while they are sent.

Law: nothing is stored. A layout says where every member lies in which shard; large ones are sent from where
they lie.
"""
