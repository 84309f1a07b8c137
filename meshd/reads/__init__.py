"""Reads: all ways to an object's bytes that combine objects, views, archives, peers and origins.

This package sits above the subjects it combines; nothing below it imports it.
"""
