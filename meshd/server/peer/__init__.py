"""Calls from other nodes, under `/-/peer/`: authentication, framing, and the mounting of handlers.

Law: every call is authenticated as a node of this cluster. What a call is and what answers it is declared
in its subject (`meshd.rpc.peer_rpc`, `peer_handlers` modules); only this package knows aiohttp.
"""
