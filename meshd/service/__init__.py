"""The use cases: what a request means, told in objects, buckets, uploads and batches.

Law: knows stores, tables and plans, never a socket, a header or a status. Takes the frozen operations of
`meshwire.s3`, gives back its frozen results, and raises `S3Error` for what S3 has a word for; every error
of the layers below is translated here (`semantics.translation`). Code that waits for a client's bytes takes
them as a `Body`. Each package is of one subject, and imports only those below it (`make check`).
"""
