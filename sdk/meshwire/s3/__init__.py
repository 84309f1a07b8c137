"""The S3 protocol: requests in, frozen operations out; results in, bytes out.

Law: nothing here knows a socket, a store or a user database. `sigv4` imports this package, never the
reverse.
"""
