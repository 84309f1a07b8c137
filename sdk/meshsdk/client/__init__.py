"""The S3 client and everything below it: transport, connections, retries, routing, credentials.

Law: lowest package of the SDK; it imports `errors`, `byte_sizes` and `meters` only, and knows no
dataset, loader or command. Every request here is idempotent unless it says otherwise.
"""
