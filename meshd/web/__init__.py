"""HTTP: the S3 endpoint, the native endpoint's door, request bodies in, response bytes out.

Law: the only package that knows aiohttp, a socket or a status. A handler parses, authorises, calls the
service and renders; it knows no storage. Invariant: nothing of a body is read before its request was
admitted, and no traceback ever reaches a client.
"""
