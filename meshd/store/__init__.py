"""Object store on local disks: tar data files, an LMDB index and group commit.

Law: only this package writes data files and the index. It knows buckets and keys as names: no HTTP, no
status codes, no identities, no policies. Decisions about bytes belong here; decisions about users,
requests or cluster placement belong to the packages above.
"""
