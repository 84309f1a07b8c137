"""Core: values and messages that all subjects share: errors, addresses, documents, object I/O types.

Core decides no permissions and calls no other node. Code belongs here only if several subjects need it
and it depends on none of them.
"""
