"""File formats of datasets and jobs: tar, zip, TFRecord, MDS, Parquet, Zarr, JSON lines.

Law: bytes come through a function or iterator that is passed in; the daemon decompresses. Whatever a file
states about itself is checked against its size before it is used.
"""
