"""Scrubbing and repair: find damaged data, fetch intact copies from other owners, count missing replicas.

Law: runs in the background, at a bounded rate, and yields to client requests.
"""
