"""Clients of origins: remote buckets, web servers and folders behind buckets.

obstore is used only here; its values and errors are translated here. This package knows no cache.
"""
