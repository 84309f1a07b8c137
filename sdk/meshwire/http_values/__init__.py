"""Values in HTTP messages: preconditions, dates, percent-encoding, form data, Shardmesh's own headers.

Law: pure conversions between text and values; no policy of S3 or of the daemon.
"""
