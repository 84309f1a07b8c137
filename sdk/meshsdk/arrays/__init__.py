"""Scientific arrays: windows over the variables of a Zarr store, of NetCDF and HDF5 files by references, and
statistics of fields.

Law: what is computed here is where bytes lie; nodes read and decode them.
"""
