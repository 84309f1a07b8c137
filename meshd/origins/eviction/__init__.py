"""Eviction: the policy of the cache.

Law: pure and deterministic. Nothing here reads a disk, a socket, a clock or a random number: events come
in as arguments, evictions go out as data. It imports the standard library only, so the cache simulator
(`meshtools.cache_simulator`) runs the same code on traces of reads, anywhere.
"""
