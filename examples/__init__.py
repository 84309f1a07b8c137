"""Programs that train, each of one file: what to copy from into your own.

Law: only `meshsdk`'s public names and torch; nothing here is imported by the product. Each prints samples/s,
the share of its time that it waited for data, and a hash of what it saw.
"""
