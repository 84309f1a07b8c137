"""HTTP server of a worker: connections, requests, responses; S3, the JSON APIs, the proxy, peer handlers.

It is the only package that knows a client socket or an HTTP status. A handler parses, authorizes, calls the
service and renders; it knows no storage. No byte of a body is read before its request was admitted, and no
traceback ever reaches a client.
"""
