"""Buckets: create, find, list and delete; settings, lifecycle and replication factor.

The control store holds the buckets. A change is known on every node that answers before the client gets
its response. `objects.lifecycle_rules` decides what expires.
"""
