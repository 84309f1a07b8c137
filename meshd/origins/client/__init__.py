"""Clients of origins: remote buckets, web servers and folders behind buckets.

Law: obstore is used here only; its values and errors are translated here. Knows no cache.
"""
