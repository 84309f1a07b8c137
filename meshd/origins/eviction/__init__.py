"""Eviction: the policy of the cache, and a simulator that runs the same code on traces.

Law: pure and deterministic. Nothing here reads a disk, a socket, a clock or a random number: events come
in as arguments, evictions go out as data. Imports the standard library only, so `mesh cache simulate`
runs anywhere. A policy is one class and one entry of `simulator.POLICIES`.
"""
