"""Objects on local disks: tar extents, an LMDB index, group commit.

Law: this package alone writes data files and the index. It knows buckets and keys as names only: no HTTP, no
statuses, no identities, no policies. What decides about bytes belongs here; what decides about people,
requests or placement belongs in `service` and above.
"""
