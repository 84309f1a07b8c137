"""Reads from other nodes: objects by name, bytes by ETag, documents, frames and listings.

Services see one mesh: this package decides which node is asked first and which one next. A single node
makes no calls. `reads.peer_read_service` answers the calls of other nodes.
"""
