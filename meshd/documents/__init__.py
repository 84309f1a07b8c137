"""Shared documents (plans, snapshots, assets, indexes): inventory, administration, garbage collection.

A document that may still be used is kept; `gc_policy` decides from last use and references what is
removed. `core.document_store` reads and writes documents, `peer_reads.remote_documents` reaches other
nodes.
"""
