"""Calls from other nodes, under `/-/peer/`: authentication, framing, and the mounting of handlers.

Every call is authenticated as a node of this cluster. A call and its handler are declared in their subject
(`meshd.rpc.peer_rpc`, `peer_handlers` modules); only this package connects them to the node's HTTP server.
"""
