"""Index of the store: LMDB tables of objects, versions, uploads, tombstones and files; listings.

Law: only `index.index` imports lmdb; nothing in this package touches data files.
"""
