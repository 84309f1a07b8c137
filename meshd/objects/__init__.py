"""Objects: look up, read, write, copy, list, delete, multipart uploads, tags and ACLs.

A write becomes visible when it is durable and every digest matches; a read keeps the files it opened.
Services take the frozen operations of `meshwire.s3`, return its frozen results and raise `S3Error`; they
know stores and tables, never a socket, a header or a status code.
"""
