"""The Kubernetes API as the operator uses it: client, events and leader election.

Law: I/O without decisions; every call passes the operator's own permission tables.
"""
