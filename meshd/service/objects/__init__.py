"""Objects as S3's clients meet them: read, written, copied, listed, deleted, uploaded in parts.

Law: a write is visible when it is durable and every digest matched; a read holds what it opened. Views,
archives' members and buckets with origins are other ways to find an object, behind the same door.
"""
