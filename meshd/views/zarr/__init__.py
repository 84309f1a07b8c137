"""Zarr views: datasets or plans as Zarr v3 arrays that any Zarr reader opens.

Law: every size and ETag follows from the layout. A chunk consists of stored blocks of samples.
"""
