"""S3 over HTTP: authentication, endpoint, dispatch, form uploads, CORS and the fast path.

The wire format (parsing, rendering, signatures) is in `meshwire`; this package only connects it to the
services.
"""
