"""Zarr views: datasets, or plans, as arrays of Zarr v3 that any reader of Zarr opens.

Law: every size and ETag follows from the layout; a chunk is made of kept blocks of samples.
"""
