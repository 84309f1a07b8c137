"""Datasets: from a source and its fields to a pinned snapshot, one module a kind of source.

Law: a snapshot names every sample's bytes by object, ETag and range: what changes under it is noticed, never
read for what it was. Indexes of files are made once a content. Who reads a dataset may read all its objects.
"""
