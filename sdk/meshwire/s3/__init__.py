"""The S3 dialect: requests in, frozen operations out; results in, bytes out.

Law: pure, like all of `meshwire`. Nothing here knows a socket, a store or a user database.
"""
