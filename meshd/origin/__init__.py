"""Origins: remote buckets, web servers and folders that a bucket's objects are read from and written to.

Law: obstore is used here only; what comes out are our values and errors. Knows no cache and no bucket table.
"""
