"""S3 over HTTP: authentication, endpoint, dispatch, form uploads, CORS and the fast path.

Law: the wire format (parsing, rendering, signatures) is in `meshwire`; this package only connects it to
the services.
"""
