"""Views: documents and layouts of virtual buckets whose objects are computed from another bucket's.

Law: a canonical document states everything the bytes of a view depend on besides the source.
"""
