"""Scientific arrays: windows over the variables of a Zarr store, of NetCDF and HDF5 files by references, and
statistics of fields.

Law: only the locations of bytes are computed here; nodes read and decode them.
"""
