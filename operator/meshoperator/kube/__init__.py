"""The Kubernetes API as the operator uses it: client, events, leader election and CRD discovery.

Law: I/O without decisions; every call passes the operator's own permission tables.
"""
