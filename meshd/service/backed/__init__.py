"""Buckets that are backed by an origin: read through a cache, written through or behind.

Law: what is cached can always be had again; what cannot, lies in the durable store until the origin has it.
"""
